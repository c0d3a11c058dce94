"""A shard's index in one RocksDB directory.

Keys are one letter and the aggregate's UTF-8 bytes:

    v  last version          8 bytes, little-endian, signed; and as many: when the aggregate's rows
                             were created, as `admission.Seen` packs it. Without: written before
                             it was kept
    h  open hold             packed, see `holds` (JSON in indexes of earlier versions)
    s  skipped versions      JSON, list of [first, last]
    r  refused versions      JSON, list: below the first version, on the topic of dead letters
    x  written anew          JSON: `since`, `last` and `decided` of `admission.Rewritten`
    m  facts of the shard    JSON, by name: offsets, position, baseline, undecided, skips, refusals,
                             rewrites, unsigned, dead_run, chunk_bytes, times, identity

and, not by aggregate: `c` and the number of a time bucket (8 bytes, big-endian): how many rows of
it have been accounted for (8 bytes, little-endian); `g` and a number (8 bytes, big-endian): a mark
in what was written since the index was opened last, so that a part which is missing shows.

What belongs together is written in one write batch, so that after a kill the index is either before
or after a publication, never in between. The write-ahead log is not synced: after a crash of the
machine an older index comes up, and the fold brings it up to the topic. What must not happen is
that offsets come up newer than the versions that were read up to there: a manifest that was cut
short makes RocksDB leave out a part in the middle, and say nothing. The marks are then not numbered
without a gap.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rocksdict import AccessType, Checkpoint, Options, Rdict, WriteBatch

from eventpub.admission import (
    NO_TIME,
    Decision,
    Hold,
    Known,
    Numbers,
    Rewritten,
    Seen,
    SkippedGap,
    after_fold,
    without,
)
from eventpub.errors import StateError
from eventpub.index.holds import Holds, unpacked

FORMAT = 2
_READ = {1, FORMAT}
"""Formats that can be read. 1, of versions before the first release, has neither times nor packed
holds; such a version refuses an index of another number, instead of failing over what is in it."""
_MOVED_AT_ONCE = 10_000
_PRUNED_AT_ONCE = 10_000
_LAST = struct.Struct("<q")
_LAST_SEEN = struct.Struct("<qq")
_NEITHER = bytes(_LAST_SEEN.size)
_TIMES_SETTLE = 86_400_000_000
"""µs: by so much at most do times differ that are read in two zones."""
_NO_TIMES = {"read_as": None, "since": None}
_BUCKET = struct.Struct(">q")
_MARKED_EVERY = 1 << 20
"""Bytes between two marks: fewer than RocksDB keeps in one file."""

Offsets = dict[tuple[str, int], int]
"""(topic, partition) → the offset of the next record."""


@dataclass(frozen=True)
class Summary:
    """What an index says of its shard.

    Attributes:
        position, baseline: as of `Index`.
        low: from where a shard without an index must read again, µs; None: as `position`.
    """

    position: int | None
    low: int | None
    baseline: int | None


class Index:
    """One shard's index, open. A context manager: `close` gives the lock back.

    Args:
        directory: made when absent.
        identity: what the index belongs to (application, topic, shard); an index of something
            else is refused, because its versions would make this topic lose events.
        adopts: says of the identity that an index was made with whether it may become this one, as
            where the application was renamed.
        lock_timeout: seconds to wait while another process has it open: a worker that was killed
            may need a moment to be gone.

    Raises:
        StateError: index.locked, index.foreign, index.corrupt, index.disk_full.
    """

    def __init__(
        self,
        directory: Path,
        identity: Mapping[str, Any],
        *,
        adopts: Callable[[Mapping[str, Any]], bool] = lambda _: False,
        lock_timeout: float = 10.0,
    ) -> None:
        self.directory = directory
        self._db = _open(directory, lock_timeout)
        self._session = os.urandom(8)
        self._marks = self._since_mark = 0
        try:
            self._old_marks = _checked_marks(self._db, directory)
            self._facts: dict[str, Any] = {
                key[1:].decode(): json.loads(value) for key, value in self._scan(b"m")
            }
            self.holds = Holds()
            for key, value in self._scan(b"h"):
                self.holds.load(key[1:].decode(), value)
        except BaseException:
            self.close()
            raise
        wanted = {"format": FORMAT, **identity}
        found = self._facts.setdefault("identity", wanted)
        is_read = found.get("format") in _READ
        is_older = is_read and found == {**wanted, "format": found["format"]}
        if found != wanted and (is_older or (is_read and adopts(found))):
            self._write(WriteBatch(raw_mode=True), {"identity": wanted})
        elif found != wanted:
            self.close()
            raise StateError(
                "index.foreign",
                f"the index belongs to {found}, not to {wanted}",
                where=str(directory),
                suggestion="use another app.state_dir, or delete this directory: "
                "it is rebuilt from the topic; where app.id was changed, name the former one in"
                " app.former_ids; where sink.topic was changed, and what was published before shall"
                " not be published there, set sink.accept_topic_id to the new topic's id, which"
                " `eventpub doctor` shows",
            )
        self._pruned_below: int | None = None

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it and release the lock."""
        self._db.close()

    def copy_to(self, folder: Path) -> None:
        """Make a consistent copy beside publishing: links to files, where the disk has them.

        Raises:
            StateError: index.disk_full, ….
        """
        shutil.rmtree(folder, ignore_errors=True)
        try:
            Checkpoint(self._db).create_checkpoint(str(folder))
        except Exception as error:
            raise _mapped(error, self.directory) from error

    @staticmethod
    def glance(directory: Path) -> tuple[list[Hold], dict[str, list[tuple[int, int]]]]:
        """Open holds, and skipped versions that have not turned up since, per aggregate.

        Of an index that another process may have open; nothing where there is none.
        """
        for _ in range(5):  # files go while another process writes
            with suppress(StateError):
                return Index._glance(directory)
            time.sleep(0.05)
        return Index._glance(directory)

    @staticmethod
    def _glance(directory: Path) -> tuple[list[Hold], dict[str, list[tuple[int, int]]]]:
        reader = _open_read_only(directory)
        if reader is None:
            return [], {}
        try:
            holds = [
                unpacked(key[1:].decode(), value) for key, value in _items(reader, b"h", directory)
            ]
            skipped = {
                key[1:].decode(): [(first, last) for first, last in json.loads(value)]
                for key, value in _items(reader, b"s", directory)
            }
            return holds, skipped
        finally:
            reader.close()

    def pending(self) -> tuple[list[Hold], dict[str, list[tuple[int, int]]]]:
        """As `glance`, of the open index."""
        skipped = {
            key[1:].decode(): [(first, last) for first, last in json.loads(value)]
            for key, value in self._scan(b"s")
        }
        return [self.holds[aggregate_id] for aggregate_id in self.holds], skipped

    @staticmethod
    def summary(directory: Path) -> Summary | None:
        """Of an index that nobody has open; None where there is none, or none that can be used."""
        try:
            reader = _open_read_only(directory)
            if reader is None:
                return None
            try:
                _checked_marks(reader, directory)
                facts = {k[1:].decode(): json.loads(v) for k, v in _items(reader, b"m", directory)}
                since = [unpacked("", v).since for _, v in _items(reader, b"h", directory)]
            finally:
                reader.close()
        except StateError:
            return None
        if "offsets" not in facts:
            return None
        position = facts.get("position")
        low = None if position is None else min([position, *(at - 1 for at in since)])
        return Summary(position, low, facts.get("baseline"))

    # -- what it knows ---------------------------------------------------------------------------

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever written: lost, or the shard's first start."""
        return "offsets" not in self._facts

    @property
    def offsets(self) -> Offsets:
        """Up to where the topics are folded into this index."""
        return {
            (topic, int(partition)): offset
            for topic, partitions in self._facts.get("offsets", {}).items()
            for partition, offset in partitions.items()
        }

    @property
    def written(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Of the offsets that came from a publication: first and next offset of its records."""
        return self._ranges("written")

    @property
    def missing_markers(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Published ranges that may be lost, to be restored before anything else is done."""
        return self._ranges("unmarked")

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
    def dead_run(self) -> int:
        """How many dead letters were written since the last event that was published."""
        return int(self._facts.get("dead_run", 0))

    @property
    def buckets(self) -> dict[int, int]:
        """How many rows of each time bucket were accounted for; see `record`."""
        return self.buckets_from(0)

    def buckets_from(self, first: int) -> dict[int, int]:
        """The same of the buckets from one on."""
        found = _items(self._db, b"c", self.directory, _BUCKET.pack(max(first, 0)))
        return {_BUCKET.unpack(key[1:])[0]: _LAST.unpack(value)[0] for key, value in found}

    def known(self, aggregate_ids: list[str]) -> Known:
        """What is known of these aggregates; one multi-get."""
        found = self._get(b"v", aggregate_ids)
        last, times = _last_and_times(aggregate_ids, found)
        skipped: dict[str, list[tuple[int, int]]] = {}
        if self._facts.get("skips"):
            found = self._get(b"s", aggregate_ids)
            skipped = {
                a: [tuple(r) for r in json.loads(value)]
                for a, value in zip(aggregate_ids, found, strict=True)
                if value is not None
            }
        refused: dict[str, list[int]] = {}
        if self._facts.get("refusals"):
            found = self._get(b"r", aggregate_ids)
            refused = {
                a: json.loads(value)
                for a, value in zip(aggregate_ids, found, strict=True)
                if value is not None
            }
        since = self._facts.get("times", {}).get("since")
        rewritten = self.rewritten(aggregate_ids)
        return Known(last, self.holds, skipped, self.baseline, refused, times, since, rewritten)

    def rewritten(self, aggregate_ids: list[str]) -> dict[str, Rewritten]:
        """Those of these aggregates of which versions were written anew."""
        if not self._facts.get("rewrites"):
            return {}
        found = zip(aggregate_ids, self._get(b"x", aggregate_ids), strict=True)
        read = {a: json.loads(value) for a, value in found if value is not None}
        return {
            a: Rewritten(since, last, tuple((first, end) for first, end in decided))
            for a, (since, last, decided) in read.items()
        }

    @property
    def undecided(self) -> tuple[bool, int] | None:
        """While it is not known yet whether an index needs a baseline, since it is new, or older
        than what was cut off the topic: whether the topic was found truncated, and `create_time` of
        the newest event read back, µs. None: it is decided.
        """
        found = self._facts.get("undecided")
        return None if found is None else (bool(found[0]), int(found[1]))

    @property
    def chunk_bytes(self) -> int | None:
        """The size of a transaction to begin with, since larger ones took too long."""
        return self._facts.get("chunk_bytes")

    # -- writes ----------------------------------------------------------------------------------

    def begin(self, baseline: int | None, *, everywhere: bool = False) -> None:
        """Write the first facts of a new index; `baseline` as in `Known`, `everywhere` as there.

        Whether it stays is decided when the topic was read back once, to its end: see `undecided`.
        """
        facts: dict[str, Any] = {"baseline": baseline, "offsets": {}, "times": _NO_TIMES}
        facts["everywhere"] = everywhere
        self._write(WriteBatch(raw_mode=True), facts | {"undecided": [False, 0]})

    def keep_times(self, read_as: str, now: int) -> None:
        """What is known of times before this was not kept by this way of reading them.

        Args:
            read_as: how the store's `create_time` is read: its zone and precision.
            now: the database's time.
        """
        times = self._facts.get("times")
        if times is None:  # of an index that was made before they were kept
            since = now
        elif times["read_as"] == read_as:
            return
        elif times["read_as"] is None:
            since = times["since"]
        else:  # what was read before may be read at another time from now on
            since = now + _TIMES_SETTLE
        self._write(WriteBatch(raw_mode=True), {"times": {"read_as": read_as, "since": since}})

    def forget_times(self, now: int) -> None:
        """Rows may have been published of which nothing is known any more."""
        times = {**self._facts["times"], "since": now}
        self._write(WriteBatch(raw_mode=True), {"times": times})

    def note_truncated(self, truncated: bool, newest: int) -> None:
        """What a fold has met so far, before its offsets move on; see `undecided`."""
        before = self.undecided
        if before is None and truncated:
            before = (False, 0)
        if before is not None:
            now = (truncated or before[0], max(newest, before[1]))
            if now != before:
                self._write(WriteBatch(raw_mode=True), {"undecided": [*now]})

    def decide_baseline(self, baseline: int | None) -> None:
        """That fold has ended. `baseline`: see the property; None: it stays as it is."""
        facts: dict[str, Any] = {"undecided": None}
        if baseline is not None:
            facts["baseline"] = baseline
        self._write(WriteBatch(raw_mode=True), facts)

    def note_chunk_bytes(self, size: int | None) -> None:
        """Remember it for whoever has the shard next; None: there is no need to any more."""
        if size != self.chunk_bytes:
            self._write(WriteBatch(raw_mode=True), {"chunk_bytes": size})

    def move_from(
        self,
        directories: Iterable[Path],
        belongs: Callable[[str], bool],
        places: Iterable[tuple[str, int]],
        baseline: int | None,
        *,
        everywhere: bool = False,
    ) -> None:
        """Take over what indexes of another number of shards or partitions know of this shard's.

        To be called instead of `begin`. Until it has returned, the index counts as new. Where one
        of them is gone, what it knew is read back from the topic.

        Args:
            directories: of all the former indexes.
            belongs: whether an aggregate is this shard's.
            places: topics and partitions that are this shard's; with `everywhere`, all.
            baseline: as in `begin`.
            everywhere: see `reads_everywhere`.
        """
        wanted = set(places)
        offsets: dict[str, dict[str, Any]] = {}
        positions: list[int | None] = []
        ranges: dict[str, dict[str, dict[str, Any]]] = {"written": {}, "unmarked": {}}
        flags: dict[str, Any] = {}
        times: list[dict[str, Any] | None] = []
        for directory in directories:
            facts = self._copy(directory, belongs)
            if facts is None:
                positions.append(None)
                continue
            for name in ("offsets", *ranges):
                target = offsets if name == "offsets" else ranges[name]
                for topic, numbers in facts.get(name, {}).items():
                    for number, known_to in numbers.items():
                        if (topic, int(number)) in wanted:
                            target.setdefault(topic, {})[number] = known_to
            if "topics" in facts:
                flags["topics"] = {**flags.get("topics", {}), **facts["topics"]}
            for name in ("skips", "unsigned", "refusals", "rewrites"):
                if name in facts:
                    flags[name] = flags.get(name) or facts[name]
            if facts.get("baseline") is not None:
                baseline = max(baseline or 0, facts["baseline"])
            positions.append(facts.get("position"))
            times.append(facts.get("times"))
        known = [p for p in positions if p is not None]
        moved: dict[str, Any] = {"baseline": baseline, "offsets": offsets, **ranges, **flags}
        moved["everywhere"] = everywhere
        moved["undecided"] = [False, 0]
        if known and len(known) == len(positions):
            moved["position"] = min(known)
        kept_by = [t for t in times if t is not None]
        if len(kept_by) == len(times):  # else `keep_times` begins now
            since = [t["since"] for t in kept_by if t["since"] is not None]
            read_as = {t["read_as"] for t in kept_by} or {None}
            moved["times"] = {
                "read_as": read_as.pop() if len(read_as) == 1 else "several",
                "since": max(since, default=None),
            }
        self._write(WriteBatch(raw_mode=True), moved)

    def _copy(self, directory: Path, belongs: Callable[[str], bool]) -> dict[str, Any] | None:
        """Take over what another index knows of this shard's aggregates; its facts.

        None where it is gone or damaged: what was copied of it is true all the same, but how far it
        had read says nothing.
        """
        facts: dict[str, Any] = {}
        try:
            former = _open_read_only(directory)
            if former is None:
                return None
            try:
                _checked_marks(former, directory)
                batch, size = WriteBatch(raw_mode=True), 0
                for key, value in _items(former, b"", directory):
                    if key[:1] == b"m":
                        facts[key[1:].decode()] = json.loads(value)
                    elif key[:1] in {b"v", b"h", b"s", b"r", b"x"} and belongs(key[1:].decode()):
                        batch.put(key, value)
                        size += 1
                        if key[:1] == b"h":
                            self.holds.load(key[1:].decode(), value)
                    if size >= _MOVED_AT_ONCE:
                        self._put(batch)
                        batch, size = WriteBatch(raw_mode=True), 0
                self._put(batch)
            finally:
                former.close()
        except StateError as error:
            if error.code != "index.corrupt" or error.where != str(directory):
                raise
            return None
        return facts

    def record(
        self,
        decision: Decision,
        next_offsets: Mapping[tuple[str, int], int],
        position: int | None,
        *,
        written: Mapping[tuple[str, int], tuple[int, int]] | None = None,
        refused: Mapping[str, Sequence[int]] | None = None,
        dead_run: int | None = None,
        counted: Mapping[int, int] | None = None,
        forget_below: int | None = None,
    ) -> None:
        """Remember a decision after it was published, in one write batch.

        Args:
            decision: what was published and is pending.
            next_offsets: of the partitions that were written.
            position: see the property; never moved back here.
            written: see the property; of the same partitions.
            refused: all refused versions of the aggregates that have new ones.
            dead_run: see the property; None: nothing was published.
            counted: rows of each time bucket that were accounted for since the last call.
            forget_below: buckets of smaller numbers are not needed any more.
        """
        batch = WriteBatch(raw_mode=True)
        if counted and forget_below is not None:
            self._prune(batch, forget_below)
        for bucket, more in (counted or {}).items():
            if forget_below is not None and bucket < forget_below:
                continue
            self._put_bucket(batch, bucket, self.rows_of(bucket) + more)
        put = batch.put
        for aggregate_id, value in _packed(decision.last, decision.times):
            put(b"v" + aggregate_id.encode(), value)
        self._put_skipped(batch, decision.skipped)
        self._put_holds(batch, decision.holds)
        facts: dict[str, Any] = {}
        if next_offsets:
            facts |= self._moved(next_offsets, written or {})
        if position is not None and (self.position is None or position > self.position):
            facts["position"] = position
        if decision.skipped:
            facts["skips"] = True
        if refused:
            self._put_refused(batch, refused)
            facts["refusals"] = True
        if decision.rewritten:
            self._put_rewritten(batch, decision.rewritten)
            facts["rewrites"] = True
        if dead_run is not None and dead_run != self.dead_run:
            facts["dead_run"] = dead_run
        self._write(batch, facts)

    def set_buckets(self, rows: Mapping[int, int], forget_below: int) -> None:
        """Note how many rows time buckets have, all of which are accounted for.

        Args:
            rows: per bucket.
            forget_below: buckets of smaller numbers are not needed any more.
        """
        batch = WriteBatch(raw_mode=True)
        for bucket, count in rows.items():
            self._put_bucket(batch, bucket, count)
        self._prune(batch, forget_below)
        self._write(batch, {})

    def fold_events(
        self,
        last: Mapping[str, int],
        versions: Mapping[str, Iterable[int]],
        offsets: Mapping[tuple[str, int], int],
        now: int,
        refused: Mapping[str, Iterable[int]] | None = None,
        times: Mapping[str, Seen] | None = None,
        rewritten: Mapping[str, Rewritten] | None = None,
    ) -> None:
        """Take over published events that were read back from the topic.

        Args:
            last: per aggregate the highest version read.
            versions: per aggregate the versions read; they may fill a skipped gap.
            offsets: next offsets after what was read.
            now: the database's time.
            refused: per aggregate the dead letters read whose version is below the first.
            times: per aggregate of `last` when the rows read were created; `is_of_last` means the
                highest version read.
            rewritten: per aggregate what is known of it with the rows read, where that is more.
        """
        known = self.known(list(last))
        skipped: dict[str, list[tuple[int, int]]] = {}
        for aggregate_id, ranges in known.skipped.items():
            left = list(ranges)
            for version in versions[aggregate_id]:
                left = without(version, left)
            if left != list(ranges):
                skipped[aggregate_id] = left
        raised = {a: v for a, v in last.items() if v > known.last.get(a, v - 1)}
        seen: dict[str, int] = {}
        for aggregate_id, read in (times or {}).items():
            packed = known.times.get(aggregate_id)
            if packed is None and aggregate_id in known.last:
                continue  # of what was published before, nothing is known
            after = read if packed is None else Seen.unpacked(packed).raised(read.newest)
            if aggregate_id in raised and after.newest == read.newest:
                after = read
            elif aggregate_id in raised or (
                last[aggregate_id] == known.last.get(aggregate_id) and not read.is_of_last
            ):
                after = Seen(after.newest, False)
            if after.packed() != packed or aggregate_id in raised:
                seen[aggregate_id] = after.packed()
        for aggregate_id in seen.keys() - raised.keys():
            raised[aggregate_id] = known.last[aggregate_id]
        self._fold(raised, skipped, offsets, now, refused=refused, times=seen, rewritten=rewritten)

    def fold_gaps(
        self,
        gaps: Iterable[SkippedGap],
        offsets: Mapping[tuple[str, int], int],
        now: int,
    ) -> None:
        """Take over recorded skips that were read back from the topic of gaps.

        They come before the events of the same fold: once the events above a skip have raised the
        last version, a skip below it could not be distinguished from one that was filled.
        """
        raised: dict[str, int] = {}
        skipped: dict[str, list[tuple[int, int]]] = {}
        gaps = list(gaps)
        self._facts["skips"] = self._facts.get("skips") or bool(gaps)
        known = self.known(sorted({g.aggregate_id for g in gaps}))
        for gap in gaps:
            a, run = gap.aggregate_id, (gap.from_version, gap.to_version)
            if run[1] > known.last.get(a, run[1] - 1):
                raised[a] = max(run[1], raised.get(a, run[1]))
                skipped.setdefault(a, list(known.skipped.get(a, ())))
                if run not in skipped[a]:
                    skipped[a].append(run)
        times = {  # what was skipped has no row
            a: known.times.get(a, NO_TIME) & ~1
            for a in raised
            if a in known.times or a not in known.last
        }
        self._fold(raised, skipped, offsets, now, skips=bool(gaps), times=times)

    def fold_unsigned(self, gaps: Iterable[SkippedGap]) -> None:
        """Take over recorded skips that do not say who has written them, before those that do.

        Versions before the first release wrote none other. What follows a skip was published with
        it: these raise no last version, and those above it at the end of the fold are forgotten.
        """
        gaps = list(gaps)
        self._facts["skips"] = True  # for `known`; on the disk with what follows
        known = self.known(sorted({g.aggregate_id for g in gaps}))
        skipped: dict[str, list[tuple[int, int]]] = {}
        for gap in gaps:
            a, run = gap.aggregate_id, (gap.from_version, gap.to_version)
            if run[1] > known.last.get(a, run[1] - 1):
                runs = skipped.setdefault(a, list(known.skipped.get(a, ())))
                if run not in runs:
                    runs.append(run)
        batch = WriteBatch(raw_mode=True)
        self._put_skipped(batch, skipped)
        self._write(batch, {"skips": True, "unsigned": True})

    def settle_unsigned(self) -> None:
        """That fold has ended: forget the skips that nothing follows."""
        if not self._facts.get("unsigned"):
            return
        kept: dict[str, list[tuple[int, int]]] = {}
        skips = {k[1:].decode(): json.loads(value) for k, value in self._scan(b"s")}
        last = self.known([*skips]).last
        for aggregate_id, runs in skips.items():
            below = [(first, end) for first, end in runs if end <= last.get(aggregate_id, end - 1)]
            if len(below) < len(runs):
                kept[aggregate_id] = below
        batch = WriteBatch(raw_mode=True)
        self._put_skipped(batch, kept)
        self._write(batch, {"unsigned": False})

    def moved_to(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Note how far a fold has read where it found nothing to take over."""
        self._write(WriteBatch(raw_mode=True), self._moved(offsets))

    def note_topics(self, ids: Mapping[str, str], made_again: Collection[str]) -> None:
        """Remember the topics' ids; of those that were made again no offset means anything."""
        facts: dict[str, Any] = {"topics": {**self.topics, **ids}}
        for name in ("offsets", "written", "unmarked"):
            kept = {t: p for t, p in self._facts.get(name, {}).items() if t not in made_again}
            facts[name] = kept
        self._write(WriteBatch(raw_mode=True), facts)

    def has_read_everywhere(self, own: Collection[tuple[str, int]]) -> None:
        """From now on its own partitions are enough."""
        facts: dict[str, Any] = {"everywhere": False}
        for name, ranges in (("written", self.written), ("unmarked", self.missing_markers)):
            facts[name] = _nested({p: r for p, r in ranges.items() if p in own})
        facts["offsets"] = _nested({p: at for p, at in self.offsets.items() if p in own})
        self._write(WriteBatch(raw_mode=True), facts)

    def note_missing_markers(self, written: Mapping[tuple[str, int], tuple[int, int]]) -> None:
        """These ranges, published and known here, have turned out to be not visible."""
        missing_markers = _nested({**self.missing_markers, **written})
        self._write(WriteBatch(raw_mode=True), {"unmarked": missing_markers})

    def restored(self) -> None:
        """What missed a marker is visible now: there or behind, from where it is folded again."""
        before = self.offsets
        starts = {
            p: first for p, (first, _) in self.missing_markers.items() if before.get(p, 0) > first
        }
        facts = self._moved(starts)
        self._write(WriteBatch(raw_mode=True), facts | {"unmarked": {}})

    # -- inside ----------------------------------------------------------------------------------

    def _fold(
        self,
        raised: Mapping[str, int],
        skipped: Mapping[str, list[tuple[int, int]]],
        offsets: Mapping[tuple[str, int], int],
        now: int,
        *,
        skips: bool = False,
        refused: Mapping[str, Iterable[int]] | None = None,
        times: Mapping[str, int] | None = None,
        rewritten: Mapping[str, Rewritten] | None = None,
    ) -> None:
        batch = WriteBatch(raw_mode=True)
        if refused:
            before = self.known(list(refused)).refused
            self._put_refused(batch, {a: {*before.get(a, ()), *v} for a, v in refused.items()})
        for aggregate_id, last in raised.items():
            seen = (times or {}).get(aggregate_id)
            value = _LAST.pack(last) if seen is None else _LAST_SEEN.pack(last, seen)
            batch.put(b"v" + aggregate_id.encode(), value)
        self._put_skipped(batch, skipped)
        holds = {
            a: after_fold(self.holds[a], last, now) for a, last in raised.items() if a in self.holds
        }
        self._put_holds(batch, holds)
        facts: dict[str, Any] = self._moved(offsets)
        if skips:
            facts["skips"] = True
        if refused:
            facts["refusals"] = True
        if rewritten:
            self._put_rewritten(batch, rewritten)
            facts["rewrites"] = True
        self._write(batch, facts)

    def _put_holds(self, batch: Any, holds: Mapping[str, Hold | None]) -> None:
        for aggregate_id, hold in holds.items():
            key = b"h" + aggregate_id.encode()
            if hold is None:
                batch.delete(key)
                self.holds.remove(aggregate_id)
            else:
                batch.put(key, self.holds.put(hold))

    def _put_skipped(self, batch: Any, skipped: Mapping[str, list[tuple[int, int]]]) -> None:
        for aggregate_id, ranges in skipped.items():
            key = b"s" + aggregate_id.encode()
            if ranges:
                batch.put(key, json.dumps(ranges).encode())
            else:
                batch.delete(key)

    def _put_refused(self, batch: Any, refused: Mapping[str, Iterable[int]]) -> None:
        for aggregate_id, versions in refused.items():
            batch.put(b"r" + aggregate_id.encode(), json.dumps(sorted(versions)).encode())

    def _put_rewritten(self, batch: Any, rewritten: Mapping[str, Rewritten]) -> None:
        for aggregate_id, of in rewritten.items():
            value = json.dumps([of.since, of.last, of.decided]).encode()
            batch.put(b"x" + aggregate_id.encode(), value)

    def rows_of(self, bucket: int) -> int:
        """How many rows of a time bucket were accounted for."""
        try:
            found: Any = self._db.get(b"c" + _BUCKET.pack(bucket))
        except Exception as error:
            raise _mapped(error, self.directory) from error
        return 0 if found is None else int(_LAST.unpack(found)[0])

    def _prune(self, batch: Any, forget_below: int) -> None:
        """Delete buckets; some of them where there are very many, as an earlier version left."""
        since = self._pruned_below or 0  # what was deleted before is not passed over again
        if forget_below <= since:
            return
        found = _items(self._db, b"c", self.directory, _BUCKET.pack(since))
        for _ in range(_PRUNED_AT_ONCE):
            key, _value = next(found, (b"", b""))
            number = _BUCKET.unpack(key[1:])[0] if key else forget_below
            if number >= forget_below:
                self._pruned_below = forget_below
                return
            batch.delete(key)
        self._pruned_below = number + 1

    def _put_bucket(self, batch: Any, bucket: int, rows: int) -> None:
        batch.put(b"c" + _BUCKET.pack(bucket), _LAST.pack(rows))

    def _moved(
        self,
        offsets: Mapping[tuple[str, int], int],
        written: Mapping[tuple[str, int], tuple[int, int]] | None = None,
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
        return {"offsets": _nested({**before, **offsets}), "written": _nested(kept)}

    def _ranges(self, fact: str) -> dict[tuple[str, int], tuple[int, int]]:
        return {
            (topic, int(partition)): (first, end)
            for topic, partitions in self._facts.get(fact, {}).items()
            for partition, (first, end) in partitions.items()
        }

    def _write(self, batch: Any, facts: Mapping[str, Any]) -> None:
        if self.is_new:
            facts = {"identity": self._facts["identity"], **facts}
        for name, value in facts.items():
            batch.put(b"m" + name.encode(), json.dumps(value).encode())
        self._put(batch)
        self._facts.update(facts)

    def _put(self, batch: Any) -> None:
        size = self._since_mark + batch.size_in_bytes()
        is_marked = not self._marks or size >= _MARKED_EVERY
        if is_marked:
            for key in self._old_marks:
                batch.delete(key)
            batch.put(b"g" + _BUCKET.pack(self._marks), self._session)
        try:
            self._db.write(batch)
        except Exception as error:
            raise _mapped(error, self.directory) from error
        if is_marked:
            self._old_marks = []
        self._marks += is_marked
        self._since_mark = 0 if is_marked else size

    def _get(self, prefix: bytes, aggregate_ids: list[str]) -> list[bytes | None]:
        if not aggregate_ids:
            return []
        keys: Any = [prefix + a.encode() for a in aggregate_ids]
        try:
            found: Any = self._db.get(keys)
        except Exception as error:
            raise _mapped(error, self.directory) from error
        return list(found)

    def _scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return list(_items(self._db, prefix, self.directory))


def _packed(last: Mapping[str, int], times: Mapping[str, int]) -> Iterable[tuple[str, bytes]]:
    """The values to be stored of each aggregate of `last`."""
    if isinstance(last, Numbers) and isinstance(times, Numbers) and last.names is times.names:
        together = np.stack([last.numbers, times.numbers], 1).astype("<i8", copy=False).tobytes()
        ends = range(0, len(together), _LAST_SEEN.size)
        values = (together[at : at + _LAST_SEEN.size] for at in ends)
        return zip(last.names, values, strict=True)
    pack = _LAST_SEEN.pack
    return ((a, pack(version, times.get(a, NO_TIME))) for a, version in last.items())


def _last_and_times(
    aggregate_ids: list[str], found: list[bytes | None]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The last version of the aggregates that have one, and when their rows were created."""
    missing = None in found
    together = b"".join(value or _NEITHER for value in found) if missing else b"".join(found)  # type: ignore[arg-type]
    if len(together) == len(found) * _LAST_SEEN.size:
        numbers = np.frombuffer(together, "<i8").reshape(-1, 2)
        there = None
        if missing:
            there = np.fromiter((value is not None for value in found), bool, len(found))
        last = Numbers(aggregate_ids, numbers[:, 0], there)
        return last, Numbers(aggregate_ids, numbers[:, 1], there)
    versions, times = {}, {}
    for name, value in zip(aggregate_ids, found, strict=True):
        if value is not None:
            versions[name] = _LAST.unpack_from(value)[0]
            if len(value) == _LAST_SEEN.size:
                times[name] = _LAST_SEEN.unpack(value)[1]
    return versions, times


def _nested(by_place: Mapping[tuple[str, int], Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (topic, partition), value in by_place.items():
        nested.setdefault(topic, {})[str(partition)] = value
    return nested


def _items(
    db: Any, prefix: bytes, directory: Path, start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """All keys with a prefix; unlike `Rdict.items`, it does not end where a block is damaged."""
    items = db.iter()
    if prefix:
        items.seek(prefix + start)
    else:
        items.seek_to_first()
    while items.valid():
        key = items.key()
        if key[: len(prefix)] != prefix:
            return
        yield key, items.value()
        items.next()
    try:
        items.status()
    except Exception as error:
        raise _mapped(error, directory) from error


def _checked_marks(db: Any, directory: Path) -> list[bytes]:
    """The keys of the marks.

    Raises:
        StateError: index.corrupt: some are missing, and what was written between them.
    """
    marks = list(_items(db, b"g", directory))
    numbers = [_BUCKET.unpack(key[1:])[0] for key, _ in marks]
    if numbers != list(range(len(marks))) or len({session for _, session in marks}) > 1:
        raise _corrupt("a part of what was written is missing", directory)
    return [key for key, _ in marks]


def set_aside(directory: Path) -> Path:
    """Move a damaged index out of the way of a new one; where to. An older one there is removed."""
    aside = directory.with_name(f"{directory.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):
        directory.rename(aside)
    return aside


def _open_read_only(directory: Path) -> Rdict | None:
    """An index beside whoever has it open; None where there is none."""
    if not (directory / "CURRENT").exists():
        return None
    try:
        return Rdict(str(directory), Options(raw_mode=True), access_type=AccessType.read_only())
    except Exception as error:
        raise _mapped(error, directory) from error


def _open(directory: Path, lock_timeout: float) -> Rdict:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_keep_log_file_num(2)
    options.set_max_open_files(256)
    options.set_write_buffer_size(16 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    directory.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + lock_timeout
    while True:
        try:
            return Rdict(str(directory), options)
        except Exception as error:
            mapped = _mapped(error, directory)
            if mapped.code != "index.locked" or time.monotonic() > deadline:
                raise mapped from error
        time.sleep(0.05)


def _mapped(error: Exception, directory: Path) -> StateError:
    text = str(error)
    where = str(directory)
    if "lock" in text.lower() and ("LOCK" in text or "No locks" in text):
        return StateError(
            "index.locked",
            "another process has the index open",
            where=where,
            suggestion="stop the other publisher, or give this one another app.state_dir",
            retriable=True,
        )
    if "No space left" in text or "Disk quota" in text:
        return StateError(
            "index.disk_full",
            "no space is left for the index",
            where=where,
            suggestion="free space on the disk of app.state_dir; publishing goes on after it",
            retriable=True,
        )
    if "Permission denied" in text or "Read-only file system" in text:
        return StateError(
            "index.not_writable",
            "the index cannot be written",
            where=where,
            suggestion="give the publisher's user write access to app.state_dir",
        )
    if "Corruption" in text or "No such file" in text:
        return _corrupt(text, directory)
    return StateError(
        "index.unusable",
        f"the index cannot be used: {text}",
        where=where,
        suggestion="check the disk and the permissions of this directory; if the error stays, "
        "stop the publisher and delete it: it is rebuilt from the topic",
    )


def _corrupt(text: str, directory: Path) -> StateError:
    return StateError(
        "index.corrupt",
        f"the index is damaged: {text}",
        where=str(directory),
        suggestion="start the publisher: it sets a damaged index aside and rebuilds it from the "
        "topic",
    )
