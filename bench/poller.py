"""A poller as it is usually written: ``WHERE create_time > last``, nothing else.

    python -m bench.poller --url … --bootstrap-servers … --topic …

What a JDBC source connector does in timestamp mode: it asks every 100 ms for what is newer than
the newest row it has seen, sends it by an idempotent producer, and never looks back. Runs until
SIGTERM, then sends what is there and ends.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

import pymysql
from confluent_kafka import Producer
from sqlalchemy.engine import make_url

from eventpub.sink.encoder import CloudEvents
from eventpub.sink.records import partitions_of

from .raw_pipe import PRODUCER, SELECTED, one_by_one, table

_EVERY = 0.1
_MOST_ROWS = 50_000


def poll(
    url: str, bootstrap_servers: str, topic: str, partitions: int, stopped: threading.Event
) -> int:
    """Polls until `stopped`; returns how many events were sent."""
    address = make_url(url)
    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, **PRODUCER}
    )
    sent, last = 0, 0
    with pymysql.connect(
        host=address.host,
        port=address.port or 3306,
        user=address.username,
        password=address.password or "",
        database=address.database,
        autocommit=True,
        ssl_disabled=True,
    ) as connection:
        while True:
            ending = stopped.is_set()
            with connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT {SELECTED} FROM events FORCE INDEX (create_time) "  # noqa: S608
                    "WHERE create_time > FROM_UNIXTIME(%s) ORDER BY events.create_time LIMIT %s",
                    (f"{last // 1_000_000}.{last % 1_000_000:06}", _MOST_ROWS),
                )
                rows = cursor.fetchall()
            if rows:
                page = table(rows)
                placed = partitions_of(page, partitions)
                one_by_one(producer, topic, CloudEvents("poller").events(page, placed))
                producer.flush()
                sent += len(rows)
                last = rows[-1][-1]
            if len(rows) < _MOST_ROWS:
                if ending:
                    return sent
                stopped.wait(_EVERY)


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.poller", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--partitions", type=int, default=8)
    given = parser.parse_args(arguments)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    poll(given.url, given.bootstrap_servers, given.topic, given.partitions, stopped)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
