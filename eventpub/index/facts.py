"""The facts of one shard: offsets, position, baseline, and what a fold or a restart must know.

By name, as JSON; read once when the index is opened. They are written together with what they are
about, in one write batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eventpub.errors import StateError
from eventpub.index.database import Database, Items

_TIMES_SETTLE = 86_400_000_000
"""µs: by so much at most do times differ that are read in two zones."""
_FLAGS = ("skips", "refusals", "rewrites")

Partition = tuple[str, int]
"""A topic and the number of one of its partitions."""
Offsets = dict[Partition, int]
"""The offset of the next record."""

MISSING_MARKERS = "unmarked"
"""The name of this fact on the disk, as it has always been."""
Range = tuple[int, int]
"""The first offset of records that belong together, and the next after their last."""


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
    """All facts of an index, by name."""
    return {key[1:].decode(): json.loads(value) for key, value in items(b"m")}


class Facts:
    """The facts of an open index."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._facts = read_facts(database.items)

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever written: lost, or the shard's first start."""
        return "offsets" not in self._facts

    @property
    def offsets(self) -> Offsets:
        """Up to where the topics are folded into this index."""
        return dict(flat_of(self._facts.get("offsets", {})))

    @property
    def written(self) -> dict[Partition, Range]:
        """Of the offsets that came from a publication: first and next offset of its records."""
        return self._ranges("written")

    @property
    def missing_markers(self) -> dict[Partition, Range]:
        """Published ranges that may be lost, to be restored before anything else is done."""
        return self._ranges(MISSING_MARKERS)

    @property
    def topics(self) -> dict[str, str]:
        """Kafka's ids of the topics that the offsets belong to, as far as they are known."""
        return dict(self._facts.get("topics", {}))

    @property
    def reads_everywhere(self) -> bool:
        """Whether the next fold has to read all partitions for this shard's aggregates."""
        return bool(self._facts.get("everywhere"))

    @property
    def position(self) -> int | None:
        """Everything created at or before is published, held here, or skipped; µs."""
        return self._facts.get("position")

    @property
    def baseline(self) -> int | None:
        """Events created at or before count as published; µs."""
        return self._facts.get("baseline")

    @property
    def forgotten(self) -> list[int]:
        """Where they differed, the baselines of the indexes that this one has taken over, in their
        order, until `decide_baseline`."""
        return list(self._facts.get("forgotten", ()))

    @property
    def dead_run(self) -> int:
        """How many dead letters were written since the last event that was published."""
        return int(self._facts.get("dead_run", 0))

    @property
    def undecided(self) -> tuple[bool, int, bool] | None:
        """While it is not known yet whether an index needs a baseline, since it is new, or older
        than what was cut off the topic: whether the topic was found truncated, `create_time` of the
        newest event read back, µs, and whether all that it knows was read back. None: decided.
        """
        found = self._facts.get("undecided")
        return None if found is None else (bool(found[0]), int(found[1]), bool(found[2]))

    @property
    def chunk_bytes(self) -> int | None:
        """The size of a transaction to begin with, since larger ones took too long."""
        return self._facts.get("chunk_bytes")

    @property
    def has_contents(self) -> bool:
        """Whether it knows the contents of all versions that are on the topic."""
        return bool(self._facts.get("contents"))

    # -- writes ----------------------------------------------------------------------------------

    def note_contents(self, are_kept: bool) -> None:
        """Whether contents are kept from now on; see `has_contents`."""
        self._note({"contents": are_kept})

    def begin(self, baseline: int | None) -> None:
        """Write the first facts of a new index; `baseline` as in `Known`.

        Whether it stays is decided when the topic was read back once, to its end: see `undecided`.
        """
        self._note(merged([], (), baseline, lambda *_: 0))

    def keep_times(self, read_as: str, now: int) -> None:
        """What is known of times before this was not kept by this way of reading them.

        Args:
            read_as: how the store's `create_time` is read: its zone and precision.
            now: the database's time.
        """
        times = self._facts["times"]
        if times["read_as"] == read_as:
            return
        since = times["since"]
        if times["read_as"] is not None:  # what was read before may be read at another time now
            since = now + _TIMES_SETTLE
        self._note({"times": {"read_as": read_as, "since": since}})

    def forget_times(self, now: int) -> None:
        """Rows may have been published of which nothing is known any more."""
        times = {**self._facts["times"], "since": now}
        self._note({"times": times})

    def note_truncated(self, truncated: bool, newest: int) -> None:
        """What a fold has met so far, before its offsets move on; see `undecided`."""
        before = self.undecided
        if before is None and truncated:
            before = (False, 0, False)
        if before is not None:
            self._note({"undecided": [truncated or before[0], max(newest, before[1]), before[2]]})

    def decide_baseline(self, baseline: int | None) -> None:
        """That fold has ended. `baseline`: see the property; None: it stays as it is."""
        facts: dict[str, Any] = {"undecided": None, "forgotten": []}
        if baseline is not None:
            facts["baseline"] = baseline
        self._note(facts)

    def note_chunk_bytes(self, size: int | None) -> None:
        """Remember it for the shard's next owner; None: it is no longer needed."""
        self._note({"chunk_bytes": size})

    def moved_to(self, offsets: Mapping[Partition, int]) -> None:
        """Note how far a fold has read where it found nothing to take over."""
        self._note(self._moved(offsets))

    def note_topics(self, ids: Mapping[str, str], made_again: Collection[str]) -> None:
        """Remember the topics' ids; of those that were made again no offset means anything."""
        facts: dict[str, Any] = {"topics": {**self.topics, **ids}}
        for name in ("offsets", "written", MISSING_MARKERS):
            kept = {t: p for t, p in self._facts.get(name, {}).items() if t not in made_again}
            facts[name] = kept
        self._note(facts)

    def has_read_everywhere(self, own: Collection[Partition]) -> None:
        """From now on its own partitions are enough."""
        facts: dict[str, Any] = {"everywhere": False}
        for name, ranges in (("written", self.written), (MISSING_MARKERS, self.missing_markers)):
            facts[name] = nested_of({p: r for p, r in ranges.items() if p in own})
        facts["offsets"] = nested_of({p: at for p, at in self.offsets.items() if p in own})
        self._note(facts)

    def note_missing_markers(self, written: Mapping[Partition, Range]) -> None:
        """These ranges, published and known here, have turned out to be not visible."""
        missing_markers = nested_of({**self.missing_markers, **written})
        self._note({MISSING_MARKERS: missing_markers})

    def restored(self) -> None:
        """What missed a marker is visible now: there or behind, from where it is folded again."""
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
        """The facts after the offsets of some partitions have moved, by a publication or not."""
        before = self.offsets
        moved = {place for place, offset in offsets.items() if before.get(place) != offset}
        ranges = self.written
        kept = {place: w for place, w in ranges.items() if place not in moved}
        for place, (first, end) in (written or {}).items():
            # written where a marker was to be: one transaction with what is before, to the broker
            joined = place in ranges and ranges[place][1] == first
            kept[place] = (ranges[place][0] if joined else first, end)
        return {"offsets": nested_of({**before, **offsets}), "written": nested_of(kept)}

    def _ranges(self, fact: str) -> dict[Partition, Range]:
        found = flat_of(self._facts.get(fact, {}))
        return {partition: (first, end) for partition, (first, end) in found}

    def _note(self, facts: Mapping[str, Any]) -> None:
        """Write facts, where one is new or has changed."""
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
    """By topic and then by partition, as JSON can have it."""
    nested: dict[str, dict[str, Any]] = {}
    for (topic, partition), value in by_partition.items():
        nested.setdefault(topic, {})[str(partition)] = value
    return nested


def flat_of(nested: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Partition, Any]]:
    """What `nested_of` was given."""
    for topic, partitions in nested.items():
        for partition, value in partitions.items():
            yield (topic, int(partition)), value


def merged(
    former: Sequence[Mapping[str, Any] | None],
    own: Collection[Partition],
    baseline: int | None,
    settled: Callable[[int | None, int], int],
) -> dict[str, Any]:
    """The facts of an index that takes over what all of these know of its shard.

    Args:
        former: the facts of each; None: it is gone, and what it knew is read back from the topic.
        own: partitions that are the shard's.
        baseline: of a new index.
        settled: asked where some have forgotten more than others, with the position and the highest
            baseline: up to when all of them have published everything, µs.
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
    """Since when times are kept, and how they are read."""
    kept_by = [facts["times"] for facts in there if facts]  # else nothing was written there yet
    since = [t["since"] for t in kept_by if t["since"] is not None]
    read_as = {t["read_as"] for t in kept_by} or {None}
    return {
        "read_as": read_as.pop() if len(read_as) == 1 else "several",
        "since": max(since, default=None),
    }


def of_another(found: Mapping[str, Any], required: Mapping[str, Any], where: Path) -> StateError:
    """What differs between the identity that a state has and the one that it must have."""
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
