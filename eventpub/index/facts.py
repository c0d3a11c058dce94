"""Facts of one shard: JSON by name, written in one batch with the data that they describe."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eventpub.errors import StateError
from eventpub.index.database import Database, Items

_TIMES_SETTLE = 86_400_000_000
"""µs: the most by which times read in two zones differ."""
_FLAGS = ("skips", "refusals", "rewrites")

Partition = tuple[str, int]
"""Topic and partition number."""
Offsets = dict[Partition, int]

MISSING_MARKERS = "unmarked"
"""This fact's name on disk, kept for compatibility."""
Range = tuple[int, int]
"""First offset of related records, and the offset after the last."""


_NAMES = {"app": "app.id", "topic": "sink.topic", "table": "the table"}
_RENAMED = 'if app.id was changed: app.former_ids = ["{}"]; '
_MOVED = (
    "if sink.topic was changed, and only new events are to be published there: set"
    " sink.accept_topic_id to the new topic's id, which `eventpub doctor` shows; "
)
_OTHER_FOLDER = (
    "set app.state_dir to another folder, or remove this one: what was published is read back from"
    " the topic"
)
_OTHER_TABLE = (
    "another table needs an app.id, an app.state_dir and a sink.topic of its own; if only the table"
    " or its database was renamed, remove this folder: what was published is read back from the"
    " topic"
)


def read_facts(items: Items) -> dict[str, Any]:
    return {key[1:].decode(): json.loads(value) for key, value in items(b"m")}


class Facts:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._facts = read_facts(database.items)

    @property
    def is_new(self) -> bool:
        """Nothing was ever written: the index was lost, or this is the first start."""
        return "offsets" not in self._facts

    @property
    def offsets(self) -> Offsets:
        """Up to where the topics are folded into this index."""
        return dict(flat_of(self._facts.get("offsets", {})))

    @property
    def written(self) -> dict[Partition, Range]:
        """Offset range of the latest publication, where an offset came from one."""
        return self._ranges("written")

    @property
    def missing_markers(self) -> dict[Partition, Range]:
        """Published ranges that may be lost; restore them before anything else."""
        return self._ranges(MISSING_MARKERS)

    @property
    def topics(self) -> dict[str, str]:
        """Kafka's ids of the topics that the offsets belong to, if known."""
        return dict(self._facts.get("topics", {}))

    @property
    def reads_everywhere(self) -> bool:
        """Whether the next fold must read all partitions for this shard's aggregates."""
        return bool(self._facts.get("everywhere"))

    @property
    def position(self) -> int | None:
        """Everything created up to here is published, held, or skipped; µs."""
        return self._facts.get("position")

    @property
    def baseline(self) -> int | None:
        """Events created up to here count as published; µs."""
        return self._facts.get("baseline")

    @property
    def forgotten(self) -> list[int]:
        """Baselines of the former indexes, in order, if they differ; until `decide_baseline`."""
        return list(self._facts.get("forgotten", ()))

    @property
    def dead_run(self) -> int:
        """Dead letters since the last published event."""
        return int(self._facts.get("dead_run", 0))

    @property
    def undecided(self) -> tuple[bool, int, bool] | None:
        """Set until it is decided whether a new or truncated shard needs a baseline.

        Returns:
            Whether the topic was found truncated; `create_time` of the newest event read back, µs;
            whether all that the index knows was read back. None: decided.
        """
        found = self._facts.get("undecided")
        return None if found is None else (bool(found[0]), int(found[1]), bool(found[2]))

    @property
    def chunk_bytes(self) -> int | None:
        """Initial transaction size, since larger ones took too long."""
        return self._facts.get("chunk_bytes")

    @property
    def has_contents(self) -> bool:
        """Whether the contents of all versions on the topic are known."""
        return bool(self._facts.get("contents"))

    # -- writes ----------------------------------------------------------------------------------

    def note_contents(self, are_kept: bool) -> None:
        self._note({"contents": are_kept})

    def begin(self, baseline: int | None) -> None:
        """Write a new index's first facts; `baseline` is final after the first full fold."""
        self._note(merged([], (), baseline, lambda *_: 0))

    def keep_times(self, read_as: str, now: int) -> None:
        """Record how `create_time` is read; after a change, older times are not compared."""
        times = self._facts["times"]
        if times["read_as"] == read_as:
            return
        since = times["since"]
        if times["read_as"] is not None:  # rows read before may now have another time
            since = now + _TIMES_SETTLE
        self._note({"times": {"read_as": read_as, "since": since}})

    def forget_times(self, now: int) -> None:
        """Rows may have been published of which nothing is known any more."""
        times = {**self._facts["times"], "since": now}
        self._note({"times": times})

    def note_truncated(self, truncated: bool, newest: int) -> None:
        """Record what a fold found, before its offsets move on; see `undecided`."""
        before = self.undecided
        if before is None and truncated:
            before = (False, 0, False)
        if before is not None:
            self._note({"undecided": [truncated or before[0], max(newest, before[1]), before[2]]})

    def decide_baseline(self, baseline: int | None) -> None:
        """End `undecided`; None leaves the baseline as it is."""
        facts: dict[str, Any] = {"undecided": None, "forgotten": []}
        if baseline is not None:
            facts["baseline"] = baseline
        self._note(facts)

    def note_chunk_bytes(self, size: int | None) -> None:
        self._note({"chunk_bytes": size})

    def moved_to(self, offsets: Mapping[Partition, int]) -> None:
        self._note(self._moved(offsets))

    def note_topics(self, ids: Mapping[str, str], made_again: Collection[str]) -> None:
        """Record the topics' ids; drop the offsets of recreated ones, which are void."""
        facts: dict[str, Any] = {"topics": {**self.topics, **ids}}
        for name in ("offsets", "written", MISSING_MARKERS):
            kept = {t: p for t, p in self._facts.get(name, {}).items() if t not in made_again}
            facts[name] = kept
        self._note(facts)

    def has_read_everywhere(self, own: Collection[Partition]) -> None:
        """From now on, the shard's own partitions are enough."""
        facts: dict[str, Any] = {"everywhere": False}
        for name, ranges in (("written", self.written), (MISSING_MARKERS, self.missing_markers)):
            facts[name] = nested_of({p: r for p, r in ranges.items() if p in own})
        facts["offsets"] = nested_of({p: at for p, at in self.offsets.items() if p in own})
        self._note(facts)

    def note_missing_markers(self, written: Mapping[Partition, Range]) -> None:
        """Record ranges, published and known here, that turned out not to be visible."""
        missing_markers = nested_of({**self.missing_markers, **written})
        self._note({MISSING_MARKERS: missing_markers})

    def restored(self) -> None:
        """The ranges with missing markers are visible now, there or later: fold them again."""
        before = self.offsets
        starts = {
            p: first for p, (first, _) in self.missing_markers.items() if before.get(p, 0) > first
        }
        facts = self._moved(starts)
        self._note(facts | {MISSING_MARKERS: {}})

    def _moved(
        self,
        offsets: Mapping[Partition, int],
        written: Mapping[Partition, Range] | None = None,
    ) -> dict[str, Any]:
        before = self.offsets
        moved = {place for place, offset in offsets.items() if before.get(place) != offset}
        ranges = self.written
        kept = {place: w for place, w in ranges.items() if place not in moved}
        for place, (first, end) in (written or {}).items():
            # written where a marker was due: one transaction with the records before, to the broker
            joined = place in ranges and ranges[place][1] == first
            kept[place] = (ranges[place][0] if joined else first, end)
        return {"offsets": nested_of({**before, **offsets}), "written": nested_of(kept)}

    def _ranges(self, fact: str) -> dict[Partition, Range]:
        found = flat_of(self._facts.get(fact, {}))
        return {partition: (first, end) for partition, (first, end) in found}

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Write facts if one has changed."""
        if any(self._facts.get(name) != value for name, value in facts.items()):
            self._write(self._db.new_batch(), facts)

    def _write(self, batch: Any, facts: Mapping[str, Any]) -> None:
        if self.is_new:
            facts = {"identity": self._facts["identity"], **facts}
        for name, value in facts.items():
            batch.put(b"m" + name.encode(), json.dumps(value).encode())
        self._db.write(batch)
        self._facts.update(facts)


def nested_of(by_partition: Mapping[Partition, Any]) -> dict[str, dict[str, Any]]:
    """By topic, then partition, for JSON."""
    nested: dict[str, dict[str, Any]] = {}
    for (topic, partition), value in by_partition.items():
        nested.setdefault(topic, {})[str(partition)] = value
    return nested


def flat_of(nested: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Partition, Any]]:
    for topic, partitions in nested.items():
        for partition, value in partitions.items():
            yield (topic, int(partition)), value


def merged(
    former: Sequence[Mapping[str, Any] | None],
    own: Collection[Partition],
    baseline: int | None,
    settled: Callable[[int | None, int], int],
) -> dict[str, Any]:
    """Facts of an index that takes over several former ones.

    Args:
        former: facts of each; None: it is lost, to be read back from the topic.
        settled: called if baselines differ, with the position and the highest baseline; returns up
            to when all former indexes have published everything, µs.
    """
    there = [facts for facts in former if facts is not None]
    moved: dict[str, Any] = {}
    for name in ("offsets", "written", MISSING_MARKERS):
        found = (item for facts in there for item in flat_of(facts.get(name, {})))
        moved[name] = nested_of(
            {partition: known for partition, known in found if partition in own}
        )
    topics = [facts["topics"] for facts in there if "topics" in facts]
    if topics:
        moved["topics"] = {name: known for of in topics for name, known in of.items()}
    for name in _FLAGS:
        said = [facts[name] for facts in there if name in facts]
        if said:
            moved[name] = any(said)
    moved["contents"] = bool(former) and all((facts or {}).get("contents") for facts in former)
    positions = [None if facts is None else facts.get("position") for facts in former]
    known = [position for position in positions if position is not None]
    if known and len(known) == len(positions):
        moved["position"] = min(known)
    of_each = [(facts or {}).get("baseline") or baseline or 0 for facts in former]
    lowest, highest = min(of_each, default=baseline or 0), max(of_each, default=baseline or 0)
    if lowest < highest:
        highest = max(lowest, min(highest, settled(moved.get("position"), highest)))
        moved["forgotten"] = of_each
    moved |= {"baseline": highest or None, "undecided": [False, 0, not former]}
    return moved | {"times": _times(there)}


def _times(there: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kept_by = [facts["times"] for facts in there if facts]  # else nothing was written there yet
    since = [t["since"] for t in kept_by if t["since"] is not None]
    read_as = {t["read_as"] for t in kept_by} or {None}
    return {
        "read_as": read_as.pop() if len(read_as) == 1 else "several",
        "since": max(since, default=None),
    }


def of_another(found: Mapping[str, Any], required: Mapping[str, Any], where: Path) -> StateError:
    """The error for a state of another identity; names what differs."""
    differing = [name for name in {**required, **found} if found.get(name) != required.get(name)]
    theirs, ours = (
        " and ".join(_words(name, of) for name in differing) for of in (found, required)
    )
    may_be_renamed = not {*differing} - {"app", "topic"}
    return StateError(
        "state.foreign",
        f"this state belongs to {theirs}, not to {ours}",
        where=str(where),
        suggestion=(
            _RENAMED.format(found.get("app")) if may_be_renamed and "app" in differing else ""
        )
        + (_MOVED if may_be_renamed and "topic" in differing else "")
        + ("otherwise " if may_be_renamed else "")
        + (_OTHER_TABLE if "table" in differing else _OTHER_FOLDER),
    )


def _words(name: str, identity: Mapping[str, Any]) -> str:
    value = identity.get(name)
    if name == "shard" and isinstance(value, list):
        return "shard {} of {}".format(*value)
    if name == "partitions":
        return f"{value} partitions"
    return f"{_NAMES.get(name, name)} {value!r}" if value is not None else f"no {name}"
