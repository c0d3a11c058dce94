"""A table that is filled as fast as the server can, for a backlog."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from tests.servers.connections import TYPES, WriterConnection, connect, drop, quoted, text_of


def fill(
    url: str,
    events: int,
    aggregates: int,
    *,
    first: int | None = None,
    last: int | None = None,
    payload_bytes: int = 300,
    table: str = "events",
    prefix: str = "order",
    connections: int = 2,
    session_time_zone: str | None = "+00:00",
) -> None:
    """Appends `events` events as fast as the server can make them, for a backlog.

    The n-th event is version ``n // aggregates + 1`` of aggregate ``n % aggregates``; all are
    committed, and no version is missing. Meant for aggregates that the table does not have yet.

    Args:
        first: `create_time` of the first event, in microseconds; None = an hour before `last`.
        last: the time before which the last event is; None = the database's present time.
        session_time_zone: None = the server's, for a DATETIME column with local time.

    Raises:
        pymysql.Error: the database cannot be reached or refuses the rows.
    """
    with closing(connect(url)) as connection, connection.cursor() as cursor:
        if last is None:
            cursor.execute("SELECT CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)")
            ((last,),) = cursor.fetchall()
    assert last is not None
    begin = last - 3_600_000_000 if first is None else first
    space = 16_384
    text = text_of(random.Random(0))[:space]
    size = max(0, payload_bytes - 60)
    digits = "SELECT 0 d" + "".join(f" UNION ALL SELECT {digit}" for digit in range(1, 10))
    kinds = ",".join(f"'{kind}'" for kind in TYPES)

    def statement(start: int, stop: int) -> str:
        name = f"CONCAT('{prefix}-', LPAD(n % {aggregates}, 7, '0'))"
        return (
            f"INSERT INTO {quoted(table)} "  # noqa: S608
            "(aggregate_id, version, event_type, payload, create_time) "
            f"SELECT {name}, n DIV {aggregates} + 1, ELT(1 + n % {len(TYPES)}, {kinds}), "
            f"""CONCAT('{{"order":"', {name}, '","version":', n DIV {aggregates} + 1, """
            f"""',"note":"', SUBSTRING(_latin1'{text}', 1 + n * 7919 % {space - size}, {size}), """
            """'"}'), """
            f"FROM_UNIXTIME({begin // 1_000_000}) + INTERVAL "
            f"({begin % 1_000_000} + n * {last - begin} DIV {events}) MICROSECOND "
            f"FROM (SELECT {start} + a.d * 1000 + b.d * 100 + c.d * 10 + e.d AS n FROM "
            f"({digits}) a JOIN ({digits}) b JOIN ({digits}) c JOIN ({digits}) e) numbers "
            f"WHERE n < {stop} ORDER BY n"
        )

    local = threading.local()
    opened: list[WriterConnection] = []

    def insert(start: int) -> None:
        if not hasattr(local, "connection"):
            local.connection = connect(url)
            opened.append(local.connection)
            if session_time_zone is not None:
                local.connection.query(f"SET time_zone = '{session_time_zone}'")
        local.connection.query(statement(start, min(start + 10_000, events)))

    with ThreadPoolExecutor(connections) as pool:
        try:
            for _ in pool.map(insert, range(0, events, 10_000)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
            for connection in opened:
                drop(connection)
