"""The ceiling: what the clients alone can do, in one process and without any check.

    python -m bench.raw_pipe --events 1000000 --rounds 3

A thread reads pages by ``create_time`` (an index range scan each, its end found by the index
alone), the main thread makes the same records as the publisher (key, value, partition, timestamp
and CloudEvents headers, by the publisher's own code) and produces them in transactions. Nothing is
deduplicated, counted, held or remembered: it cannot be restarted, and loses what commits late.

Without ``--topic`` it only reads, to compare clients; without ``--url`` it starts a Kafka broker
and a MySQL of its own and fills the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Producer
from sqlalchemy.engine import make_url

from eventpub.private_apis.bulk import bulk_of
from eventpub.sink.encoder import CloudEvents
from eventpub.sink.records import Columns, partitions_of

READERS = ("connectorx", "asyncmy", "pymysql")
PAGE_ROWS = 100_000
TRANSACTION_ROWS = 200_000
IN_FLIGHT = 5
PRODUCER: dict[str, Any] = {
    "compression.type": "lz4",
    "linger.ms": 200,
    "batch.num.messages": 100_000,
    "batch.size": 900_000,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 1 << 20,
    "enable.sparse.connections": "false",
}
_MICROS = "CAST(UNIX_TIMESTAMP(create_time) * 1000000 AS SIGNED) AS create_time"
SELECTED = f"aggregate_id, version, event_type, payload, metadata, {_MICROS}"

Read = Callable[[str], pa.Table]


def reader(url: str, client: str) -> Read:
    """A function that runs a SELECT of one client, into Arrow.

    Raises:
        ImportError: the client is not installed.
    """
    address = make_url(url)
    place: dict[str, Any] = {
        "host": address.host or "127.0.0.1",
        "port": address.port or 3306,
        "user": address.username or "root",
        "password": address.password or "",
    }
    if client == "connectorx":
        import connectorx

        plain = address.set(drivername="mysql").render_as_string(hide_password=False)

        def by_connectorx(sql: str) -> pa.Table:
            table: pa.Table = connectorx.read_sql(plain, sql, return_type="arrow", protocol="text")
            return table

        return by_connectorx
    if client == "asyncmy":
        return _by_asyncmy(place, address.database)
    import pymysql

    connection = pymysql.connect(**place, database=address.database, ssl_disabled=True)

    def by_pymysql(sql: str) -> pa.Table:
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return table(cursor.fetchall())

    return by_pymysql


def _by_asyncmy(place: dict[str, Any], database: str | None) -> Read:
    import asyncio

    import asyncmy

    loop = asyncio.new_event_loop()
    connection = loop.run_until_complete(asyncmy.connect(**place, db=database))

    async def fetch(sql: str) -> Any:
        async with connection.cursor() as cursor:
            await cursor.execute(sql)
            return await cursor.fetchall()

    return lambda sql: table(loop.run_until_complete(fetch(sql)))


def table(rows: Any) -> pa.Table:
    """Rows of `SELECTED` in Arrow."""
    columns = zip(*rows, strict=True) if rows else [[]] * 6
    types = (pa.string(), pa.int64(), pa.string(), pa.large_binary(), pa.string(), pa.int64())
    names = ("aggregate_id", "version", "event_type", "payload", "metadata", "create_time")
    return pa.table(
        {
            name: pa.array(column, kind)
            for name, column, kind in zip(names, columns, types, strict=True)
        }
    )


def pages(url: str, client: str, page_rows: int) -> Iterator[pa.Table]:
    """The table by `create_time`, one page read ahead."""
    ready: Queue[pa.Table | BaseException | None] = Queue(2)

    def fetch() -> None:
        import pymysql

        try:
            address = make_url(url)
            read = reader(url, client)
            with pymysql.connect(
                host=address.host or "127.0.0.1",
                port=address.port or 3306,
                user=address.username,
                password=address.password or "",
                database=address.database,
                ssl_disabled=True,
            ) as connection:
                after = "1970-01-02"
                while True:
                    with connection.cursor() as cursor:
                        cursor.execute(
                            "SELECT CAST(create_time AS CHAR) FROM events "  # noqa: S608
                            f"FORCE INDEX (create_time) WHERE create_time > '{after}' "
                            f"ORDER BY create_time LIMIT 1 OFFSET {page_rows - 1}"
                        )
                        found = cursor.fetchone()
                    upto = found[0] if found else "2038-01-01"
                    ready.put(
                        read(
                            f"SELECT {SELECTED} FROM events FORCE INDEX (create_time) "  # noqa: S608
                            f"WHERE create_time > '{after}' AND create_time <= '{upto}' "
                            "ORDER BY events.create_time"
                        )
                    )
                    if found is None:
                        break
                    after = upto
            ready.put(None)
        except BaseException as error:  # handed to the thread that takes the pages
            ready.put(error)

    threading.Thread(target=fetch, daemon=True).start()
    while (page := ready.get()) is not None:
        if isinstance(page, BaseException):
            raise page
        if page.num_rows:
            yield page


def drain(  # noqa: PLR0913 (what a case is measured with)
    url: str,
    bootstrap_servers: str,
    topic: str,
    partitions: int,
    *,
    client: str = "connectorx",
    page_rows: int = PAGE_ROWS,
    transaction_rows: int = TRANSACTION_ROWS,
    in_flight: int = IN_FLIGHT,
) -> int:
    """Sends the whole table to the topic; returns how many events."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "transactional.id": f"raw-{uuid.uuid4().hex}",
            "max.in.flight": in_flight,
            **PRODUCER,
        }
    )
    producer.init_transactions(30)
    at_once = bulk_of(producer)
    sent = open_rows = 0
    for page in pages(url, client, page_rows):
        if not open_rows:
            producer.begin_transaction()
        encoder, placed = CloudEvents("raw"), partitions_of(page, partitions)
        if at_once is None or (events := encoder.fixed(page, placed)) is None:
            one_by_one(producer, topic, encoder.events(page, placed))
        else:
            rows = np.arange(page.num_rows)
            while len(rows := rows[at_once.produce(topic, events, rows) :]):
                producer.poll(0.05)
        open_rows += page.num_rows
        if open_rows >= transaction_rows:
            producer.commit_transaction(60)
            sent, open_rows = sent + open_rows, 0
    if open_rows:
        producer.commit_transaction(60)
    return sent + open_rows


def one_by_one(producer: Producer, topic: str, columns: Columns) -> None:
    """Queues all records, without delivery reports."""
    for key, value, partition, timestamp, headers in zip(
        columns.keys,
        columns.values,
        columns.partitions.tolist(),
        columns.timestamps,
        columns.headers,
        strict=True,
    ):
        while True:
            try:
                producer.produce(topic, value, key, partition, None, None, timestamp, headers)
                break
            except BufferError:
                producer.poll(0.05)


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.raw_pipe", description=__doc__)
    parser.add_argument("--url", help="of a database with a filled table `events`")
    parser.add_argument("--bootstrap-servers")
    parser.add_argument("--topic")
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--client", choices=READERS, default="connectorx")
    parser.add_argument("--page-rows", type=int, default=PAGE_ROWS)
    parser.add_argument("--transaction-rows", type=int, default=TRANSACTION_ROWS)
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="requests, 1 to 5")
    parser.add_argument("--events", type=int, default=1_000_000, help="without --url")
    parser.add_argument("--aggregates", type=int, default=20_000, help="without --url")
    parser.add_argument("--rounds", type=int, default=3, help="without --url")
    given = parser.parse_args(arguments)
    if given.url is None:
        return _alone(given)
    started = time.time()
    if given.topic is None:
        done = sum(page.num_rows for page in pages(given.url, given.client, given.page_rows))
    else:
        done = drain(
            given.url,
            given.bootstrap_servers,
            given.topic,
            given.partitions,
            client=given.client,
            page_rows=given.page_rows,
            transaction_rows=given.transaction_rows,
            in_flight=given.in_flight,
        )
    seconds = round(time.time() - started, 3)
    cpu = round(time.process_time(), 3)
    print(json.dumps({"events": done, "seconds": seconds, "cpu_seconds": cpu}))
    return 0


def _alone(given: argparse.Namespace) -> int:
    from .machine import Machine
    from .peers import raw_pipe

    with Machine() as machine:
        url = machine.table("raw")
        machine.fill(url, given.events, given.aggregates)
        for _ in range(given.rounds):
            run = raw_pipe(
                machine,
                url,
                given.events,
                client=given.client,
                page_rows=given.page_rows,
                transaction_rows=given.transaction_rows,
                partitions=given.partitions,
                in_flight=given.in_flight,
            )
            print(json.dumps({k: v for k, v in run.items() if k != "growth"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
