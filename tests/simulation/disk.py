"""Disks of executors: a stand-in for the calls of RocksDB that the index makes, and state files."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from eventpub import state
from eventpub.index.holds import unpacked
from tests.simulation.world import World, world


class Database:
    """What one directory holds, and what it held before each write."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.history: list[dict[bytes, bytes]] = []
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
            key[1:].decode(): unpacked("", value).first_missing
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
            self.set_back(at, writes)

    def forget(self, name: str, is_cut: bool) -> None:
        """A file is gone; or it keeps its name, and is empty."""
        files = world().files
        if name in files:
            files[name] = ""
            if not is_cut:
                del files[name]

    def set_back(self, executor: int, writes: int) -> None:
        """Put older copies in the place of an executor's directories."""
        for (at, _), database in self.databases.items():
            if at == executor and not database.locked and database.history:
                kept = max(0, len(database.history) - writes)
                database.data = database.history[kept] if kept < len(database.history) else {}
                del database.history[kept:]


class WriteBatch:
    """rocksdict.WriteBatch."""

    def __init__(self, raw_mode: bool = False) -> None:
        assert raw_mode
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

    def __init__(self, directory: str, options: object = None, access_type: Any = None) -> None:
        del options
        self._world: World = world()
        self._reads_only = access_type is not None
        self._world.point("index.open")
        databases = self._world.disk.databases
        key = (self._world.process.executor, directory)
        self._database = databases.setdefault(key, Database())
        if self._reads_only:
            return
        if self._database.locked:
            self._world.counts["locked indexes"] += 1
            raise OSError(f"IO error: lock hold by another process: {directory}/LOCK")
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


class File:
    """A path of the state directory, as far as the real code uses paths."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    @property
    def parent(self) -> File:
        """Any."""
        return self

    def __truediv__(self, name: str) -> File:
        return File(f"{self.name}/{name}")

    def exists(self) -> bool:
        """Only asked of a file in a database's directory."""
        key = (world().process.executor, self.name.removesuffix("/CURRENT"))
        return key in world().disk.databases

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing to do."""

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

    identities = state.StateDir.identities
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

    def shard_index(self, shards: int, number: int) -> File:
        """As there."""
        return File(f"{shards}-shards/{number}")


def index_folder(config: object, shards: int, number: int) -> File:
    """eventpub.shard.assignment.index_folder on an executor's disk."""
    del config
    return File(f"{shards}-shards/{number}")


def set_aside(directory: File, *, is_damaged: bool = True) -> File:
    """As `index.set_aside`: nobody looks at it any more."""
    del is_damaged
    world().disk.databases.pop((world().process.executor, directory.name), None)
    return directory
