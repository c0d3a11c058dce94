"""A replica of a local database by GTID: its applier stopped and started, and its promotion.

    with mysql(folder, options=replicating(1)) as primary, replica_of(primary, other) as replica:
        replica.wait_until_applied()
        primary.kill()
        replica.promote()

Replication is asynchronous, as it is by default: a primary that dies may take with it what it has
committed and sent to no replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from eventpub.errors import LocalError
from eventpub.local.servers import Database
from tests.servers.databases import another


def replicating(server_id: int, *, mariadb: bool = False) -> list[str]:
    """The options of a server that takes part in a replication."""
    common = [f"--server-id={server_id}", "--log-bin=binlog", "--sync-binlog=0"]
    if mariadb:
        return [*common, "--log-slave-updates", "--skip-slave-start"]
    return [*common, "--gtid-mode=ON", "--enforce-gtid-consistency=ON", "--skip-replica-start"]


def replica_of(
    primary: Database, directory: Path, *, server_id: int = 2, options: Sequence[str] = ()
) -> Replica:
    """Starts a server that replicates all that `primary` has written since its first start.

    Raises:
        LocalError: `local.unsupported_platform`, `local.start_failed`.
    """
    is_mariadb = "MariaDB" in primary.name
    own = replicating(server_id, mariadb=is_mariadb)
    server = another(primary, directory, options=[*own, *options])
    replica = Replica(primary, server, is_mariadb)
    try:
        replica.begin()
    except BaseException:
        server.stop()
        raise
    return replica


class Replica:
    """A read-only copy that follows its primary.

    Attributes:
        server: it; goes on as a server of its own after `promote`.
    """

    def __init__(self, primary: Database, server: Database, is_mariadb: bool) -> None:
        self.server = server
        self._primary = primary
        self._is_mariadb = is_mariadb
        self._word = "SLAVE" if is_mariadb else "REPLICA"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.stop()

    def begin(self) -> None:
        """Begins to follow the primary."""
        if self._is_mariadb:
            self._run(
                "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', "
                f"MASTER_PORT = {self._primary.port}, MASTER_USER = 'root', MASTER_SSL = 0, "
                "MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1"
            )
            self._run("SET GLOBAL read_only = ON")
        else:
            self._run(
                "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', "
                f"SOURCE_PORT = {self._primary.port}, SOURCE_USER = 'root', "
                "SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1, SOURCE_CONNECT_RETRY = 1"
            )
            self._run("SET GLOBAL super_read_only = ON")
        self._run(f"START {self._word}")

    def stop_receiving(self) -> None:
        """What the primary commits from now on does not reach it."""
        self._run(f"STOP {self._word} IO_THREAD")

    def stop_applier(self) -> None:
        """It still receives, but shows nothing new."""
        self._run(f"STOP {self._word} SQL_THREAD")

    def start(self) -> None:
        """Both go on."""
        self._run(f"START {self._word}")

    def wait_until_applied(self, timeout: float = 30.0) -> None:
        """Waits until it shows all that the primary has committed.

        Raises:
            LocalError: `local.start_failed`: not within `timeout` seconds.
        """
        position = "@@gtid_binlog_pos" if self._is_mariadb else "@@gtid_executed"
        ((reached,),) = self._run(f"SELECT {position}", self._primary)
        waited = (
            f"MASTER_GTID_WAIT('{reached}', {timeout})"
            if self._is_mariadb
            else f"WAIT_FOR_EXECUTED_GTID_SET('{reached}', {timeout})"
        )
        if self._run(f"SELECT {waited}") != ((0,),):
            raise LocalError(
                "local.start_failed",
                f"the replica has not applied {reached} within {timeout:.0f} s",
                where=str(self.server.log),
            )

    def promote(self) -> None:
        """Makes it a primary of its own, which takes writes."""
        self._run(f"STOP {self._word}")
        self._run(f"RESET {self._word} ALL")
        if not self._is_mariadb:
            self._run("SET GLOBAL super_read_only = OFF")
        self._run("SET GLOBAL read_only = OFF")

    def _run(
        self, statement: str, server: Database | None = None
    ) -> tuple[tuple[object, ...], ...]:
        connected = (server or self.server).connect(None, autocommit=True, ssl_disabled=True)
        with connected as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return tuple(cursor.fetchall())
