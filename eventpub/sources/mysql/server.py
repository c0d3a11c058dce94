"""The identity and role of the server, and whether it may be read.

A replica must not be read: rows appear below the reader's position, however late. Every new
connection and every poll asks for the server's identity and whether it is writable; if it was not
met within the last minute, also whether it replicates from another.

Where several servers take writes (Galera, multi-primary groups, circular replication) each is a
replica of the others. Only the operator can know that all writers use one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import pymysql.err

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import (
    Connection,
    connect_for_reading,
    display_name,
    error_number,
    is_mariadb,
    mapped,
    run,
    run_named,
)

_OFF = {None, 0, "0", "OFF"}
_ON = {"ON", "1"}
_READ_ONLY = "@@GLOBAL.read_only, @@GLOBAL.innodb_read_only"
_OF_A_GROUP = "group_replication_"  # channels that a group's primary has, too
_CLUSTER_VARIABLES = (
    "SHOW GLOBAL VARIABLES WHERE variable_name IN ('wsrep_on', 'wsrep_provider',"
    " 'wsrep_cluster_name', 'group_replication_group_name',"
    " 'group_replication_single_primary_mode')"
)

UNGUARDED = (
    "an event that the replica applies later than recount.horizon after it was created is lost"
    " unless a later version of its aggregate follows; transactions that are open on the primary"
    " are not seen, so a gap may be skipped that one of them would fill; the lag shown is the lag"
    " behind the replica"
)


@dataclass(frozen=True)
class Server:
    """A database server.

    Attributes:
        read_only: ordinary accounts cannot write to it.
        source: the server it replicates from, if the account may see that (`source_is_visible`).
        cluster: the multi-primary cluster it is a member of.
    """

    identity: str
    read_only: bool
    source: str | None
    source_is_visible: bool
    cluster: str | None = None

    def is_replica(self, config: Store) -> bool:
        """Whether rows may appear on it long after their creation."""
        takes_some = self.source is not None or self.cluster is not None
        return self.read_only or (takes_some and not config.takes_all_writes)

    def require_primary(self, config: Store, *, retriable: bool = False) -> None:
        if config.allow_replica or not self.is_replica(config):
            return
        where = f"store.url = {display_name(config)}"
        if self.cluster is not None and not self.read_only:
            raise StoreError(
                "store.multi_primary",
                f"this server {self.what_it_is}: rows written to the other servers appear on it"
                " later than they were created, and transactions that are open there are not seen",
                where=where,
                suggestion="have every writer of the event table use this server, then set"
                " store.takes_all_writes = true; to read it anyway: store.allow_replica = true",
                retriable=retriable,
            )
        raise StoreError(
            "store.replica",
            f"this server {self.what_it_is}: rows appear on it when they are replicated, however"
            " long after they were created, and would be missed",
            where=where,
            suggestion="name the primary in store.url; if this server is the primary now:"
            " SET GLOBAL read_only = OFF; STOP REPLICA; RESET REPLICA ALL; if several servers take"
            " writes, and every writer of the event table uses this one: store.takes_all_writes ="
            " true; to read it anyway: store.allow_replica = true",
            retriable=retriable,
        )

    @property
    def what_it_is(self) -> str:
        if self.cluster is not None and not self.read_only:
            return f"is one of several that take writes, of {self.cluster}"
        if self.source is not None:
            return f"is a replica of {self.source}" + ", read only" * self.read_only
        if self.read_only:
            return "is read only, as replicas and demoted primaries are"
        return "is writable"


def _asked(connection: Connection, also: str = "NULL") -> tuple[str, bool, list[Any]]:
    """Its identity, whether it is read only, and the values of `also`, of the same statement."""
    who = "@@server_uuid"
    if is_mariadb(connection):
        who = "CONCAT_WS('/', @@GLOBAL.server_id, @@hostname, @@port)"
    identity, *flags = run(connection, f"SELECT {who}, {_READ_ONLY}, {also}")[0]
    return str(identity), not _OFF.issuperset(flags[:2]), flags[2:]


def examine(config: Store, connection: Connection) -> Server:
    with mapped(display_name(config)):
        identity, read_only, _ = _asked(connection)
        source, is_visible = _source(connection)
        cluster = cluster_of(dict(run(connection, _CLUSTER_VARIABLES)))
        return Server(identity, read_only, source, is_visible, cluster)


def cluster_of(variables: Mapping[str, str]) -> str | None:
    """A description of the cluster if several of its servers take writes, or None."""
    known = {name.lower(): str(value) for name, value in variables.items()}
    replicates = known.get("wsrep_provider", "none").lower() not in {"", "none"}
    if known.get("wsrep_on") in _ON and replicates:
        return f"the Galera cluster {known.get('wsrep_cluster_name', '')!r}"
    name = known.get("group_replication_group_name")
    if name and known.get("group_replication_single_primary_mode") not in _ON:
        return f"the replication group {name} in multi-primary mode"
    return None


_primaries: dict[tuple[str, str], float] = {}

_EXAMINED_EVERY = 60.0
"""Seconds; a demoted primary may still take writes."""


def require_primary(
    config: Store, connection: Connection, also: str = "NULL"
) -> tuple[str, list[Any]]:
    """The server's identity and the values of `also`; refuses a server that must not be read.

    Raises:
        StoreError: store.replica, store.multi_primary; retriable, as the address may move.
    """
    identity, read_only, values = _asked(connection, also)
    if config.allow_replica:
        return identity, values
    met = (display_name(config), identity)
    if read_only:
        _primaries.pop(met, None)
        Server(identity, True, None, False).require_primary(config, retriable=True)
    elif monotonic() - _primaries.get(met, float("-inf")) > _EXAMINED_EVERY:
        _primaries.pop(met, None)
        examine(config, connection).require_primary(config, retriable=True)
        _primaries[met] = monotonic()
    return identity, values


def _source(connection: Connection) -> tuple[str | None, bool]:
    word = "ALL SLAVES" if is_mariadb(connection) else "REPLICA"
    try:
        rows = run_named(connection, f"SHOW {word} STATUS")
    except pymysql.err.MySQLError as error:
        if 2000 <= (error_number(error) or 2000) < 3000:
            raise  # the connection is lost
        with contextlib.suppress(pymysql.err.MySQLError):  # a hint, where that is all there is
            if _runs_replication(connection):
                return "another server (its replication threads run)", True
        return None, False
    for row in rows:
        if not str(row.get("channel_name") or "").startswith(_OF_A_GROUP):
            host = row.get("source_host") or row.get("master_host")
            return f"{host}:{row.get('source_port') or row.get('master_port')}", True
    return None, True


def _runs_replication(connection: Connection) -> bool:
    if is_mariadb(connection):
        status = run(connection, "SHOW GLOBAL STATUS LIKE 'slave%running'")
        return any(value not in {"0", "OFF"} for _, value in status)
    connection.use_unicode = False  # a statement that runs may not be text
    try:
        processes = run_named(connection, "SHOW PROCESSLIST")
    finally:
        connection.use_unicode = True
    return any(
        each["user"] == "system user" and "source" in str(each["state"]) for each in processes
    )


IDLE_FOR = 5.0
"""Idle seconds after which one is replaced: a NAT may have dropped it, without an error."""

KEPT_FOR = 30.0
"""Seconds after which a connection is replaced: its address may have moved."""


class Pool:
    """Connections to a server that may be read; `prepare` gets each new one and its server's id."""

    def __init__(
        self,
        config: Store,
        where: str,
        prepare: Callable[[Connection, str], None] = lambda connection, server: None,
    ) -> None:
        self._config = config
        self._where = where
        self._prepare = prepare
        self._idle: list[tuple[Connection, float, float]] = []

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """An exclusive connection, closed after an error."""
        idle = self._take_idle()
        connection, made = idle or (connect_for_reading(self._config), monotonic())
        try:
            with mapped(self._where):
                if idle is None:
                    self._prepare(connection, require_primary(self._config, connection)[0])
                yield connection
        except BaseException:  # also where its caller stops reading
            connection._force_close()  # type: ignore[attr-defined]
            raise
        self._idle.append((connection, made, monotonic()))

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()

    def _take_idle(self) -> tuple[Connection, float] | None:
        while True:
            try:  # no check first: another thread may take the last one
                connection, made, used = self._idle.pop()
            except IndexError:
                return None
            if monotonic() - made <= KEPT_FOR and monotonic() - used <= IDLE_FOR:
                return connection, made
            connection.close()
