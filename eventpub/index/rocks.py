"""A shard's index in one RocksDB directory.

Keys are one letter and the aggregate's UTF-8 bytes:

    v  last version          8 bytes, little-endian, signed
    h  open hold             JSON
    s  skipped versions      JSON, list of [first, last]
    r  refused versions      JSON, list: below the first version, on the topic of dead letters
    m  facts of the shard    JSON, by name: offsets, position, baseline, skips, refusals, dead_run,
                             identity

and, not by aggregate: `c` and the number of a time bucket (8 bytes, big-endian): how many rows of
it have been accounted for (8 bytes, little-endian).

What belongs together is written in one write batch, so that after a kill the index is either before
or after a publication, never in between. The write-ahead log is not synced: after a crash of the
machine an older index comes up, and the fold brings it up to the topic.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rocksdict import AccessType, Options, Rdict, WriteBatch

from eventpub.admission import Decision, Hold, Known, SkippedGap, after_fold, without
from eventpub.errors import StateError

FORMAT = 1
_MOVED_AT_ONCE = 10_000
_LAST = struct.Struct("<q")
_BUCKET = struct.Struct(">q")

Offsets = dict[tuple[str, int], int]
"""(topic, partition) → the offset of the next record."""


class Index:
    """One shard's index, open. A context manager: `close` gives the lock back.

    Args:
        directory: made when absent.
        identity: what the index belongs to (application, topic, shard); an index of something
            else is refused, because its versions would make this topic lose events.
        lock_timeout: seconds to wait while another process has it open: a worker that was killed
            may need a moment to be gone.

    Raises:
        StateError: index.locked, index.foreign, index.corrupt, index.disk_full.
    """

    def __init__(
        self, directory: Path, identity: Mapping[str, Any], *, lock_timeout: float = 10.0
    ) -> None:
        self.directory = directory
        self._db = _open(directory, lock_timeout)
        self._facts: dict[str, Any] = {
            key[1:].decode(): json.loads(value) for key, value in self._scan(b"m")
        }
        wanted = {"format": FORMAT, **identity}
        found = self._facts.setdefault("identity", wanted)
        if found != wanted:
            self.close()
            raise StateError(
                "index.foreign",
                f"the index belongs to {found}, not to {wanted}",
                where=str(directory),
                suggestion="use another app.state_dir, or delete this directory: "
                "it is rebuilt from the topic",
            )
        self.holds: dict[str, Hold] = {
            hold.aggregate_id: hold
            for hold in (Hold(**json.loads(value)) for _, value in self._scan(b"h"))
        }

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

    @staticmethod
    def glance(directory: Path) -> tuple[list[Hold], dict[str, list[tuple[int, int]]]]:
        """Open holds, and skipped versions that have not turned up since, per aggregate.

        Of an index that another process may have open; nothing where there is none.
        """
        reader = _open_read_only(directory)
        if reader is None:
            return [], {}
        try:
            holds = [Hold(**json.loads(value)) for _, value in _items(reader, b"h")]
            skipped = {
                key[1:].decode(): [(first, last) for first, last in json.loads(value)]
                for key, value in _items(reader, b"s")
            }
            return holds, skipped
        finally:
            reader.close()

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
    def unmarked(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Published ranges that may be lost, to be restored before anything else is done."""
        return self._ranges("unmarked")

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
        return {
            _BUCKET.unpack(key[1:])[0]: _LAST.unpack(value)[0] for key, value in self._scan(b"c")
        }

    def known(self, aggregate_ids: list[str]) -> Known:
        """What is known of these aggregates; one multi-get."""
        found = self._get(b"v", aggregate_ids)
        unpack = _LAST.unpack
        last = {
            a: unpack(value)[0]
            for a, value in zip(aggregate_ids, found, strict=True)
            if value is not None
        }
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
        return Known(last, self.holds, skipped, self.baseline, refused)

    def due(self, now: int) -> list[str]:
        """Held aggregates whose next attempt is due."""
        return [a for a, hold in self.holds.items() if hold.next_attempt <= now]

    # -- what it is told -------------------------------------------------------------------------

    def begin(self, baseline: int | None) -> None:
        """Write the first facts of a new index; `baseline` as in `Known`."""
        self._write(WriteBatch(raw_mode=True), {"baseline": baseline, "offsets": {}})

    def move_from(
        self,
        directories: Iterable[Path],
        belongs: Callable[[str], bool],
        places: Iterable[tuple[str, int]],
        baseline: int | None,
    ) -> None:
        """Take over what indexes of another number of shards know of this shard's aggregates.

        To be called instead of `begin`. Until it has returned, the index counts as new. Where one
        of them is gone, what it knew is read back from the topic.

        Args:
            directories: of all the former indexes.
            belongs: whether an aggregate is this shard's.
            places: topics and partitions that are this shard's.
            baseline: as in `begin`.
        """
        wanted = set(places)
        offsets: dict[str, dict[str, Any]] = {}
        positions: list[int | None] = []
        ranges: dict[str, dict[str, dict[str, Any]]] = {"written": {}, "unmarked": {}}
        flags: dict[str, Any] = {}
        for directory in directories:
            former = _open_read_only(directory)
            if former is None:
                positions.append(None)
                continue
            position = None
            batch, size = WriteBatch(raw_mode=True), 0
            items: Any = former.items()
            for key, value in items:
                if key[:1] == b"m":
                    name, fact = key[1:].decode(), json.loads(value)
                    if name == "offsets" or name in ranges:
                        target = offsets if name == "offsets" else ranges[name]
                        for topic, numbers in fact.items():
                            for number, known in numbers.items():
                                if (topic, int(number)) in wanted:
                                    target.setdefault(topic, {})[number] = known
                    elif name == "position":
                        position = fact
                    elif name in {"skips", "refusals"}:
                        flags[name] = flags.get(name) or fact
                    elif name == "baseline" and fact is not None:
                        baseline = max(baseline or 0, fact)
                elif key[:1] in {b"v", b"h", b"s", b"r"} and belongs(key[1:].decode()):
                    batch.put(key, value)
                    size += 1
                    if key[:1] == b"h":
                        hold = Hold(**json.loads(value))
                        self.holds[hold.aggregate_id] = hold
                if size >= _MOVED_AT_ONCE:
                    self._put(batch)
                    batch, size = WriteBatch(raw_mode=True), 0
            self._put(batch)
            former.close()
            positions.append(position)
        known = [p for p in positions if p is not None]
        facts: dict[str, Any] = {"baseline": baseline, "offsets": offsets, **ranges, **flags}
        if known and len(known) == len(positions):
            facts["position"] = min(known)
        self._write(WriteBatch(raw_mode=True), facts)

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
        """
        batch = WriteBatch(raw_mode=True)
        for bucket, more in (counted or {}).items():
            self._put_bucket(batch, bucket, self.rows_of(bucket) + more)
        pack = _LAST.pack
        for aggregate_id, last in decision.last.items():
            batch.put(b"v" + aggregate_id.encode(), pack(last))
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
        for bucket in self.buckets:
            if bucket < forget_below:
                batch.delete(b"c" + _BUCKET.pack(bucket))
        self._write(batch, {})

    def fold_events(
        self,
        last: Mapping[str, int],
        versions: Mapping[str, Iterable[int]],
        offsets: Mapping[tuple[str, int], int],
        now: int,
        refused: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        """Take over published events that were read back from the topic.

        Args:
            last: per aggregate the highest version read.
            versions: per aggregate the versions read; they may fill a skipped gap.
            offsets: next offsets after what was read.
            now: the database's time.
            refused: per aggregate the dead letters read whose version is below the first.
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
        self._fold(raised, skipped, offsets, now, refused=refused)

    def fold_gaps(
        self,
        gaps: Iterable[SkippedGap],
        offsets: Mapping[tuple[str, int], int],
        now: int,
    ) -> None:
        """Take over recorded skips that were read back from the topic of gaps.

        They come before the events of the same fold: once the events above a skip have raised the
        last version, a skip below it would no longer be told from one that was filled since.
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
        self._fold(raised, skipped, offsets, now, skips=bool(gaps))

    def moved_to(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Note how far a fold has read where it found nothing to take over."""
        self._write(WriteBatch(raw_mode=True), self._moved(offsets))

    def note_unmarked(self, written: Mapping[tuple[str, int], tuple[int, int]]) -> None:
        """These ranges, published and known here, have turned out to be not visible."""
        unmarked = _nested({**self.unmarked, **written})
        self._write(WriteBatch(raw_mode=True), {"unmarked": unmarked})

    def resolved(self, request_id: str) -> int | None:
        """Which version a user's request was found to mean when it was done first."""
        found: int | None = self._facts.get("resolved", {}).get(request_id)
        return found

    def resolve(self, request_id: str, version: int, requests: Iterable[str]) -> None:
        """Remember it for as long as it is one of these requests."""
        kept = {r: v for r, v in self._facts.get("resolved", {}).items() if r in set(requests)}
        self._write(WriteBatch(raw_mode=True), {"resolved": {**kept, request_id: version}})

    def restored(self) -> None:
        """What was unmarked is visible now: there or behind, from where it is folded again."""
        before = self.offsets
        starts = {p: first for p, (first, _) in self.unmarked.items() if before.get(p, 0) > first}
        facts = self._moved(starts)
        self._write(WriteBatch(raw_mode=True), facts | {"unmarked": {}})

    def set_baseline(self, baseline: int) -> None:
        """Events created at or before count as published from now on."""
        self._write(WriteBatch(raw_mode=True), {"baseline": baseline})

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
    ) -> None:
        batch = WriteBatch(raw_mode=True)
        if refused:
            before = self.known(list(refused)).refused
            self._put_refused(batch, {a: {*before.get(a, ()), *v} for a, v in refused.items()})
        for aggregate_id, last in raised.items():
            batch.put(b"v" + aggregate_id.encode(), _LAST.pack(last))
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
        self._write(batch, facts)

    def _put_holds(self, batch: Any, holds: Mapping[str, Hold | None]) -> None:
        for aggregate_id, hold in holds.items():
            key = b"h" + aggregate_id.encode()
            if hold is None:
                batch.delete(key)
                self.holds.pop(aggregate_id, None)
            else:
                batch.put(key, json.dumps(asdict(hold)).encode())
                self.holds[aggregate_id] = hold

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

    def rows_of(self, bucket: int) -> int:
        """How many rows of a time bucket were accounted for."""
        found: Any = self._db.get(b"c" + _BUCKET.pack(bucket))
        return 0 if found is None else int(_LAST.unpack(found)[0])

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
        try:
            self._db.write(batch)
        except Exception as error:
            raise _mapped(error, self.directory) from error

    def _get(self, prefix: bytes, aggregate_ids: list[str]) -> list[bytes | None]:
        if not aggregate_ids:
            return []
        keys: Any = [prefix + a.encode() for a in aggregate_ids]
        found: Any = self._db.get(keys)
        return list(found)

    def _scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return list(_items(self._db, prefix))


def _nested(by_place: Mapping[tuple[str, int], Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (topic, partition), value in by_place.items():
        nested.setdefault(topic, {})[str(partition)] = value
    return nested


def _items(db: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    for key, value in db.items(from_key=prefix):
        if key[:1] != prefix:
            return
        yield key, value


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
    return StateError(
        "index.corrupt",
        f"the index cannot be used: {text}",
        where=where,
        suggestion="delete this directory: it is rebuilt from the topic",
    )
