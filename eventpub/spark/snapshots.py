"""Snapshots of a shard's index at the shared location, for an executor that has no index.

A snapshot is a list of files with their contents' hashes; the files are kept by hash, so that what
RocksDB has not changed since the snapshot before is not written again. An executor takes the newest
one and applies the journals that follow it.

Names: ``<query>/snapshot/<shard>/<batch>.json``, ``<query>/file/<shard>/<hash>``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections import defaultdict
from pathlib import Path

from eventpub.errors import StateError
from eventpub.index import Index, folder_for
from eventpub.spark.journal import Journals
from eventpub.spark.place import Place

_KEPT = 2
"""Snapshots of a shard that are kept: an executor that reads the older one may finish."""

log = logging.getLogger("eventpub.spark")


class Snapshots:
    """The snapshots of one shard.

    Args:
        place: the shared location.
        query: identity of the query's checkpoint.
        shard: the number of the shard.
    """

    def __init__(self, place: Place, query: str, shard: int) -> None:
        self._place = place
        self._root = f"{query}/snapshot/{shard}"
        self._files = f"{query}/file/{shard}"

    def begin(self, index: Index, batch: int) -> threading.Thread:
        """Copy an index that contains a batch; a thread writes the copy to the location.

        Raises:
            StateError: index.disk_full, …
        """
        folder = folder_for(index.directory)
        index.copy_to(folder)
        thread = threading.Thread(target=self._upload, args=(folder, batch), daemon=True)
        thread.start()
        return thread

    def keep(self, folder: Path, batch: int) -> None:
        """Write an index that is closed to the location.

        Raises:
            StateError: state.unreachable
        """
        known = set(self._place.names(self._files))
        files = {}
        for file in sorted(folder.iterdir()):
            name = f"{self._files}/{_hash(file)}"
            if name not in known:
                self._place.upload(name, file)
            files[file.name] = name
        self._place.create(f"{self._root}/{batch:012d}.json", json.dumps(files).encode())

    def _upload(self, folder: Path, batch: int) -> None:
        try:
            self.keep(folder, batch)
        except Exception as error:
            log.warning("no snapshot of the index was kept: %s", error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def fetch(self, folder: Path, upto: int) -> int | None:
        """Write the newest snapshot that has no later batch to a folder; its batch.

        None: there is none, so that all journals are applied.

        Raises:
            StateError: state.unreachable
        """
        for name in sorted(self._place.names(self._root), reverse=True):
            batch = _batch_of(name)
            files = self._place.read(name) if batch <= upto else None
            if files is None:
                continue
            partial = folder_for(folder)
            partial.mkdir(parents=True)
            try:
                for file, source in json.loads(files).items():
                    self._place.download(source, partial / Path(file).name)
                partial.rename(folder)
            except (FileNotFoundError, ValueError) as error:  # it was just removed
                log.info("a snapshot of the index cannot be used: %s", error)
                continue
            except OSError as error:
                raise _not_writable(folder, error) from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            return batch
        return None


def prune(place: Place, query: str, journals: Journals, committed: int, shards: int) -> None:
    """Remove what no executor needs any more: journals below the oldest snapshot that is kept,
    older snapshots, and files of none.

    Args:
        committed: the last batch that Spark has committed; later journals are kept.
        shards: a shard without a snapshot keeps its journals.
    """
    snapshots: dict[int, list[str]] = defaultdict(list)
    for name in place.names(f"{query}/snapshot"):
        snapshots[int(name.split("/")[-2])].append(name)
    upto: dict[int, int] = {}
    for shard in range(shards):
        found = sorted(snapshots[shard])
        kept, old = found[-_KEPT:], found[:-_KEPT]
        if not old:
            continue  # a file may be of a snapshot that is being written
        upto[shard] = min(committed - 1, _batch_of(kept[0]))
        used = {f for n in kept for f in json.loads(place.read(n) or b"{}").values()}
        written_before = {f for n in old for f in json.loads(place.read(n) or b"{}").values()}
        place.delete(*old)
        place.delete(*(written_before - used))
    if upto:
        journals.prune(upto)


def _batch_of(name: str) -> int:
    return int(name.rsplit("/", 1)[1].removesuffix(".json"))


def _hash(file: Path) -> str:
    with file.open("rb") as read:
        return hashlib.file_digest(read, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def _not_writable(folder: Path, error: OSError) -> StateError:
    return StateError(
        "index.not_writable",
        f"the folder of the indexes cannot be written: {error}",
        where=str(folder),
        suggestion="set the option state_dir to a folder on each machine that its executors may"
        " write",
    )
