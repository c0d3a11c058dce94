"""Disks of executors: a stand-in for the calls of RocksDB that the index makes, and state files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eventpub import state
from eventpub.index import database as rocksdb
from eventpub.index.values import unpacked_hold
from tests.simulation.world import Clock, World, world


class Database:
    """What one directory holds, and what it held before each write."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.history: list[dict[bytes, bytes]] = []
        self.durable = 0  # of these writes
        self.locked = False


class Disk:
    """(executor, directory) → database."""

    def __init__(self) -> None:
        self.databases: dict[tuple[int, str], Database] = {}

    def lose(self, executor: int) -> None:
        """Delete the directories of an executor that nobody has open."""
        for key in [k for k, d in self.databases.items() if k[0] == executor and not d.locked]:
            del self.databases[key]

    def held(self) -> dict[str, int]:
        """The versions that aggregates wait for, as any index has them."""
        return {
            key[1:].decode(): unpacked_hold("", value).first_missing
            for database in self.databases.values()
            for key, value in database.data.items()
            if key[:1] == b"h"
        }

    def lose_power(self, writes: int, is_cut: bool) -> None:
        """The machine crashes: what was not on the disk is gone, of an index the last writes.

        Args:
            is_cut: a file keeps its name, and is empty.
        """
        files = world().files
        for name in [name for name in files if name not in world().lasting]:
            files[name] = ""
            if not is_cut:
                del files[name]
        for database in self.databases.values():
            database.locked = False
        for at in {at for at, _ in self.databases}:
            self.set_back(at, writes, is_power_loss=True)

    def forget(self, name: str, is_cut: bool) -> None:
        """A file is gone; or it keeps its name, and is empty."""
        files = world().files
        if name in files:
            files[name] = ""
            if not is_cut:
                del files[name]

    def set_back(self, executor: int, writes: int, *, is_power_loss: bool = False) -> None:
        """Put older copies in the place of an executor's directories."""
        for (at, _), database in self.databases.items():
            if at == executor and not database.locked and database.history:
                kept = max(0, len(database.history) - writes)
                kept = max(kept, database.durable) if is_power_loss else kept
                if kept < len(database.history):
                    database.data = database.history[kept]
                del database.history[kept:]
                database.durable = min(database.durable, kept)


class WriteBatch:
    """rocksdict.WriteBatch."""

    def __init__(self) -> None:
        self.changes: list[tuple[bytes, bytes | None]] = []

    def put(self, key: bytes, value: bytes) -> None:
        """As there."""
        self.changes.append((key, value))

    def delete(self, key: bytes) -> None:
        """As there."""
        self.changes.append((key, None))

    def size_in_bytes(self) -> int:
        """About as there."""
        return sum(len(key) + len(value or b"") for key, value in self.changes)


class Items:
    """rocksdict.RdictIter over what there is now."""

    def __init__(self, data: dict[bytes, bytes]) -> None:
        self._data = data
        self._keys: list[bytes] = []
        self._at = 0

    def seek(self, prefix: bytes) -> None:
        """As there."""
        self._keys = sorted(key for key in self._data if key >= prefix)

    def seek_to_first(self) -> None:
        """As there."""
        self._keys = sorted(self._data)

    def valid(self) -> bool:
        """As there."""
        return self._at < len(self._keys)

    def key(self) -> bytes:
        """As there."""
        return self._keys[self._at]

    def value(self) -> bytes:
        """As there."""
        return self._data[self._keys[self._at]]

    def next(self) -> None:
        """As there."""
        self._at += 1

    def status(self) -> None:
        """Nothing is damaged."""


class Rdict:
    """rocksdict.Rdict in raw mode: a lock, sorted keys, atomic write batches."""

    def __init__(self, directory: Path, *, reads_only: bool = False) -> None:
        self._world: World = world()
        self._reads_only = reads_only
        self._world.point("index.open")
        self._database = self._world.disk.databases.setdefault(_key(directory), Database())
        if self._reads_only:
            return
        if self._database.locked:
            self._world.counts["locked indexes"] += 1
            unavailable = "Resource temporarily unavailable"
            raise OSError(f"IO error: While lock file: {directory}/LOCK: {unavailable}")
        self._database.locked = True

    def close(self) -> None:
        """As there; also what the system does for a process that died."""
        if not self._reads_only:
            self._database.locked = False

    def property_int_value(self, name: str) -> int:
        """Nobody looks at sizes here."""
        return len(name)

    def get(self, keys: Any) -> Any:
        """As there: of one key or of many."""
        data = self._database.data
        if isinstance(keys, bytes):
            return data.get(keys)
        return [data.get(key) for key in keys]

    def iter(self) -> Items:
        """As there."""
        return Items(self._database.data)

    def flush(self) -> None:
        """Make all writes durable."""
        self._database.durable = len(self._database.history)

    def write(self, batch: WriteBatch) -> None:
        """As there."""
        self._world.point("index.write")
        if self._world.fault("disk full"):
            raise OSError("IO error: No space left on device")
        database = self._database
        database.history.append(database.data)
        data = dict(database.data)
        for key, value in batch.changes:
            if value is None:
                data.pop(key, None)
            else:
                data[key] = value
        database.data = data
        self._world.point("index.written")


class Storage(rocksdb.Storage):
    """On the disk of the executor that the process runs on."""

    def __init__(self) -> None:
        super().__init__(Clock())

    def exists(self, directory: Path) -> bool:
        """As there."""
        return _key(directory) in world().disk.databases

    def open(self, directory: Path) -> Any:
        """As there."""
        return Rdict(directory)

    def reader(self, directory: Path) -> Any:
        """As there."""
        return Rdict(directory, reads_only=True)

    def new_batch(self) -> Any:
        """As there."""
        return WriteBatch()

    def set_aside(self, directory: Path, *, is_damaged: bool = True) -> Path:
        """As there: nobody looks at it any more."""
        del is_damaged
        world().disk.databases.pop(_key(directory), None)
        return directory


def _key(directory: Path) -> tuple[int, str]:
    """Of the database in a folder of an index."""
    return world().process.executor, "/".join(directory.parts[-2:])


class File:
    """A path of the state directory, as far as the real code uses paths."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def exists(self) -> bool:
        """Of a file of which nothing could be read: no warning is wanted."""
        return False

    def read_text(self) -> str:
        """The file's JSON."""
        text = world().files.get(self.name)
        if text is None:
            raise FileNotFoundError(self.name)
        return text

    def stat(self) -> SimpleNamespace:
        """Each time as if it had been replaced."""
        return SimpleNamespace(st_mtime_ns=world().moment, st_ino=0)

    def with_suffix(self, suffix: str) -> File:
        """Of a file that has one."""
        return File(self.name.rsplit(".", 1)[0] + suffix)

    def write_text(self, text: str) -> None:
        """Some JSON."""
        world().files[self.name] = text

    def rename(self, target: File) -> None:
        """As there."""
        world().files[target.name] = world().files.pop(self.name)


class StateDir:
    """eventpub.state.StateDir on the simulated disk; requests are the world's."""

    progress_file = File("progress.json")
    start_file = File("start.json")
    run_file = File("run.json")
    pause_file = File("pause.json")

    identities = state.StateDir.identities
    pause = state.StateDir.pause
    root = "state"

    def __init__(self, root: object) -> None:
        del root

    def read(self, path: File) -> dict[str, Any] | None:
        """As there."""
        text = world().files.get(path.name)
        found: dict[str, Any] | None = json.loads(text) if text else None
        return found

    def write(self, path: File, data: dict[str, Any], *, lasting: bool = False) -> None:
        """As there; `lasting`: it is on the disk before anything else is done."""
        world().point(f"write {path}")
        (world().lasting.add if lasting else world().lasting.discard)(path.name)
        world().files[path.name] = json.dumps(data)

    def set_aside(self, shards: int, partitions: int) -> None:
        """Not modelled: what the indexes know is read back from the topic, or they are refused."""

    def former_indexes(self) -> tuple[File, ...]:
        """As `set_aside`."""
        return ()

    def forget_shards(self, shards: int) -> None:
        """As there: on the publisher's disk only."""
        databases = world().disk.databases
        for at, path in list(databases):
            if at == 0 and path.startswith(f"{shards}-shards/"):
                del databases[at, path]

    def indexed(self) -> list[int]:
        """As there: on the publisher's disk only."""
        found = {int(path.split("-")[0]) for at, path in world().disk.databases if at == 0}
        return sorted(found)

    def shard_index(self, shards: int, number: int) -> Path:
        """As there."""
        return Path(f"{shards}-shards/{number}")
