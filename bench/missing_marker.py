"""Kafka answers a commit, and never writes its marker: needs nothing but confluent-kafka.

    python missing_marker.py --bootstrap-servers 127.0.0.1:9092 --kill CMD --start CMD --tries 20

Needs one stock Kafka in KRaft mode, with nothing on it that matters:

    KAFKA=/opt/kafka_2.13-4.3.1
    $KAFKA/bin/kafka-storage.sh format --standalone -t $($KAFKA/bin/kafka-storage.sh random-uuid) \\
        -c $KAFKA/config/server.properties
    start="nohup $KAFKA/bin/kafka-server-start.sh \\
        $KAFKA/config/server.properties >broker.log 2>&1 &"
    kill='pkill -9 -f kafka.Kafka'

Each try: four producers commit transactions of a record for each partition, as fast as they can;
after a random time the broker is killed (SIGKILL) and started again at once. When it is back, a new
producer takes each transactional id over, which waits until its transactions are over. Then nothing
may be open. The script waits a minute, and counts the partitions whose last stable offset still is
below the high watermark, and those where that hides a transaction whose commit had been answered.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

T = TypeVar("T")
PRODUCERS, PARTITIONS, SETTLE = 4, 3, 60.0


def commit_until_failure(servers: str, name: str, topic: str, answered: dict[int, int]) -> None:
    """Commits until the first error; notes the last offset of each partition that was answered."""
    producer = Producer(
        {"bootstrap.servers": servers, "transactional.id": name, "linger.ms": 0, "log_level": 0}
    )
    try:
        producer.init_transactions(30)
        while True:
            written: dict[int, int] = {}

            def delivered(error: Any, message: Any, into: dict[int, int] = written) -> None:
                if error is None:
                    into[message.partition()] = message.offset()

            producer.begin_transaction()
            for partition in range(PARTITIONS):
                producer.produce(topic, b"x", partition=partition, on_delivery=delivered)
            producer.commit_transaction(5)
            answered.update(written)
    except KafkaException:
        producer.purge()


def ends(servers: str, topic: str, isolation: str) -> dict[int, int]:
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "ends", "isolation.level": isolation}
    )
    try:
        return {
            p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=30)[1]
            for p in range(PARTITIONS)
        }
    finally:
        consumer.close()


def until(what: str, call: Callable[[], T], patience: float = 120.0) -> T:
    deadline = time.monotonic() + patience
    while True:
        try:
            return call()
        except KafkaException as error:
            if time.monotonic() > deadline:
                sys.exit(f"{what}: {error}")
            time.sleep(0.2)


def one_try(number: int, servers: str, kill: str, start: str) -> tuple[int, int]:
    """How many partitions stay open; in how many of them an answered commit is hidden."""
    topics = [f"missing-{int(time.time())}-{number}-{n}" for n in range(PRODUCERS)]
    admin = AdminClient({"bootstrap.servers": servers})
    for made in admin.create_topics([NewTopic(t, PARTITIONS, 1) for t in topics]).values():
        made.result(60)
    answered: list[dict[int, int]] = [{} for _ in topics]
    threads = [
        threading.Thread(target=commit_until_failure, args=(servers, t, t, a))
        for t, a in zip(topics, answered, strict=True)
    ]
    for thread in threads:
        thread.start()
    while not all(answered):
        time.sleep(0.05)
    time.sleep(random.uniform(0.5, 3))
    subprocess.run(kill, shell=True, check=False)
    subprocess.run(start, shell=True, check=True)
    for thread in threads:
        thread.join()
    for topic in topics:
        new = Producer({"bootstrap.servers": servers, "transactional.id": topic, "log_level": 0})
        until("taking over", partial(new.init_transactions, 10))
    deadline = time.monotonic() + SETTLE
    while True:
        opened = hidden = 0
        for topic, of in zip(topics, answered, strict=True):
            high = until("ends", partial(ends, servers, topic, "read_uncommitted"))
            stable = until("ends", partial(ends, servers, topic, "read_committed"))
            opened += sum(0 <= stable[p] < high[p] for p in high)
            hidden += sum(0 <= stable[p] <= of.get(p, -1) for p in high)
        if not opened or time.monotonic() > deadline:
            return opened, hidden
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--bootstrap-servers", "--kill", "--start"):
        parser.add_argument(name, required=True)
    parser.add_argument("--tries", type=int, default=20)
    given = parser.parse_args()
    found = 0
    for number in range(given.tries):
        opened, hidden = one_try(number, given.bootstrap_servers, given.kill, given.start)
        found += bool(hidden)
        print(
            f"try {number + 1}: {opened} of {PRODUCERS * PARTITIONS} partitions stay open,"
            f" in {hidden} an answered commit is hidden",
            flush=True,
        )
    print(f"answered commits were hidden in {found} of {given.tries} tries")


if __name__ == "__main__":
    main()
