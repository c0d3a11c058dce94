"""A `read_committed` consumer that notes when it has each record; in a process of its own.

    python -m bench.reader --bootstrap-servers 127.0.0.1:9092 --topic orders --out read.npz

Says ``ready`` when it reads. On SIGTERM it reads to the end of every partition, writes what it
noted and ends.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Consumer, KafkaError, TopicPartition

from .compare import Records

_QUIET_SECONDS = 1.0


def read(bootstrap_servers: str, topic: str, out: Path, stopped: threading.Event) -> None:
    """Reads until `stopped` and to the end; writes `out`."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "bench-reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
            "queued.min.messages": 200_000,
        }
    )
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    print("ready", flush=True)
    numbers: dict[bytes, int] = {}
    keys, versions, arrived, late = array("q"), array("q"), array("q"), array("b")
    created: list[bytes] = []
    ended: set[int] = set()
    last = time.monotonic()
    while not (
        stopped.is_set()
        and len(ended) == len(partitions)
        and time.monotonic() - last > _QUIET_SECONDS
    ):
        # what is there, at once: consume() alone waits until it has as many as were asked for
        one = consumer.poll(0.2)
        messages: list[Any] = [one, *consumer.consume(10_000, 0)] if one is not None else []
        now = time.time_ns() // 1000
        for message in messages:
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition())
                continue
            last = time.monotonic()
            ended.discard(message.partition())
            headers = dict(message.headers())
            key = message.key()
            keys.append(numbers.setdefault(key, len(numbers)))
            versions.append(int(headers["ce_sequence"]))
            created.append(headers["ce_time"])
            late.append("eventpub_late" in headers)
            arrived.append(now)
    consumer.close()
    texts = np.array([text[:-1] for text in created], "S26").astype("U26")  # without the Z
    np.savez(
        out,
        names=np.array([key.decode() for key in numbers]),
        keys=np.frombuffer(keys, np.int64),
        versions=np.frombuffer(versions, np.int64),
        created=texts.astype("datetime64[us]").astype(np.int64),
        arrived=np.frombuffer(arrived, np.int64),
        late=np.frombuffer(late, np.int8).astype(np.bool_),
    )


class Reader:
    """The reader's process; `records` after the block has ended."""

    def __init__(self, bootstrap_servers: str, topic: str, folder: Path) -> None:
        self._out = folder / f"{topic}.npz"
        self._command = [
            *(sys.executable, "-m", __name__, "--bootstrap-servers", bootstrap_servers),
            *("--topic", topic, "--out", str(self._out)),
        ]
        self.records: Records

    def __enter__(self) -> Reader:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the reader did not start")
        self.pid = self._process.pid
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.kill()
            self._process.wait()
            return
        self._process.terminate()
        if self._process.wait(600) != 0:
            raise RuntimeError(f"the reader ended with status {self._process.returncode}")
        with np.load(self._out) as found:
            self.records = Records(
                names=found["names"].tolist(),
                **{
                    name: found[name] for name in ("keys", "versions", "created", "arrived", "late")
                },
            )
        self._out.unlink()


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.reader", description=__doc__)
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who started it says when
    read(given.bootstrap_servers, given.topic, given.out, stopped)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
