"""A shard's index in one RocksDB directory.

Keys are one letter and the aggregate's UTF-8 bytes:

    v  last version          8 bytes, little-endian, signed; then 8 bytes: packed `admission.Seen`
    h  open hold             packed, see `values`
    s  skipped versions      JSON, list of [first, last]
    r  refused versions      JSON, list: below the first version, on the topic of dead letters
    x  rewritten             JSON: `since`, `last` and `decided` of `admission.Rewritten`
    d  contents of a version 8 bytes per decided row, see `admission.Known.contents`; only if the
                             table's key is not unique. 16 hexadecimal digits of the version
                             precede the aggregate
    m  facts of the shard    JSON, by name, see `facts`

and, not by aggregate: `c` and the number of a time bucket (8 bytes, big-endian): its accounted rows
(8 bytes, little-endian); `g` and a number: a mark, see `database`.
"""

from __future__ import annotations

import heapq
import json
import secrets
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from eventpub.admission.model import WIDTH, Hold, bucket_of
from eventpub.errors import StateError
from eventpub.index.aggregates import Aggregates
from eventpub.index.database import (
    FORMAT,
    IDENTITY,
    ROCKSDB,
    Batch,
    Changes,
    Database,
    Items,
    Overlay,
    Storage,
    read_only,
    require_known_format,
)
from eventpub.index.facts import Facts, Partition, merged, of_another, read_facts
from eventpub.index.values import unpacked_hold
from eventpub.times import ZONES_DIFFER

_MOVED_AT_ONCE = 10_000
_SOME_EVENTS = 200
_AGGREGATE_AT = {b"v": 1, b"h": 1, b"s": 1, b"r": 1, b"x": 1, b"d": 17}
"""Where the aggregate begins in a key, by its letter."""


class Index(Aggregates):
    """One shard's index, open. A context manager.

    Args:
        directory: created if absent.
        identity: application, topic, shard, …; another one's index is refused, as its versions
            would make this topic lose events.
        adopts: whether an index of another identity may become this one.
        lock_timeout: seconds to wait for the lock; a killed worker may need a moment to exit.
        redo: for batches with journals: takes what the index knows, yields the changes of the
            batches after its last. Writes then stay in memory until `flush`: the index must not
            contain a batch without a journal.

    Raises:
        StateError: index.locked, index.newer_format, state.foreign, index.corrupt, index.disk_full.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        directory: Path,
        identity: Mapping[str, Any],
        *,
        adopts: Callable[[Mapping[str, Any]], bool] = lambda _: False,
        lock_timeout: float = 10.0,
        redo: Callable[[Facts], Iterable[Changes]] | None = None,
        storage: Storage = ROCKSDB,
    ) -> None:
        self.directory = directory
        database = (Database if redo is None else Overlay)(directory, lock_timeout, storage)
        try:
            require_known_format(database.items(IDENTITY), directory)
            if redo is not None:
                for changes in redo(read_facts(database.items)):
                    Database.write(database, changes)  # to disk
            super().__init__(database)
            self._require(identity, adopts)
        except BaseException:
            database.close()
            raise

    @property
    def size(self) -> int:
        return self._db.size

    def _require(
        self, identity: Mapping[str, Any], adopts: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        required = {"format": FORMAT, **identity}
        found = self.identity or required
        if found != required and not adopts(found):
            raise of_another(found, required, self.directory)
        self.identity = found
        if found != required:
            self.note(identity=required)

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def copy_to(self, folder: Path) -> None:
        """See `Database.copy_to`."""
        self._db.copy_to(folder)

    def end_batch(self, number: int, journal: str) -> Changes:
        """Record a complete batch; returns the changes since `redo`, for its journal."""
        self.note(batch=number, journal=journal)
        assert isinstance(self._db, Overlay)
        return self._db.changes

    def flush(self) -> None:
        """Write the changes; their journal must exist."""
        assert isinstance(self._db, Overlay)
        self._db.flush()

    def pending(self, most: int, about: Sequence[str]) -> Pending:
        """Like `glance`, of the open index."""
        holds, count = choose(self.holds.values(), most, about)
        skipped = self.known(list(about)).skipped
        return Pending(holds, count, {a: list(of) for a, of in skipped.items()}, self.batch)

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
        """Take over this shard's aggregates from indexes of another number of shards or partitions.

        Call instead of `begin`; until it returns, the index counts as new. What a missing index
        knew is read back from the topic.

        Args:
            partitions: this shard's; with `everywhere`, all.
            adopts: whether a former index of this identity may be taken over.

        Raises:
            StateError: index.newer_format, state.foreign, ….
        """
        former = [self._copy(directory, belongs, adopts) for directory in directories]
        facts = merged(former, set(partitions), baseline, settled, everywhere=everywhere)
        self.note(**facts, reads_everywhere=everywhere)
        self._db.make_durable()

    def _copy(
        self,
        directory: Path,
        belongs: Callable[[str], bool],
        adopts: Callable[[Mapping[str, Any]], bool],
    ) -> Facts | None:
        """Copy this shard's aggregates; returns the facts. None if it is gone or damaged: what was
        copied is true, but its offsets say nothing."""
        try:
            with read_only(directory, self._db.storage) as items:
                if items is None:
                    return None
                facts = read_facts(items)
                if (facts.identity or not facts.is_new) and not adopts(facts.identity):
                    if adopts({**facts.identity, "start": self.identity.get("start", "")}):
                        return None  # of an earlier state
                    raise of_another(facts.identity, self.identity, directory)
                self._copy_aggregates(items, belongs)
        except StateError as error:
            if error.code != "index.corrupt" or error.where != str(directory):
                raise
            return None
        return facts

    def _copy_aggregates(self, items: Items, belongs: Callable[[str], bool]) -> None:
        batch: Batch = {}
        for key, value in items(b""):
            if (at := _AGGREGATE_AT.get(key[:1])) and belongs(key[at:].decode()):
                batch[key] = value
                if key[:1] == b"h":
                    self.holds.load(key[1:].decode(), value)
            if len(batch) >= _MOVED_AT_ONCE:
                self._db.write(batch)
                batch = {}
        self._db.write(batch)

    def set_buckets(self, rows: Mapping[int, int], forget_below: int) -> None:
        """Set the row counts of buckets, all accounted for; delete those below `forget_below`."""
        batch: Batch = {}
        for bucket, count in rows.items():
            self.counts.put(batch, bucket, count)
        self.counts.prune(batch, forget_below)
        self._write(batch, {})

    def go_back(self, by: int | None) -> None:
        """Move the position back by `by` µs, to read and count again; None: forget it."""
        if self.position is not None:
            first = 0 if by is None else bucket_of(self.position - by)
            batch: Batch = {}
            self.counts.delete_since(batch, first)
            self._write(batch, {"position": None if by is None else first * WIDTH})

    def skip_to(self, position: int) -> None:
        """Move an older position up to here, µs: what is below, others have accounted for."""
        first = bucket_of(position) * WIDTH
        if self.position is not None and self.position < first:
            batch: Batch = {}
            self.counts.delete_since(batch, bucket_of(self.position))
            self._write(batch, {"position": first})

    def keep_times(self, read_as: str, now: int) -> None:
        """Record how `create_time` is read. After a change rows have other times: those that may be
        below the position now are read, and older times are not compared."""
        if self.read_as not in {None, read_as}:
            self.go_back(ZONES_DIFFER)
            self.note(read_as=read_as, times_since=now + ZONES_DIFFER)
        self.note(read_as=read_as)

    def keep_ids(
        self,
        ids_as: str,
        columns: Collection[str],
        existing: Callable[[list[tuple[str, int]]], Collection[Any]],
    ) -> None:
        """Record how the identity is read. After a change, the table's `columns` must lack the
        former one (it was renamed), and published events must not have got another spelling of
        their UUIDs; what is no longer in the table says nothing.

        Raises:
            StateError: state.foreign
        """
        before = self.ids_as or ids_as
        if before != ids_as:
            keys = [key[1:].decode() for key, _ in islice(self._db.items(b"v"), _SOME_EVENTS)]
            column, now = (of.partition(" of ")[2] for of in (before, ids_as))
            moved = keys[:1] if column != now and column in columns else []
            if not moved:
                spelled = {(key, n): _spellings(key) for key, n in self.known(keys).last.items()}
                others = {(other, n): (key, n) for (key, n), of in spelled.items() for other in of}
                there = {*existing([*spelled, *others])}
                moved = [others[of][0] for of in there & others.keys() if others[of] not in there]
            if moved:
                raise StateError(
                    "state.foreign",
                    f"store.columns.aggregate_id is read as {ids_as} now, before as {before}:"
                    f" events of {moved[0]!r} would be published again, with other keys",
                    where=f"aggregate {moved[0]}",
                    suggestion="restore the column or its type (after a renaming, drop the old"
                    " column), and restart; to publish with new keys, use an app.id, an"
                    " app.state_dir and a sink.topic of their own",
                )
        self.note(ids_as=ids_as)


def _spellings(key: str) -> set[str]:
    """Other ways to write the UUIDs in a key."""
    found = set()
    for form in (str, attrgetter("hex")):
        parts = [_written(part, form) for part in key.split("|")]
        found |= {"|".join(parts), "|".join(map(str.upper, parts))}
    return found - {key}


def _written(part: str, form: Callable[[uuid.UUID], str]) -> str:
    try:
        return form(uuid.UUID(part))
    except ValueError:
        return part


_ABANDONED = 6 * 3600.0
"""Age in seconds from which a copy counts as a killed process's: no upload takes as long."""


def folder_for(directory: Path) -> Path:
    """Where to copy an index: beside it, for hard links. Removes what killed processes left."""
    for left in directory.parent.glob(f"{directory.name}.copy-*"):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left, ignore_errors=True)
    return directory.with_name(f"{directory.name}.copy-{secrets.token_hex(8)}")


Ranges: TypeAlias = list[tuple[int, int]]


@dataclass(frozen=True)
class Pending:
    """What waits in an index, where there may be hundreds of thousands of holds.

    Attributes:
        holds: of the requested aggregates, and those first seen; `count`: of all.
        skipped: skipped versions of the requested aggregates that have not turned up.
        batch: the last one, where batches have journals.
    """

    holds: list[Hold]
    count: int
    skipped: dict[str, Ranges]
    batch: int | None = None


@dataclass(frozen=True)
class Summary:
    """An index's facts; `low`: from where a shard that lost it must read again, µs."""

    position: int | None
    low: int | None
    baseline: int | None
    identity: dict[str, Any]


def choose(holds: Iterable[Hold], most: int, about: Collection[str]) -> tuple[list[Hold], int]:
    """Holds of the aggregates in `about`, then the `most` first seen; and the total count."""
    named: list[Hold] = []
    count, about = 0, frozenset(about)

    def others() -> Iterator[Hold]:
        nonlocal count
        for hold in holds:
            count += 1
            if hold.aggregate_id in about:
                named.append(hold)
            else:
                yield hold

    first = heapq.nsmallest(max(most, 1), others(), key=attrgetter("first_seen"))
    return [*named, *first[:most]], count


def glance(directory: Path, most: int = 0, about: Collection[str] = ()) -> Pending:
    """Up to `most` holds, first seen first, and all about some aggregates; empty if no index.

    Another process may have the index open.

    Raises:
        StateError: index.newer_format, index.corrupt, ….
    """
    for _ in range(5):  # files vanish while another process writes
        with suppress(StateError):
            return _glance(directory, most, about)
        time.sleep(0.05)
    return _glance(directory, most, about)


def _glance(directory: Path, most: int, about: Collection[str]) -> Pending:
    with read_only(directory) as items:
        if items is None:
            return Pending([], 0, {})
        about = frozenset(about)
        held = (unpacked_hold(key[1:].decode(), value) for key, value in items(b"h"))
        holds, count = choose(held, most, about)
        skipped = {
            key[1:].decode(): [(first, last) for first, last in json.loads(value)]
            for key, value in items(b"s")
            if key[1:].decode() in about
        }
        return Pending(holds, count, skipped, read_facts(items).batch)


def summary(directory: Path, storage: Storage) -> Summary | None:
    """Of an index that no process has open; None if absent or unusable."""
    try:
        with read_only(directory, storage) as items:
            if items is None:
                return None
            facts = read_facts(items)
            since = [unpacked_hold("", value).since for _, value in items(b"h")]
    except StateError:
        return None
    if facts.is_new:
        return None
    position = facts.position
    low = None if position is None else min([position, *(at - 1 for at in since)])
    return Summary(position, low, facts.baseline, facts.identity)
