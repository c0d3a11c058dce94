"""How fast a backlog drains, and where the time goes, with a raw pipe beside it.

    python -m bench.drain --events 1000000 --rounds 3

Starts a Kafka broker and a MySQL of its own, fills the table of INTERFACE.md and drains it in
turns: by the publisher (exactly once, all checks), and by a raw pipe: one process, range scan →
transactional producer with the same headers, no checks. Prints one line a run and the medians, and
with `--json FILE` writes them. Rates are from the first to the last commit, so that they compare
without the start of the JVM, which is printed by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pymysql.cursors import SSCursor

from eventpub.config import App, Config, Read, Sink, Store
from eventpub.local import Database, Kafka, kafka, mysql
from eventpub.local.writers import fill
from eventpub.spark import Progress, run
from eventpub.store import migrate

_BATCH = 50_000


@dataclass
class Run:
    """One drain: `start` is seconds until the first commit, `rate` events/s from there on."""

    what: str
    events: int
    start: float
    rate: float
    steps: dict[str, float] = field(default_factory=dict)


def publisher(url: str, broker: Kafka, folder: Path, number: int) -> Run:
    """Drain by `eventpub run --available-now`, called as a library."""
    config = Config(
        app=App(id=f"drain-{number}", state_dir=folder / f"state-{number}"),
        store=Store.model_validate({"url": url}),
        read=Read(page_rows=_BATCH),
        sink=Sink(topic=f"drain.{number}", bootstrap_servers=broker.bootstrap_servers),
    )
    seen: list[tuple[float, int]] = []
    steps: dict[str, float] = {}

    def see(progress: Progress) -> None:
        if progress.published and (not seen or progress.published > seen[-1][1]):
            seen.append((time.monotonic(), progress.published))
            for step, seconds in progress.batch_seconds.items():
                steps[step] = steps.get(step, 0.0) + seconds

    began = time.monotonic()
    total = run(config, available_now=True, on_progress=see).published
    (first, some), (last, _) = seen[0], seen[-1]
    rate = (total - some) / (last - first)
    return Run("eventpub", total, first - began, rate, steps)


def raw_pipe(database: Database, broker: Kafka, number: int) -> Run:
    """Drain without any check: what the clients alone can do."""
    topic = f"raw.{number}"
    settings: dict[str, Any] = {"bootstrap.servers": broker.bootstrap_servers}
    admin = AdminClient(settings)
    admin.create_topics([NewTopic(topic, 8, 1)])[topic].result(30)
    producer = Producer(
        settings
        | {
            "transactional.id": topic,
            "compression.type": "lz4",
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    producer.init_transactions(30)
    sent = some = 0
    began = time.monotonic()
    first = began
    with database.connect("drain") as connection, connection.cursor(SSCursor) as cursor:
        cursor.execute(
            "SELECT aggregate_id, version, event_type, payload, CAST(create_time AS CHAR) "
            "FROM events ORDER BY create_time"
        )
        while rows := cursor.fetchmany(_BATCH):
            producer.begin_transaction()
            for row in rows:
                _produce(producer, topic, *row)
            producer.commit_transaction(60)
            sent += len(rows)
            if not some:
                first, some = time.monotonic(), sent
    return Run("raw pipe", sent, first - began, (sent - some) / (time.monotonic() - first))


def _produce(producer: Producer, topic: str, *row: Any) -> None:
    aggregate_id, version, event_type, payload, created = row
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", f"{aggregate_id}/{version}".encode()),
        ("ce_source", b"raw"),
        ("ce_type", event_type.encode()),
        ("ce_time", created.encode()),
        ("ce_subject", aggregate_id.encode()),
        ("ce_sequence", str(version).encode()),
        ("content-type", b"application/json"),
    ]
    while True:
        try:
            producer.produce(topic, payload, aggregate_id.encode(), headers=headers)
            return
        except BufferError:
            producer.poll(0.1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.drain", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--aggregates", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--migrated", action="store_true", help="the table of eventpub migrate")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="eventpub-drain-") as name:
        folder = Path(name)
        with kafka(folder / "kafka") as broker, mysql(folder / "mysql") as database:
            url = _table(database, migrated=given.migrated)
            fill(url, given.events, given.aggregates)
            for number in range(given.rounds):
                for one in (
                    publisher(url, broker, folder, number),
                    raw_pipe(database, broker, number),
                ):
                    print(
                        f"{one.what:>9}: {one.rate:>9,.0f}/s, start {one.start:5.1f} s", flush=True
                    )
                    runs.append(one)
    _report(runs)
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in runs], indent=1))


def _table(database: Database, *, migrated: bool) -> str:
    with database.connect(None) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE drain")
    url = database.url(database="drain")
    if migrated:
        migrate(Store.model_validate({"url": url}))
        return url
    with database.connect("drain") as connection, connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE events (id BIGINT AUTO_INCREMENT PRIMARY KEY, "
            "aggregate_id VARCHAR(255) COLLATE utf8mb4_0900_bin NOT NULL, "
            "version BIGINT NOT NULL, event_type VARCHAR(255) NOT NULL, payload LONGBLOB NULL, "
            "metadata JSON NULL, create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), "
            "UNIQUE KEY (aggregate_id, version), KEY (create_time))"
        )
    return url


def _report(runs: list[Run]) -> None:
    rates = {
        what: statistics.median(one.rate for one in runs if one.what == what)
        for what in dict.fromkeys(one.what for one in runs)
    }
    for what, rate in rates.items():
        print(f"median {what}: {rate:,.0f} events/s", file=sys.stdout)
    print(f"ratio: {rates['eventpub'] / rates['raw pipe']:.2f}")
    steps: dict[str, float] = {}
    for one in runs:
        for step, seconds in one.steps.items():
            steps[step] = steps.get(step, 0.0) + seconds
    total = steps.pop("total", 0.0)
    for step, seconds in sorted(steps.items(), key=lambda item: -item[1]):
        print(f"  {step:>9}: {100 * seconds / total:4.1f}% of the batches' time")


if __name__ == "__main__":
    main()
