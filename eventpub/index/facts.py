"""Facts of one shard: JSON by name, written in one batch with the data that they describe."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eventpub.errors import StateError
from eventpub.index.database import Batch, Database, Items

Partition = tuple[str, int]
"""Topic and partition number."""
Offsets = dict[Partition, int]
Range = tuple[int, int]
"""First offset of related records, and the offset after the last."""

_BY_PARTITION = ("offsets", "written", "missing_markers")
FLAGS = ("has_skips", "has_refusals", "has_rewrites")

_NAMES = {"app": "app.id", "topic": "sink.topic", "table": "the table", "key": "aggregates by"}
_RENAMED = "if app.id was changed, change it back; "
_MOVED = (
    "if sink.topic was changed, and only new events are to be published there: set"
    " sink.accept_topic_id to the new topic's id, which `eventpub doctor` shows; "
)
_OTHER_FOLDER = (
    "set app.state_dir to another folder, or remove this one: what was published is read back from"
    " the topic"
)
_OTHER_KEY = (
    "by other columns of store.columns.aggregate_id the same rows are other events: use an app.id,"
    " an app.state_dir and a sink.topic of their own, or restore the columns"
)
_OTHER_TABLE = (
    "another table needs an app.id, an app.state_dir and a sink.topic of its own; if only the table"
    " or its database was renamed, remove this folder: what was published is read back from the"
    " topic"
)
_OTHERS = {"table": _OTHER_TABLE, "key": _OTHER_KEY}


@dataclass(kw_only=True, eq=False)
class Facts:
    """What an index knows beside aggregates and buckets.

    Attributes:
        is_new: nothing was ever written: the index was lost, or this is the first start.
        offsets: up to where the topics are folded into this index.
        written: offset range of the latest publication, where an offset came from one.
        missing_markers: published ranges that may be lost; restore them before anything else.
        topics: Kafka's ids of the topics that the offsets belong to, if known.
        reads_everywhere: whether the next fold must read all partitions for this shard's
            aggregates.
        position: everything created up to here is published, held, or skipped; µs.
        baseline: events created up to here count as published; µs.
        forgotten: baselines of the former indexes, in order, if they differ; until
            `decide_baseline`.
        undecided: set until it is decided whether a new or truncated shard needs a baseline:
            whether the topic was found truncated; `create_time` of the newest event read back, µs;
            whether all that the index knows was read back.
        read_as: how `create_time` was read.
        ids_as: how the identity was read, see `Layout.ids_as`.
        times_since: see `admission.Known`.
        has_contents: whether the contents of all versions on the topic are known.
        has_skips, has_refusals, has_rewrites: whether any aggregate may have some.
        dead_run: dead letters since the last published event.
        chunk_bytes: initial transaction size, since larger ones took too long.
        batch, journal: the last one, where batches have journals, and its journal's name.
        fold: what a checkpoint's first batch reports of the fold that made this index.
    """

    is_new: bool = True
    identity: dict[str, Any] = field(default_factory=dict)
    offsets: Offsets = field(default_factory=dict)
    written: dict[Partition, Range] = field(default_factory=dict)
    missing_markers: dict[Partition, Range] = field(default_factory=dict)
    topics: dict[str, str] = field(default_factory=dict)
    reads_everywhere: bool = False
    position: int | None = None
    baseline: int | None = None
    forgotten: tuple[int, ...] = ()
    undecided: tuple[bool, int, bool] | None = None
    read_as: str | None = None
    ids_as: str | None = None
    times_since: int | None = None
    has_contents: bool = False
    has_skips: bool = False
    has_refusals: bool = False
    has_rewrites: bool = False
    dead_run: int = 0
    chunk_bytes: int | None = None
    batch: int | None = None
    journal: str = ""
    fold: dict[str, Any] = field(default_factory=dict)


_NAMED = {each.name for each in fields(Facts)} - {"is_new"}


def read_facts(items: Items) -> Facts:
    found = {key[1:].decode(): json.loads(value) for key, value in items(b"m")}
    known = {name: _decoded(name, value) for name, value in found.items() if name in _NAMED}
    return Facts(**known, is_new="offsets" not in found)


def _decoded(name: str, value: Any) -> Any:
    if name in _BY_PARTITION:
        return {
            (topic, int(partition)): tuple(of) if isinstance(of, list) else of
            for topic, partitions in value.items()
            for partition, of in partitions.items()
        }
    return tuple(value) if isinstance(value, list) else value


def _encoded(name: str, value: Any) -> bytes:
    if name in _BY_PARTITION:
        nested: dict[str, dict[int, Any]] = {}
        for (topic, partition), of in value.items():
            nested.setdefault(topic, {})[partition] = of
        value = nested
    return json.dumps(value).encode()


class OpenFacts(Facts):
    """The facts of an open index; only `note` and the methods below change them."""

    def __init__(self, database: Database) -> None:
        super().__init__(**vars(read_facts(database.items)))
        self._db = database

    def note(self, **facts: Any) -> None:
        """Write facts if one has changed."""
        if self.is_new or any(getattr(self, name) != value for name, value in facts.items()):
            self._write({}, facts)

    def _write(self, batch: Batch, facts: Mapping[str, Any]) -> None:
        if self.is_new:
            facts = {"identity": self.identity, **facts}
        batch |= {b"m" + name.encode(): _encoded(name, of) for name, of in facts.items()}
        self._db.write(batch)
        vars(self).update(facts)
        self.is_new = self.is_new and "offsets" not in facts

    def begin(self, baseline: int | None) -> None:
        """Write a new index's first facts; `baseline` is final after the first full fold."""
        self.note(**merged([], (), baseline, lambda *_: 0))

    def note_truncated(self, truncated: bool, newest: int) -> None:
        """Record what a fold found, before its offsets move on; see `undecided`."""
        before = self.undecided
        if before is None and truncated:
            before = (False, 0, False)
        if before is not None:
            self.note(undecided=(truncated or before[0], max(newest, before[1]), before[2]))

    def decide_baseline(self, baseline: int | None) -> None:
        """End `undecided`; None leaves the baseline as it is."""
        baseline = self.baseline if baseline is None else baseline
        self.note(undecided=None, forgotten=(), baseline=baseline)

    def moved_to(self, offsets: Mapping[Partition, int]) -> None:
        self.note(**self._moved(offsets))

    def note_topics(self, ids: Mapping[str, str], made_again: Collection[str]) -> None:
        """Record the topics' ids; drop the offsets of recreated ones, which are void."""
        kept = self._by_partition(lambda place: place[0] not in made_again)
        self.note(topics={**self.topics, **ids}, **kept)

    def has_read_everywhere(self, own: Collection[Partition]) -> None:
        """From now on, the shard's own partitions are enough."""
        self.note(reads_everywhere=False, **self._by_partition(own.__contains__))

    def note_missing_markers(self, written: Mapping[Partition, Range]) -> None:
        """Record ranges, published and known here, that turned out not to be visible."""
        self.note(missing_markers={**self.missing_markers, **written})

    def restored(self) -> None:
        """The ranges with missing markers are visible now, there or later: fold them again."""
        before = self.offsets
        starts = {
            p: first for p, (first, _) in self.missing_markers.items() if before.get(p, 0) > first
        }
        self.note(**self._moved(starts), missing_markers={})

    def _moved(
        self,
        offsets: Mapping[Partition, int],
        written: Mapping[Partition, Range] | None = None,
    ) -> dict[str, Any]:
        before, ranges = self.offsets, self.written
        moved = {place for place, offset in offsets.items() if before.get(place) != offset}
        kept = {place: w for place, w in ranges.items() if place not in moved}
        for place, (first, end) in (written or {}).items():
            # written where a marker was due: one transaction with the records before, to the broker
            joined = place in ranges and ranges[place][1] == first
            kept[place] = (ranges[place][0] if joined else first, end)
        return {"offsets": {**before, **offsets}, "written": kept}

    def _by_partition(self, is_kept: Callable[[Partition], bool]) -> dict[str, Any]:
        return {
            name: {place: of for place, of in getattr(self, name).items() if is_kept(place)}
            for name in _BY_PARTITION
        }


def merged(
    former: Sequence[Facts | None],
    own: Collection[Partition],
    baseline: int | None,
    settled: Callable[[int | None, int], int],
    *,
    everywhere: bool = False,
) -> dict[str, Any]:
    """Facts of an index that takes over several former ones.

    Args:
        former: facts of each; None: it is lost, to be read back from the topic.
        everywhere: a partition may have aggregates of any shard.
        settled: called if baselines differ, with the position and the highest baseline; returns up
            to when all former indexes have published everything, µs.
    """
    there = [facts for facts in former if facts is not None]
    moved: dict[str, Any] = {
        name: {p: of for facts in there for p, of in getattr(facts, name).items() if p in own}
        for name in _BY_PARTITION
    }
    if any(facts.reads_everywhere for facts in there) or (everywhere and len(there) < len(former)):
        moved |= {"offsets": _offsets_of_all(former, own), "written": {}}
    moved["topics"] = {name: known for facts in there for name, known in facts.topics.items()}
    moved |= {name: any(getattr(facts, name) for facts in there) for name in FLAGS}
    is_whole = bool(former) and len(there) == len(former)
    moved["has_contents"] = is_whole and all(facts.has_contents for facts in there)
    known = [facts.position for facts in there if facts.position is not None]
    moved["position"] = min(known) if known and len(known) == len(former) else None
    baselines = [None if facts is None else facts.baseline for facts in former]
    of_each = [each or baseline or 0 for each in baselines]
    lowest, highest = min(of_each, default=baseline or 0), max(of_each, default=baseline or 0)
    if lowest < highest:
        highest = max(lowest, min(highest, settled(moved["position"], highest)))
        moved["forgotten"] = tuple(of_each)
    moved |= {"baseline": highest or None, "undecided": (False, 0, not former)}
    begun = [facts for facts in there if not facts.is_new]
    for name in ("read_as", "ids_as"):
        values = {getattr(facts, name) for facts in begun} or {None}
        moved[name] = values.pop() if len(values) == 1 else "several"
    since = [facts.times_since for facts in begun if facts.times_since is not None]
    return moved | {"times_since": max(since, default=None)}


def _offsets_of_all(
    former: Sequence[Facts | None], own: Collection[Partition]
) -> dict[Partition, int]:
    """The offsets up to which all indexes know a partition that may have any shard's aggregates.

    One that was reading all partitions knows of each only its own aggregates."""
    there = [facts for facts in former if facts is not None]
    if len(there) < len(former):
        return {}
    known = {
        p: min(f.offsets.get(p, 0) for f in there if f.reads_everywhere or p in f.offsets)
        for p in own
        if any(f.reads_everywhere or p in f.offsets for f in there)
    }
    return {place: at for place, at in known.items() if at}


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
        suggestion=(_RENAMED if may_be_renamed and "app" in differing else "")
        + (_MOVED if may_be_renamed and "topic" in differing else "")
        + ("otherwise " if may_be_renamed else "")
        + next((text for name, text in _OTHERS.items() if name in differing), _OTHER_FOLDER),
    )


def _words(name: str, identity: Mapping[str, Any]) -> str:
    value = identity.get(name)
    if name == "shard" and isinstance(value, list):
        return "shard {} of {}".format(*value)
    if name == "partitions":
        return f"{value} partitions"
    return f"{_NAMES.get(name, name)} {value!r}" if value is not None else f"no {name}"
