"""Which tables of a database may be event tables, and which of their columns stands for what.

Found by names, types and unique keys: a proposal for a person to look at. Nothing is read of the
rows but the lowest version of a few.
"""

# ruff: noqa: S608 (nothing in here comes from outside but through `quote`)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.store.connection import Connection, connect_for_reading, display_name, is_mariadb, run
from eventpub.store.failures import mapped
from eventpub.store.layout import (
    BYTES,
    INTEGERS,
    TEXT,
    Column,
    Index,
    quote,
    read_columns,
    read_indexes,
)

_MOST_TABLES = 1000
_SAMPLE = 1000

_NAMES: dict[str, tuple[str, ...]] = {
    "aggregate_id": (
        "aggregateid", "aggregateidentifier", "streamid", "streamname", "entityid",
        "persistenceid", "aggregaterootid", "aggregateuuid", "rootid", "stream", "aggregate",
        "originatorid", "sourceid",
    ),
    "version": (
        "version", "sequencenumber", "aggregateversion", "streamversion", "eventversion", "seqnr",
        "sequencenr", "revision", "streamposition", "eventnumber", "playhead", "originatorversion",
        "sequence", "no",
    ),
    "event_type": (
        "eventtype", "type", "payloadtype", "eventname", "eventclass", "topic", "name",
        "sermanifest", "eventmanifest", "kind", "eventkind", "class",
    ),
    "payload": (
        "payload", "eventdata", "eventpayload", "data", "body", "event", "content", "state",
        "message", "json",
    ),
    "metadata": ("metadata", "eventmetadata", "meta", "headers", "metapayload"),
    "create_time": (
        "createtime", "createdat", "created", "creationtime", "timestamp", "eventtime",
        "occurredat", "recordedat", "insertedat", "recordedon", "occurredon", "createdon", "ts",
        "dbtimestamp", "time", "date",
    ),
    "id": ("id", "globalindex", "globalposition", "position", "ordering", "eventid", "seq"),
}  # fmt: skip
"""By our names: names that such a column often has, in lower case and without underscores."""

_TYPES: dict[str, set[str]] = {
    "aggregate_id": TEXT | {"varbinary"},
    "version": INTEGERS,
    "event_type": TEXT,
    "payload": TEXT | BYTES | {"json"},
    "metadata": TEXT | BYTES | {"json"},
    "create_time": {"timestamp", "datetime"},
    "id": INTEGERS,
}
_LARGE = {"json", "mediumtext", "longtext", "text", "mediumblob", "longblob", "blob"}
_OPTIONAL = {"id", "metadata"}


@dataclass(frozen=True)
class Candidate:
    """A table that may be an event table.

    Attributes:
        table: its name.
        columns: by our names its own; `id` and `metadata` only where it has any.
        score: how much speaks for it.
        is_unique: whether a unique key says which the aggregate and the version are.
        has_time_index: whether an index begins with the creation time.
        names: of all its columns.
        first_version: the lowest version of some rows, where that is 0; else 1.
    """

    table: str
    columns: Mapping[str, str]
    score: int
    is_unique: bool
    has_time_index: bool
    names: frozenset[str]
    first_version: int = 1


@dataclass(frozen=True)
class Proposal:
    """What was found in a database.

    Attributes:
        database: its name.
        is_mariadb: which server it is.
        candidates: the likeliest first.
        lacking: by name of each other table, which of our columns it has none for.
    """

    database: str
    is_mariadb: bool
    candidates: list[Candidate]
    lacking: Mapping[str, tuple[str, ...]]


def propose(
    config: Store, table: str | None = None, columns: Mapping[str, str] | None = None
) -> Proposal:
    """Look at the tables of the database.

    Args:
        config: which says how to connect; its table and columns are of no account.
        table: look at this one alone.
        columns: by our names its own, those that somebody has named.

    Raises:
        StoreError: store.unreachable, store.auth_failed, store.table_missing,
            store.is_view, ….
    """
    with closing(connect_for_reading(config)) as connection, mapped(display_name(config)):
        database = str(run(connection, "SELECT DATABASE()")[0][0])
        names = [table] if table is not None else _tables(connection)
        candidates: list[Candidate] = []
        lacking: dict[str, tuple[str, ...]] = {}
        given = columns or {}
        for name in names:
            of_table = config.model_copy(update={"table": name})
            try:
                there = read_columns(of_table, connection)
            except StoreError:
                if table is not None:
                    raise
                continue  # one that this account may not read
            if absent := tuple(role for role, of in given.items() if of and of not in there):
                if table is not None:
                    lacking[name] = absent
                continue
            found = _candidate(name, there, read_indexes(of_table, connection), given)
            if isinstance(found, Candidate):
                candidates.append(_with_first_version(found, connection))
            else:
                lacking[name] = found
        candidates.sort(key=lambda candidate: (-candidate.score, candidate.table))
        return Proposal(database, is_mariadb(connection), candidates, lacking)


def _tables(connection: Connection) -> list[str]:
    rows = run(
        connection,
        "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
        f" AND table_type = 'BASE TABLE' ORDER BY table_name LIMIT {_MOST_TABLES}",
    )
    return [name.decode() if isinstance(name, bytes) else str(name) for (name,) in rows]


def _candidate(
    table: str,
    columns: Mapping[str, Column],
    indexes: Sequence[Index],
    given: Mapping[str, str],
) -> Candidate | tuple[str, ...]:
    """The table with its columns; or which of ours it has none for.

    Args:
        given: names of columns that somebody has said; "": there is none.
    """
    names = dict(given)
    pair = _unique_pair(columns, indexes, names)
    if pair is not None:
        names["aggregate_id"], names["version"] = pair
    time_columns = {index.columns[0] for index in indexes}
    # what is taken is taken: the surest first
    for role in ("aggregate_id", "version", "create_time", "payload", "metadata", "event_type"):
        if role not in names:
            found = _best(role, columns, set(names.values()), time_columns)
            if found is None and pair is not None:
                found = _only_one(role, columns, set(names.values()))
            if found is not None:
                names[role] = found
    own_id = _best("id", columns, set(names.values()), time_columns)
    if own_id is not None and own_id in time_columns and "id" not in names:
        names["id"] = own_id
    names = {role: name for role, name in names.items() if name}
    lacking = tuple(role for role in _NAMES if role not in names and role not in _OPTIONAL)
    if lacking:
        return lacking
    score = sum(_rank(role, name) > 0 for role, name in names.items()) * 2
    score += 10 * (pair is not None) + 3 * ("event" in table.lower())
    created = columns[names["create_time"]]
    score += 2 * ("current_timestamp" in created.default) + (created.name in time_columns)
    has_time_index = created.name in time_columns
    every = frozenset(columns)
    return Candidate(table, names, score, pair is not None, has_time_index, every)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _rank(role: str, name: str) -> int:
    """How well a name fits; 0: it is none that such columns have."""
    known = _NAMES[role]
    plain = _plain(name)
    return len(known) - known.index(plain) if plain in known else 0


def _best(
    role: str, columns: Mapping[str, Column], taken: set[str], indexed: set[str]
) -> str | None:
    """The column that fits best. A time may have any name, if it is the only one."""
    fitting = [c for c in columns.values() if c.type in _TYPES[role] and c.name not in taken]
    named = [c for c in fitting if _rank(role, c.name)]
    if named:
        return max(named, key=lambda c: (_rank(role, c.name), c.name in indexed)).name
    if role == "create_time" and fitting:
        defaults = [c for c in fitting if "current_timestamp" in c.default] or fitting
        return defaults[0].name if len(defaults) == 1 else None
    return None


def _only_one(role: str, columns: Mapping[str, Column], taken: set[str]) -> str | None:
    """The column that is left, whatever its name, if there is just one for it."""
    types = {"event_type": {"varchar", "char"}, "payload": _LARGE}.get(role, set())
    left = [c.name for c in columns.values() if c.type in types and c.name not in taken]
    return left[0] if len(left) == 1 else None


def _unique_pair(
    columns: Mapping[str, Column], indexes: Sequence[Index], given: Mapping[str, str]
) -> tuple[str, str] | None:
    """The text and the number of a unique key of two columns, the best named one."""
    pairs = []
    for index in indexes:
        if not index.unique or len(index.columns) != 2:
            continue
        first, second = (columns.get(name) for name in index.columns)
        if first is None or second is None:
            continue
        if given.get("aggregate_id", first.name) != first.name:
            continue
        if given.get("version", second.name) != second.name:
            continue
        if first.type in _TYPES["aggregate_id"] and second.type in INTEGERS:
            rank = _rank("aggregate_id", first.name) + _rank("version", second.name)
            pairs.append((rank, first.name, second.name))
    if not pairs:
        return None
    _, aggregate_id, version = max(pairs)
    return aggregate_id, version


def _with_first_version(candidate: Candidate, connection: Connection) -> Candidate:
    version = quote(candidate.columns["version"])
    rows = run(
        connection,
        f"SELECT MIN(v) FROM (SELECT {version} AS v FROM {quote(candidate.table)}"
        f" LIMIT {_SAMPLE}) AS some",
    )
    lowest = rows[0][0]
    if lowest is None or int(lowest) != 0:
        return candidate
    return replace(candidate, first_version=0)
