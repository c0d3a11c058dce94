"""A shard's index in one RocksDB directory.

Keys are one letter and the aggregate's UTF-8 bytes:

    v  last version          8 bytes, little-endian, signed; and as many: when the aggregate's rows
                             were created, as `admission.Seen` packs it
    h  open hold             packed, see `holds`
    s  skipped versions      JSON, list of [first, last]
    r  refused versions      JSON, list: below the first version, on the topic of dead letters
    x  written anew          JSON: `since`, `last` and `decided` of `admission.Rewritten`
    d  contents of a version 8 bytes for each row of it that was decided, see
                             `admission.Known.contents`; only where the table allows two of them.
                             Before the aggregate the key has the version, 16 hexadecimal digits
    m  facts of the shard    JSON, by name: offsets, position, baseline, undecided, skips, refusals,
                             rewrites, dead_run, chunk_bytes, times, contents, identity

and, not by aggregate: `c` and the number of a time bucket (8 bytes, big-endian): how many rows of
it have been accounted for (8 bytes, little-endian); `g` and a number: a mark, see `database`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eventpub.admission import (
    NO_TIME,
    Decision,
    Hold,
    Known,
    Rewritten,
    Seen,
    SkippedGap,
    after_fold,
    without,
)
from eventpub.admission.buckets import WIDTH, bucket_of
from eventpub.errors import StateError
from eventpub.index.database import (
    Changes,
    Database,
    Overlay,
    checked_marks,
    items_of,
    read_only,
)
from eventpub.index.facts import Facts, Range
from eventpub.index.former import merged
from eventpub.index.holds import Holds
from eventpub.index.identity import (
    FORMAT,
    IDENTITY,
    of_another,
    require_known_format,
)
from eventpub.index.reading import Pending, choose
from eventpub.index.values import LAST_SEEN, BucketCounts, Partition, Recent, last_and_times, packed

_MOVED_AT_ONCE = 10_000
_AGGREGATE_AT = {b"v": 1, b"h": 1, b"s": 1, b"r": 1, b"x": 1, b"d": 17}
"""Where the aggregate begins in a key, by its letter."""


class Index(Facts):
    """One shard's index, open. A context manager: `close` gives the lock back.

    Args:
        directory: made when absent.
        identity: what the index belongs to (application, topic, shard); an index of something
            else is refused, because its versions would make this topic lose events.
        adopts: says of the identity that an index was made with whether it may become this one, as
            where the application was renamed.
        lock_timeout: seconds to wait while another process has it open: a worker that was killed
            may need a moment to be gone.
        redo: where batches have journals: called with the last batch that the index contains, it
            yields the changes of the batches that follow. Writes are then kept in memory until
            `flush`, since the index must not contain a batch whose journal does not exist.

    Attributes:
        counts: how many rows of each time bucket were accounted for; see `record`.

    Raises:
        StateError: index.locked, index.newer_format, state.foreign, index.corrupt,
            index.disk_full.
    """

    def __init__(
        self,
        directory: Path,
        identity: Mapping[str, Any],
        *,
        adopts: Callable[[Mapping[str, Any]], bool] = lambda _: False,
        lock_timeout: float = 10.0,
        redo: Callable[[int | None], Iterable[Changes]] | None = None,
    ) -> None:
        self.directory = directory
        self._recent = Recent()
        below = Database(directory, lock_timeout)
        database = below if redo is None else Overlay(below)
        try:
            require_known_format(database.items(IDENTITY), directory)
            if redo is not None:
                for changes in redo(_batch_of(below)):
                    below.apply(changes)
            super().__init__(database)
            self.counts = BucketCounts(database)
            self.holds = Holds()
            for key, value in database.items(b"h"):
                self.holds.load(key[1:].decode(), value)
            self._require(identity, adopts)
        except BaseException:
            database.close()
            raise

    @property
    def size(self) -> int:
        """Bytes that it takes, on the disk and in memory for what is to come there."""
        return self._db.size

    def _require(
        self, identity: Mapping[str, Any], adopts: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        required = {"format": FORMAT, **identity}
        found = self._facts.setdefault("identity", required)
        if found != required:
            if not adopts(found):
                raise of_another(found, required, self.directory)
            self._write(self._db.new_batch(), {"identity": required})

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it and release the lock."""
        self._db.close()

    def copy_to(self, folder: Path) -> None:
        """Make a consistent copy beside publishing: links to files, where the disk has them.

        Raises:
            StateError: index.disk_full, ….
        """
        self._db.copy_to(folder)

    def end_batch(self, number: int) -> Changes:
        """Note that all of a batch is contained; the changes since `redo`, for the journal."""
        self._write(self._db.new_batch(), {"batch": number})
        assert isinstance(self._db, Overlay)
        return self._db.changes

    def flush(self) -> None:
        """Write the changes, whose journal exists now."""
        assert isinstance(self._db, Overlay)
        self._db.flush()

    def pending(self, most: int, about: Sequence[str]) -> Pending:
        """As `glance`, of the open index."""
        holds, count = choose(self.holds.values(), most, about)
        skipped = self.known(list(about)).skipped
        return Pending(holds, count, {a: list(found) for a, found in skipped.items()})

    # -- what it knows ---------------------------------------------------------------------------

    def known(self, aggregate_ids: list[str]) -> Known:
        """What is known of these aggregates; one multi-get."""
        found = self._recent.values_of(aggregate_ids, lambda ids: self._db.get_all(b"v", ids))
        last, times = last_and_times(aggregate_ids, found)
        of_skips = self._lists("skips", b"s", aggregate_ids).items()
        skipped = {a: [(first, end) for first, end in ranges] for a, ranges in of_skips}
        refused = self._lists("refusals", b"r", aggregate_ids)
        since = self._facts.get("times", {}).get("since")
        rewritten = self.rewritten(aggregate_ids)
        return Known(last, self.holds, skipped, self.baseline, refused, times, since, rewritten)

    def contents(self, events: Sequence[tuple[str, int]]) -> dict[tuple[str, int], set[bytes]]:
        """As of `admission.Known`, of some versions; those of which nothing is known are absent."""
        found = self._db.get_all(b"d", [_of_version(event) for event in events])
        return {
            event: {value[at : at + 8] for at in range(0, len(value), 8)}
            for event, value in zip(events, found, strict=True)
            if value is not None
        }

    def rewritten(self, aggregate_ids: list[str]) -> dict[str, Rewritten]:
        """Those of these aggregates of which versions were written anew."""
        read = self._lists("rewrites", b"x", aggregate_ids)
        return {
            a: Rewritten(since, last, tuple((first, end) for first, end in decided))
            for a, (since, last, decided) in read.items()
        }

    def _lists(self, fact: str, letter: bytes, aggregate_ids: list[str]) -> dict[str, list[Any]]:
        """The JSON of these aggregates, where the fact says that there is any at all."""
        if not self._facts.get(fact):
            return {}
        found = zip(aggregate_ids, self._db.get_all(letter, aggregate_ids), strict=True)
        return {a: json.loads(value) for a, value in found if value is not None}

    # -- writes ----------------------------------------------------------------------------------

    def move_from(  # noqa: PLR0913 (whose, from where, and what counts as theirs)
        self,
        directories: Iterable[Path],
        belongs: Callable[[str], bool],
        partitions: Iterable[Partition],
        baseline: int | None,
        *,
        settled: Callable[[int | None, int], int],
        adopts: Callable[[Mapping[str, Any]], bool],
        everywhere: bool = False,
    ) -> None:
        """Take over what indexes of another number of shards or partitions know of this shard's.

        To be called instead of `begin`. Until it has returned, the index counts as new. Where one
        of them is gone, what it knew is read back from the topic.

        Args:
            directories: of all the former indexes.
            belongs: whether an aggregate is this shard's.
            partitions: those that are this shard's; with `everywhere`, all.
            baseline: as in `begin`.
            settled: as of `merged`.
            adopts: says of the identity of a former index whether it may be taken over.
            everywhere: see `reads_everywhere`.

        Raises:
            StateError: index.newer_format, state.foreign, ….
        """
        former = [self._copy(directory, belongs, adopts) for directory in directories]
        facts = merged(former, set(partitions), baseline, settled)
        self._write(self._db.new_batch(), facts | {"everywhere": everywhere})

    def _copy(
        self,
        directory: Path,
        belongs: Callable[[str], bool],
        adopts: Callable[[Mapping[str, Any]], bool],
    ) -> dict[str, Any] | None:
        """Take over what another index knows of this shard's aggregates; its facts.

        None where it is gone or damaged: what was copied of it is true all the same, but how far it
        had read says nothing.
        """
        facts: dict[str, Any] = {}
        try:
            with read_only(directory) as former:
                if former is None:
                    return None
                require_known_format(items_of(former, IDENTITY, directory), directory)
                checked_marks(former, directory)
                for key, value in items_of(former, b"m", directory):
                    facts[key[1:].decode()] = json.loads(value)
                found = facts.get("identity", {})
                if facts and not adopts(found):
                    raise of_another(found, self._facts["identity"], directory)
                batch, size = self._db.new_batch(), 0
                for key, value in items_of(former, b"", directory):
                    if (at := _AGGREGATE_AT.get(key[:1])) and belongs(key[at:].decode()):
                        batch.put(key, value)
                        size += 1
                        if key[:1] == b"h":
                            self.holds.load(key[1:].decode(), value)
                    if size >= _MOVED_AT_ONCE:
                        self._db.write(batch)
                        batch, size = self._db.new_batch(), 0
                self._db.write(batch)
        except StateError as error:
            if error.code != "index.corrupt" or error.where != str(directory):
                raise
            return None
        return facts

    def record(  # noqa: PLR0913 (all that one write batch changes)
        self,
        decision: Decision,
        next_offsets: Mapping[Partition, int],
        position: int | None,
        *,
        written: Mapping[Partition, Range] | None = None,
        refused: Mapping[str, Sequence[int]] | None = None,
        dead_run: int | None = None,
        contents: Mapping[tuple[str, int], Iterable[bytes]] | None = None,
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
            contents: all that are known of each version, see `contents`.
            counted: rows of each time bucket that were accounted for since the last call.
            forget_below: buckets of smaller numbers are not needed any more.
        """
        batch = self._db.new_batch()
        if counted and forget_below is not None:
            self.counts.prune(batch, forget_below)
        for bucket, more in (counted or {}).items():
            if forget_below is not None and bucket < forget_below:
                continue
            self.counts.put(batch, bucket, self.counts.of(bucket) + more)
        put = batch.put
        values = dict(packed(decision.last, decision.times))
        for aggregate_id, value in values.items():
            put(b"v" + aggregate_id.encode(), value)
        self._put_skipped(batch, decision.skipped)
        self._put_holds(batch, decision.holds)
        self._put_contents(batch, contents or {})
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
        with self._recent.replaced_by(values):
            self._write(batch, facts)

    def set_buckets(self, rows: Mapping[int, int], forget_below: int) -> None:
        """Note how many rows time buckets have, all of which are accounted for.

        Args:
            rows: per bucket.
            forget_below: buckets of smaller numbers are not needed any more.
        """
        batch = self._db.new_batch()
        for bucket, count in rows.items():
            self.counts.put(batch, bucket, count)
        self.counts.prune(batch, forget_below)
        with self._recent.replaced_by({}):
            self._write(batch, {})

    def go_back(self, by: int | None) -> None:
        """What was created in so many µs up to the position is to be read, and counted, again.

        Args:
            by: None: nothing is known any more of what was read.
        """
        if self.position is not None:
            first = 0 if by is None else bucket_of(self.position - by)
            batch = self._db.new_batch()
            self.counts.delete_since(batch, first)
            self._write(batch, {"position": None if by is None else first * WIDTH})

    def note_skipped(self, aggregate_id: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Change which versions of an aggregate are published as late events if they turn up."""
        batch = self._db.new_batch()
        self._put_skipped(batch, {aggregate_id: list(ranges)})
        self._write(batch, {"skips": True})

    def note_dead_run(self, run: int) -> None:
        """How many dead letters came in a row; see `dead_run`."""
        if run != self.dead_run:
            self._write(self._db.new_batch(), {"dead_run": run})

    def fold_events(  # noqa: PLR0913 (all that one write batch changes)
        self,
        last: Mapping[str, int],
        versions: Mapping[str, Iterable[int]],
        offsets: Mapping[Partition, int],
        now: int,
        *,
        times: Mapping[str, Seen],
        refused: Mapping[str, Iterable[int]] | None = None,
        rewritten: Mapping[str, Rewritten] | None = None,
        contents: Mapping[tuple[str, int], set[bytes]] | None = None,
    ) -> None:
        """Take over published events that were read back from the topic.

        Args:
            last: per aggregate the highest version read.
            versions: per aggregate the versions read; they may fill a skipped gap.
            offsets: next offsets after what was read.
            now: the database's time.
            times: per aggregate of `last` when the rows read were created; `is_of_last` means the
                highest version read.
            refused: per aggregate the dead letters read whose version is below the first.
            rewritten: per aggregate what is known of it with the rows read, where that is more.
            contents: of the versions read, where they are wanted.
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
        for aggregate_id, read in times.items():
            packed = known.times.get(aggregate_id)
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
        self._fold(
            raised,
            skipped,
            offsets,
            now,
            refused=refused,
            times=seen,
            rewritten=rewritten,
            contents=contents,
        )

    def fold_gaps(
        self,
        gaps: Iterable[SkippedGap],
        offsets: Mapping[Partition, int],
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
        # what was skipped has no row
        times = {a: known.times.get(a, NO_TIME) & ~1 for a in raised}
        self._fold(raised, skipped, offsets, now, skips=bool(gaps), times=times)

    # -- inside ----------------------------------------------------------------------------------

    def _write(self, batch: Any, facts: Mapping[str, Any]) -> None:
        self._recent.forget()
        super()._write(batch, facts)

    def _fold(  # noqa: PLR0913 (all that one write batch changes)
        self,
        raised: Mapping[str, int],
        skipped: Mapping[str, list[tuple[int, int]]],
        offsets: Mapping[Partition, int],
        now: int,
        *,
        times: Mapping[str, int],
        skips: bool = False,
        refused: Mapping[str, Iterable[int]] | None = None,
        rewritten: Mapping[str, Rewritten] | None = None,
        contents: Mapping[tuple[str, int], set[bytes]] | None = None,
    ) -> None:
        batch = self._db.new_batch()
        self._add_contents(batch, contents or {})
        if refused:
            known = self.known(list(refused)).refused
            self._put_refused(batch, {a: {*known.get(a, ()), *v} for a, v in refused.items()})
        for aggregate_id, last in raised.items():
            value = LAST_SEEN.pack(last, times[aggregate_id])
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

    def see_holds_anew(self, latest: int, now: int, due: int) -> None:
        """Holds that are due later than that were seen by a wrong clock: they are as if seen now.

        Args:
            latest, now: µs.
            due: when what is seen now is tried first, µs.
        """
        anew = {
            hold.aggregate_id: replace(hold, first_seen=now, attempts=0, next_attempt=due)
            for hold in self.holds.due_after(latest)
        }
        if anew:
            batch = self._db.new_batch()
            self._put_holds(batch, anew)
            self._write(batch, {})

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

    def add_contents(self, contents: Mapping[tuple[str, int], set[bytes]]) -> None:
        """Take over contents of versions that are known."""
        batch = self._db.new_batch()
        self._add_contents(batch, contents)
        self._write(batch, {})

    def _add_contents(self, batch: Any, contents: Mapping[tuple[str, int], set[bytes]]) -> None:
        before = self.contents([*contents]) if contents else {}
        self._put_contents(batch, {e: {*before.get(e, ()), *c} for e, c in contents.items()})

    def _put_contents(
        self, batch: Any, contents: Mapping[tuple[str, int], Iterable[bytes]]
    ) -> None:
        for event, found in contents.items():
            batch.put(b"d" + _of_version(event).encode(), b"".join(sorted(found)))

    def _put_refused(self, batch: Any, refused: Mapping[str, Iterable[int]]) -> None:
        for aggregate_id, versions in refused.items():
            batch.put(b"r" + aggregate_id.encode(), json.dumps(sorted(versions)).encode())

    def _put_rewritten(self, batch: Any, rewritten: Mapping[str, Rewritten]) -> None:
        for aggregate_id, of in rewritten.items():
            value = json.dumps([of.since, of.last, of.decided]).encode()
            batch.put(b"x" + aggregate_id.encode(), value)


def _batch_of(database: Database) -> int | None:
    found = database.get(b"mbatch")
    return None if found is None else int(json.loads(found))


def _of_version(event: tuple[str, int]) -> str:
    aggregate_id, version = event
    return f"{version & (1 << 64) - 1:016x}{aggregate_id}"
