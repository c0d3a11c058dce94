"""How long a shard is away when a machine of a cluster is lost for good.

    python -m tests.spark.executor_loss --events 5000000

Two workers that share nothing but `state.location` publish a backlog, then what is written at 100
transactions a second; one of them dies with its disk. Prints, for each shard, seconds until the
first event arrives that was created afterwards. Needs root, for the workers' mounts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from eventpub.local.servers import kafka
from tests.publisher.harness import eventually
from tests.spark.cluster import cluster
from tests.spark.kills import Job, Writers, compare, connect, database, read_kafka, run_of, stored

SHARDS = 2
_AGGREGATES = 100_000
_PORTION = 500_000


def fill(url: str, events: int) -> None:
    """Insert events in the order of their versions, an hour old."""
    digit = "(SELECT 0 n" + "".join(f" UNION ALL SELECT {n}" for n in range(1, 10)) + ")"
    digits = " CROSS JOIN ".join(f"{digit} d{n}" for n in range(6))
    number = " + ".join(f"d{n}.n * {10**n}" for n in range(6))
    with connect(url) as connection, connection.cursor() as cursor:
        for begin in range(0, events, _PORTION):
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"  # noqa: S608
                f" SELECT CONCAT('a-', n MOD {_AGGREGATES}), n DIV {_AGGREGATES} + 1, 't',"
                " REPEAT('x', 100), NOW(6) - INTERVAL 1 HOUR + INTERVAL n MICROSECOND"
                f" FROM (SELECT {begin} + {number} AS n FROM {digits}) AS numbers"
                f" WHERE n < {min(begin + _PORTION, events)}"
            )
            connection.commit()


def away(address: str, since: float) -> list[float]:
    """Seconds from a time (s) until each shard's first event that was created after it."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "away"})
    partitions = consumer.list_topics("kills", 10).topics["kills"].partitions
    consumer.assign([TopicPartition("kills", n, -1) for n in partitions])  # from the end
    found: dict[int, float] = {}
    while len(found) < SHARDS:
        message: Any = consumer.poll(1)
        if message is not None and message.timestamp()[1] > since * 1000:
            found.setdefault(message.partition() % SHARDS, time.time() - since)
    consumer.close()
    return [round(found[shard], 1) for shard in range(SHARDS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=5_000_000)
    events = parser.parse_args().events
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(database(folder))
        address = stack.enter_context(kafka(folder / "kafka")).bootstrap_servers
        machines = stack.enter_context(cluster(folder, [folder / "run"]))
        fill(url, events)
        job = Job(run_of(url, address, folder, machines.master, {}), folder / "job.log", {})
        job.start()
        stack.callback(job.kill)
        began = time.monotonic()
        eventually(lambda: _published(folder) >= events, 1200, every=1.0)
        seconds = round(time.monotonic() - began)
        writers = Writers(url)
        stack.callback(writers.stop)
        time.sleep(15)
        load, at = round(os.getloadavg()[0], 1), time.time()
        machines.lose_one()
        lost = away(address, at)
        writers.stop()
        job.kill()
        job.start(ends=True)
        assert job.wait(600) == 0, job.words()
        found = compare(stored(url), read_kafka(address, "kills"))
    print(json.dumps({"published in": seconds, "load": load, "away": lost, "found": found}))


def _published(folder: Path) -> int:
    file = folder / "run" / "status.json"
    return int(json.loads(file.read_text())["counters"]["published"]) if file.exists() else 0


if __name__ == "__main__":
    main()
