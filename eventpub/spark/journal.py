"""What a query keeps of its shards at the location that all executors share.

``<query>/journal/<batch>/<shard>``: what a shard decided in a batch: a report, the batch's keys in
order, and changes to the index. Journals are immutable, so a repeated batch yields the same rows,
and an executor with an older index applies the changes that it missed.

``<query>/snapshot/<shard>/<batch>.json``: files of an index, for an executor that has none; the
journals that follow are applied to it. ``<query>/file/<shard>/<hash>``: their contents, written
once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from eventpub.admission.model import values
from eventpub.channel import Report, Request, fields_of, report_of
from eventpub.errors import StateError
from eventpub.failpoint import failpoint
from eventpub.index import Changes, Facts, Index, Pending, folder_for
from eventpub.spark.options import Plan
from eventpub.spark.place import Place

_FIRST_READ = 256 << 10
"""Bytes read for the head, which has a few KB."""

_KEPT = 2
"""Snapshots kept per shard, so that an executor reading the older one can finish."""

_ABANDONED = timedelta(hours=6)
"""Age from which a file that no snapshot lists counts as a killed upload's."""

_UNUSED = timedelta(days=3)

_FIELDS: list[pa.Field[Any]] = [
    pa.field("aggregate_id", pa.string()),
    pa.field("version", pa.int64()),
    pa.field("create_time", pa.int64()),
    pa.field("late", pa.bool_()),
    pa.field("kind", pa.string()),
    pa.field("reason", pa.string()),
    pa.field("detail", pa.string()),
    pa.field("content", pa.binary()),
]
KEYS: pa.Schema = pa.schema(_FIELDS)
"""`content` tells rows of one version apart, if the table allows several."""

_CHANGES = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
_HEAD = b"eventpub"
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)

log = logging.getLogger("eventpub.spark")


@dataclass(frozen=True)
class Journal:
    report: Report
    keys: pa.Table
    changes: Changes

    @property
    def digest(self) -> str:
        return _digest(_stream(self.keys))


class Journals:
    def __init__(self, place: Place, query: str) -> None:
        self._place = place
        self._root = f"{query}/journal"

    def create(self, batch: int, shard: int, journal: Journal) -> bool:
        """False if another attempt has created it."""
        keys = _stream(journal.keys)
        report = fields_of(journal.report)
        head = {"report": report, "digest": _digest(keys), "rows": journal.keys.num_rows}
        columns: list[Any] = [[*journal.changes], [*journal.changes.values()]]
        schema = _CHANGES.with_metadata({_HEAD: json.dumps(head).encode()})
        changes = pa.Table.from_arrays([pa.array(a, pa.binary()) for a in columns], schema=schema)
        return self._place.create(self._name(batch, shard), _stream(changes) + keys)

    def head(self, batch: int, shard: int) -> dict[str, Any] | None:
        """`report`, `digest` of the keys, number of `rows`; None: there is no journal."""
        name = self._name(batch, shard)
        for most in (_FIRST_READ, None):  # None: a longer head
            if (data := self._place.read(name, most)) is None:
                return None
            with suppress(*_UNREADABLE):
                return _head(pa.ipc.open_stream(data).schema)
        raise self._damaged(name)

    def read(self, batch: int, shard: int) -> Journal | None:
        name = self._name(batch, shard)
        data = self._place.read(name)
        if data is None:
            return None
        source = pa.BufferReader(data)
        try:
            changes, keys = (pa.ipc.open_stream(source).read_all() for _ in range(2))
            head = _head(changes.schema)
        except _UNREADABLE as error:
            raise self._damaged(name) from error
        if keys.num_rows != head["rows"]:  # Arrow takes a cut between two messages for the end
            raise self._damaged(name)
        found = zip(values(changes, "key"), values(changes, "value"), strict=True)
        return Journal(head["report"], keys, dict(found))

    def changes(self, shard: int, known: Facts, upto: int) -> Iterator[Changes]:
        """Changes of the batches after what an index knows; raises state.journal_missing, also for
        an index that these journals do not follow."""
        before = known.journal
        for batch in range((known.batch or 0) + 1, upto + 1):
            journal = self.read(batch, shard)
            if journal is None or journal.report.follows != before:
                raise self.missing(batch)
            before = journal.report.journal
            yield journal.changes

    def report(self, plan: Plan, shard: int, *, may_be_unread: bool) -> Report:
        """What a shard did in a completed batch.

        A `foreachBatch` function may leave a task unread, without a journal; its rows belong to the
        next batch. A state older than its checkpoint looks the same, but then a sink already has
        the rows. Only the process that handed out the tasks can tell: it sets `may_be_unread` to
        create the journal.

        Raises:
            StateError: state.journal_missing
        """
        head = self.head(plan.batch, shard)
        if head is None and may_be_unread:
            before = self.head(plan.batch - 1, shard)
            if before is not None or plan.batch == 1:
                at = max(plan.start or 0, plan.begin)
                was = Report(shard, position=at, low=at) if before is None else before["report"]
                names = ("position", "low", "hidden_since", "holds", "next_due", "rows_in")
                report = Report(
                    shard,
                    done=plan.batch,
                    compared=plan.comparison,
                    unfinished=[*plan.buckets],
                    journal=was.journal,
                    follows=was.journal,
                    **{name: getattr(was, name) for name in names},
                )
                self.create(plan.batch, shard, Journal(report, KEYS.empty_table(), {}))
                head = self.head(plan.batch, shard)
        if head is None:
            raise self.missing(plan.batch)
        found: Report = head["report"]
        return found

    def oldest(self, after: int, shards: int) -> list[int]:
        """`create_time` of the oldest event of each part of the batches after one, µs.

        Without those whose journal is damaged: they were not published.
        """
        found: list[int] = []
        for batch in range(after + 1, self.newest() + 1):
            for shard in range(shards):
                with suppress(StateError):
                    head = self.head(batch, shard)
                    if head is not None and head["report"].oldest is not None:
                        found.append(head["report"].oldest)
        return found

    def newest(self) -> int:
        """The last batch that has a journal; 0: none."""
        return max((batch for batch, _, _ in _numbered(self._place, self._root)), default=0)

    def prune(self, upto: dict[int, int]) -> None:
        found = _numbered(self._place, self._root)
        self._place.delete(*(n for batch, shard, n in found if batch <= upto.get(shard, -1)))

    def _name(self, batch: int, shard: int) -> str:
        return f"{self._root}/{batch:012d}/{shard}"

    def missing(self, batch: int) -> StateError:
        return StateError(
            "state.journal_missing",
            f"the journals of batch {batch} are missing",
            where=f"{self._place.location}/{self._root}",
            suggestion="restore the state that belongs to this checkpoint, or start with both new."
            " If the query ended after a batch that it had not read to its end (foreachBatch with"
            " show or limit; a join with an empty table: set spark.sql.adaptive.enabled = false),"
            " have it read all rows",
        )

    def _damaged(self, name: str) -> StateError:
        return StateError(
            "state.journal_damaged",
            "a journal cannot be read: it is truncated, or was written by another version",
            where=f"{self._place.location}/{name}",
            suggestion="if the machine has just lost power, remove this object: its batch was not"
            " published, and will be decided again; otherwise restore it from a backup, or install"
            " the version that wrote it",
        )


class Snapshots:
    def __init__(self, place: Place, query: str, shard: int) -> None:
        self._place, self._shard = place, shard
        self._root = f"{query}/snapshot/{shard}"
        self._files = f"{query}/file/{shard}"

    def begin(self, index: Index, batch: int) -> threading.Thread | None:
        """Copy an index that contains a batch; a thread uploads the copy. None: an earlier one is
        still being uploaded, as far as the file system has locks."""
        folder, lock = folder_for(index.directory), os.open(index.directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                os.close(lock)
                return None
        try:
            index.copy_to(folder)
        except BaseException:
            os.close(lock)
            raise
        thread = threading.Thread(target=self._upload, args=(folder, batch, lock), daemon=True)
        thread.start()
        return thread

    def keep(self, folder: Path, batch: int) -> None:
        """Upload a closed index."""
        failpoint("before_snapshot")
        files = {f.name: f"{self._files}/{_digest_of(f)}" for f in sorted(folder.iterdir())}
        for _ in range(2):  # again those of earlier snapshots that were pruned meanwhile
            known = {*self._place.names(self._files)}
            for file, name in files.items():
                if name not in known:
                    self._place.upload(name, folder / file)
        failpoint("during_snapshot")
        self._place.create(f"{self._root}/{batch:012d}.json", json.dumps(files).encode())
        failpoint("after_snapshot")

    def _upload(self, folder: Path, batch: int, lock: int) -> None:
        try:
            self.keep(folder, batch)
        except Exception as error:
            log.warning("no snapshot of the index was kept: %s", error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def fetch(self, folder: Path, upto: int) -> int | None:
        """Download the newest snapshot up to a batch; returns its batch, None if there is none."""
        for _, batch, name in sorted(_numbered(self._place, self._root), reverse=True):
            files = self._place.read(name) if batch <= upto else None
            if files is None:
                continue
            partial = folder_for(folder)
            partial.mkdir(parents=True)
            try:
                for file, source in json.loads(files).items():
                    self._place.download(source, copy := partial / Path(file).name)
                    if _digest_of(copy) != source.rpartition("/")[2]:  # a power failure has cut it
                        self._place.delete(source)  # or later snapshots would not upload it
                        raise ValueError(f"{source} is damaged")
                failpoint("during_fetch")
                partial.rename(folder)
            except (FileNotFoundError, ValueError) as error:  # it was just pruned
                log.info("a snapshot of the index cannot be used: %s", error)
                continue
            except OSError as error:
                if folder.exists():  # another task of this shard was faster
                    return batch
                raise StateError(
                    "index.not_writable",
                    f"the folder of the indexes cannot be written: {error}",
                    where=str(folder),
                    suggestion="set the option state_dir to a folder on each machine that its"
                    " executors may write",
                ) from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            return batch
        return None

    def pending(self, upto: int, request: Request, journals: Journals) -> Pending:
        """The answer to a "list" after a batch, from a snapshot: the index may be elsewhere.

        Raises:
            StateError: state.holds_unknown, state.journal_missing
        """
        with tempfile.TemporaryDirectory(prefix="eventpub-") as folder:
            copy = Path(folder) / "index"
            if self.fetch(copy, upto) is None:
                raise StateError(
                    "state.holds_unknown",
                    "what is held is not known: there is no snapshot of this index yet",
                    where=f"{self._place.location}/{self._root}",
                    suggestion="run the command while the publisher runs and publishes",
                )

            def redo(known: Facts) -> Iterator[Changes]:
                return journals.changes(self._shard, known, upto)

            with Index(copy, {}, adopts=lambda _: True, redo=redo) as index:
                return index.pending(request.most, request.about)


def remove_unused(used: Path) -> None:
    """Remove indexes beside a query's that this machine has not used for days, as those of former
    checkpoints; a query that goes on here fetches its own again."""
    for query in {*used.parent.glob("*")} - {used}:
        with suppress(OSError):  # another task removes it
            newest = max(path.stat().st_mtime for path in (query, *query.rglob("*")))
            if time.time() - newest > _UNUSED.total_seconds():
                shutil.rmtree(query.rename(query.with_name(f"{query.name}.old")))


def _digest_of(file: Path) -> str:
    with file.open("rb") as read:
        return hashlib.file_digest(read, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def prune(place: Place, query: str, committed: int, shards: int) -> None:
    """Remove old snapshots, their files, those of uploads that were killed, and journals below the
    oldest snapshot and `committed`."""
    snapshots: dict[int, list[tuple[int, str, set[str]]]] = defaultdict(list)
    for shard, batch, name in sorted(_numbered(place, f"{query}/snapshot")):
        try:
            files = {*json.loads(place.read(name) or b"").values()}
        except ValueError:  # a power failure has cut it
            place.delete(name)
        else:
            snapshots[shard].append((batch, name, files))
    upto: dict[int, int] = {}
    for shard in range(shards):
        kept, old = snapshots[shard][-_KEPT:], snapshots[shard][:-_KEPT]
        if old:
            upto[shard] = min(committed - 1, kept[0][0])
        used, unused = ({file for *_, files in some for file in files} for some in (kept, old))
        # files first, of which some may be gone: with the snapshot its list of them would be lost;
        # a young file without a list may belong to a snapshot being uploaded
        folder = f"{query}/file/{shard}"
        left = unused.intersection(place.names(folder)).union(place.names(folder, _ABANDONED))
        place.delete(*left - used)
        failpoint("during_prune")
        place.delete(*(name for _, name, _ in old))
    place.sweep(query, _ABANDONED)
    if upto:
        Journals(place, query).prune(upto)


def _numbered(place: Place, root: str) -> Iterator[tuple[int, int, str]]:
    """Journals or snapshots, by the two numbers that end their names; others may put files there,
    as file managers do."""
    for name in place.names(root):
        if found := re.fullmatch(r".*/(\d+)/(\d+)(\.json)?", name):
            yield int(found[1]), int(found[2]), name


def _head(schema: pa.Schema) -> dict[str, Any]:
    head: dict[str, Any] = json.loads((schema.metadata or {})[_HEAD])
    return head | {"report": report_of(head["report"])}


def _digest(keys: bytes) -> str:
    return hashlib.blake2b(keys, digest_size=16).hexdigest()


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", unify_dictionaries=True)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue().to_pybytes()
