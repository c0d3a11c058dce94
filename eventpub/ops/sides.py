"""Both sides of a comparison in DuckDB, in bounded memory, and what is found of them.

Payload, type and metadata are kept as hashes.
"""

# ruff: noqa: S608 (names and conditions are this module's)

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from eventpub.config import format_time
from eventpub.errors import StateError
from eventpub.ops.topic import NO_TIME, hashes, hashes_of_metadata

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_MEMORY = "250MB"
"""DuckDB's limit; a whole comparison stays below 500 MB."""

_THREADS = 2
_FETCHED = 10_000

_DAY = 86_400_000_000
"""µs around the range in which records are kept, to find those with a wrong time."""

_FOLDER = "eventpub-verify-"

_TABLES = """
CREATE TABLE store (
    id VARCHAR, version BIGINT, create_time BIGINT, payload BIGINT, type BIGINT, metadata BIGINT
);
CREATE TABLE topic (
    id VARCHAR, version BIGINT DEFAULT 0, create_time BIGINT,
    payload BIGINT DEFAULT 0, type BIGINT DEFAULT 0, metadata BIGINT DEFAULT 0,
    to_version BIGINT DEFAULT 0, kind TINYINT, partition INTEGER, "offset" BIGINT,
    faults TINYINT DEFAULT 0, crc UINTEGER DEFAULT 0, note VARCHAR
)
"""


class Sides:
    """Rows of the store and records of the topic; each takes one writing thread at a time.

    Args:
        after, upto: the range ``after < create_time ≤ upto``, µs. Records are kept if their time is
            within a day of it, or unreadable.
    """

    def __init__(self, folder: Path, after: int, upto: int) -> None:
        self.after, self.upto = after, upto
        self.database = open_database(folder)
        self.database.execute(_TABLES)
        near = f"create_time = {NO_TIME} OR create_time BETWEEN {after - _DAY} AND {upto + _DAY}"
        self._where = {"store": "true", "topic": near}

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.database.close()

    def add(self, side: Literal["store", "topic"], portion: list[pa.Table]) -> None:
        """Insert tables; a statement for each would cost more than its rows."""
        if not portion:
            return
        with self.database.cursor() as database:
            database.register("portion", pa.concat_tables(portion))
            database.execute(
                f"INSERT INTO {side} BY NAME SELECT * FROM portion WHERE {self._where[side]}"
            )
        portion.clear()

    def differences(self, kind: str, most: int | None = None) -> Iterator[Difference]:
        """The earliest differences of a kind from the last comparison; all if `most` is None."""
        limit = "" if most is None else f"LIMIT {most}"
        with _quiet(self.database.cursor()) as cursor:
            cursor.execute(
                'SELECT id, version, create_time, partition, "offset", note FROM difference'
                f" WHERE kind = '{kind}' ORDER BY create_time, id, version {limit}"
            )
            while rows := cursor.fetchmany(_FETCHED):
                yield from starmap(Difference, rows)


def open_database(folder: Path) -> DuckDBPyConnection:
    import duckdb

    database = duckdb.connect(
        config={
            "memory_limit": _MEMORY,
            "temp_directory": str(folder),
            "threads": _THREADS,
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,  # nothing is downloaded
        }
    )
    return _quiet(database)


def _quiet(database: DuckDBPyConnection) -> DuckDBPyConnection:
    return database.execute("SET enable_progress_bar = false")  # it goes to stdout


def store_columns(batch: pa.RecordBatch) -> pa.Table:
    types = batch.column("event_type").cast(pa.binary()).dictionary_encode()
    return pa.table(
        {
            "id": batch.column("aggregate_id"),
            "version": batch.column("version"),
            "create_time": batch.column("create_time"),
            "payload": hashes(batch.column("payload").to_pylist()),
            "type": hashes(types.dictionary.to_pylist())[types.indices.to_numpy()],
            "metadata": hashes_of_metadata(batch.column("metadata").to_pylist()),
        }
    )


@contextmanager
def spill_folder() -> Iterator[Path]:
    """A temporary folder in TMPDIR; a killed comparison leaves it."""
    with no_space_is_named():
        made = tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True)
    with made as name:
        yield Path(name)


@contextmanager
def no_space_is_named() -> Iterator[None]:
    """Raise a lack of disk space as verify.no_space, and of memory as verify.no_memory."""
    import duckdb

    try:
        yield
    except (OSError, duckdb.IOException, duckdb.OutOfMemoryException) as error:
        if isinstance(error, duckdb.OutOfMemoryException) and "max_temp_directory_size" not in str(
            error
        ):
            raise StateError(
                "verify.no_memory",
                f"the keys of rows do not fit into {_MEMORY} of memory: {error}",
                suggestion="choose a shorter range with --from and --to",
            ) from error
        raise StateError(
            "verify.no_space",
            f"no space for the keys of rows: {error}",
            where=tempfile.gettempdir(),
            suggestion=f"remove {_FOLDER}* of killed commands there, free about 150 bytes an event,"
            " or set TMPDIR to a larger disk",
        ) from error


SHOWN = 20

KINDS = ("missing", "repeated", "out_of_order", "altered", "extra", "doubled", "held")
"""Kinds of findings. "held" is no difference: such events wait for a version that is not in the
store, and no longer than the publisher does.
"""


@dataclass(frozen=True)
class Difference:
    """One event that differs between store and topic; `create_time` is µs, or NO_TIME."""

    aggregate_id: str
    version: int | None
    create_time: int
    partition: int | None = None
    offset: int | None = None
    note: str = ""

    @property
    def name(self) -> str:
        if self.version is None:
            return self.aggregate_id or "a record without a key"
        return f"{self.aggregate_id}/{self.version}"

    def to_dict(self) -> dict[str, Any]:
        time = None if self.create_time == NO_TIME else format_time(self.create_time)
        return vars(self) | {"create_time": time}


@dataclass
class Verdict:
    """The result of a comparison.

    Attributes:
        first, last: the compared range of `create_time`, both inclusive, µs.
        events: rows of the store in the range.
        records: records of events in the range, including late ones.
        accounted: rows absent from the topic for a recorded reason, and records exempt from the
            order: "late", "dead", "diverted", "dropped" (late events, by configuration), "arrived"
            (committed or published during the comparison), "without_identity" (rows without
            aggregate or version, which are passed over).
        behind: age in seconds of the oldest event after the publisher's position that is due; 0:
            none is, an end of the range was given, or there is no state.
    """

    first: int
    last: int
    events: int = 0
    records: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    examples: dict[str, list[Difference]] = field(default_factory=lambda: {k: [] for k in KINDS})
    accounted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("late", "dead", "diverted", "dropped", "arrived", "without_identity"), 0
        )
    )
    skips: int = 0
    notes: list[str] = field(default_factory=list)
    behind: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not any(count for kind, count in self.counts.items() if kind != "held")

    @property
    def absent(self) -> int:
        sides = sum(self.accounted[name] for name in ("dead", "diverted", "dropped"))
        return self.counts["missing"] + sides

    @property
    def ok(self) -> bool:
        return self.is_equal and not self.behind

    def to_dict(self) -> dict[str, Any]:
        return {
            "from": format_time(self.first) if self.first > 0 else None,
            "to": format_time(self.last),
            "events": self.events,
            "records": self.records,
            **self.counts,
            "accounted": self.accounted,
            "skips": self.skips,
            "examples": {k: [d.to_dict() for d in v] for k, v in self.examples.items()},
            "notes": self.notes,
            "behind": round(self.behind, 1),
        }
