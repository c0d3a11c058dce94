"""A shard's index in one RocksDB directory.

Keys are one letter and the aggregate's UTF-8 bytes:

    v  last version          8 bytes, little-endian, signed; and as many: when the aggregate's rows
                             were created, as `admission.Seen` packs it
    h  open hold             packed, see `values`
    s  skipped versions      JSON, list of [first, last]
    r  refused versions      JSON, list: below the first version, on the topic of dead letters
    x  rewritten             JSON: `since`, `last` and `decided` of `admission.Rewritten`
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
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eventpub.admission.model import WIDTH, bucket_of
from eventpub.errors import StateError
from eventpub.index.aggregates import Aggregates
from eventpub.index.database import (
    FORMAT,
    IDENTITY,
    ROCKSDB,
    Changes,
    Database,
    Items,
    Overlay,
    Storage,
    read_only,
    require_known_format,
)
from eventpub.index.facts import Partition, merged, of_another, read_facts
from eventpub.index.reading import Pending, choose

_MOVED_AT_ONCE = 10_000
_AGGREGATE_AT = {b"v": 1, b"h": 1, b"s": 1, b"r": 1, b"x": 1, b"d": 17}
"""Where the aggregate begins in a key, by its letter."""


class Index(Aggregates):
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
        storage: where it is.

    Raises:
        StateError: index.locked, index.newer_format, state.foreign, index.corrupt,
            index.disk_full.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        directory: Path,
        identity: Mapping[str, Any],
        *,
        adopts: Callable[[Mapping[str, Any]], bool] = lambda _: False,
        lock_timeout: float = 10.0,
        redo: Callable[[int | None], Iterable[Changes]] | None = None,
        storage: Storage = ROCKSDB,
    ) -> None:
        self.directory = directory
        database = (Database if redo is None else Overlay)(directory, lock_timeout, storage)
        try:
            require_known_format(database.items(IDENTITY), directory)
            if redo is not None:
                last = database.get(b"mbatch")
                for changes in redo(None if last is None else int(json.loads(last))):
                    database.apply(changes)
            super().__init__(database)
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
            self._note({"identity": required})

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
        self._note({"batch": number})
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
        self._note(facts | {"everywhere": everywhere})

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
        try:
            with read_only(directory, self._db.storage) as items:
                if items is None:
                    return None
                facts = read_facts(items)
                found = facts.get("identity", {})
                if facts and not adopts(found):
                    raise of_another(found, self._facts["identity"], directory)
                self._copy_aggregates(items, belongs)
        except StateError as error:
            if error.code != "index.corrupt" or error.where != str(directory):
                raise
            return None
        return facts

    def _copy_aggregates(self, items: Items, belongs: Callable[[str], bool]) -> None:
        batch, size = self._db.new_batch(), 0
        for key, value in items(b""):
            if (at := _AGGREGATE_AT.get(key[:1])) and belongs(key[at:].decode()):
                batch.put(key, value)
                size += 1
                if key[:1] == b"h":
                    self.holds.load(key[1:].decode(), value)
            if size >= _MOVED_AT_ONCE:
                self._db.write(batch)
                batch, size = self._db.new_batch(), 0
        self._db.write(batch)

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

    def note_dead_run(self, run: int) -> None:
        """How many dead letters came in a row; see `dead_run`."""
        self._note({"dead_run": run})


_copies: set[Path] = set()
"""Folders of this process's copies, which their creators remove."""


def folder_for(directory: Path) -> Path:
    """Where a copy of an index is made: beside it, on its disk, for links.

    What processes that were killed have left of others is removed.
    """
    for left in directory.parent.glob(f"{directory.name}.copy-*"):
        if left not in _copies and not _is_of_another(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = directory.with_name(f"{directory.name}.copy-{os.getpid()}-{secrets.token_hex(4)}")
    _copies.add(folder)
    return folder


def _is_of_another(folder: Path) -> bool:
    """Whether another process that lives may have made it."""
    pid = folder.name.rpartition(".copy-")[2].split("-")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
