"""A topic of a measurement: made, watched while it grows, and counted, all from outside.

What "visible" means everywhere in here: the last stable offset has passed it, so that a
`read_committed` consumer gets it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, Self

import numpy as np
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

_QUIET = logging.getLogger(__name__)  # a broker that was stopped is no news
_QUIET.setLevel(logging.CRITICAL)
_EVERY = 0.025
_TOGETHER = 0.15
_COUNTERS = 2


def create(bootstrap_servers: str, name: str, partitions: int) -> None:
    """Makes the topic and waits until every partition has a leader."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers}, logger=_QUIET)
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(30)
    deadline = time.monotonic() + 30
    while True:
        try:
            stable_offsets(asking_consumer(bootstrap_servers), name, partitions)
            return
        except KafkaException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def delete(bootstrap_servers: str, name: str) -> None:
    """Frees its disk space, within a minute."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers}, logger=_QUIET)
    admin.delete_topics([name])[name].result(30)


def asking_consumer(bootstrap_servers: str) -> Consumer:
    """For `stable_offsets`."""
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": "bench-ask"}
    return Consumer({**settings, "isolation.level": "read_committed"}, logger=_QUIET)


def stable_offsets(consumer: Consumer, name: str, partitions: int, timeout: float = 10) -> int:
    """The last stable offsets of all partitions, added up (markers are offsets, too)."""
    wanted = [TopicPartition(name, p, OFFSET_END) for p in range(partitions)]
    answers = consumer.offsets_for_times(wanted, timeout)
    for answer in answers:
        if answer.error is not None or answer.offset < 0:
            raise KafkaException(answer.error or KafkaError(KafkaError._TRANSPORT))
    return sum(answer.offset for answer in answers)


def count(bootstrap_servers: str, name: str, partitions: int) -> int:
    """How many records `read_committed` consumers find, to the present end: one a core."""
    shares = [range(first, partitions, _COUNTERS) for first in range(_COUNTERS)]
    with ProcessPoolExecutor(_COUNTERS, get_context("spawn")) as pool:
        return sum(pool.map(partial(_count, bootstrap_servers, name), filter(None, shares)))


def _count(bootstrap_servers: str, name: str, partitions: Sequence[int]) -> int:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "bench-count",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.queue.backoff.ms": 2,
        },
        logger=_QUIET,
    )
    try:
        consumer.assign([TopicPartition(name, p, 0) for p in partitions])
        ended: set[int] = set()
        found = 0
        while len(ended) < len(partitions):
            message: Any
            for message in consumer.consume(10_000, 1.0):
                if message.error() is None:
                    found += 1
                else:
                    ended.add(message.partition())
        return found
    finally:
        consumer.close()


@dataclass(frozen=True)
class Growth:
    """How a topic grew: at `times` (Unix, s), what was visible; offsets, so markers included."""

    times: list[float]
    offsets: list[int]

    @property
    def first(self) -> float:
        """When the first record was visible."""
        return next(t for t, n in zip(self.times, self.offsets, strict=True) if n > self.offsets[0])

    @property
    def last(self) -> float:
        """When the last one was."""
        end = self.offsets[-1]
        return next(t for t, n in zip(self.times, self.offsets, strict=True) if n == end)

    @property
    def since(self) -> float:
        """When the first transactions, which end together, had become visible.

        The beginning of the watch where nothing came afterwards.
        """
        since = max(t for t in self.times if t <= self.first + _TOGETHER)
        return since if since < self.last else self.times[0]

    @property
    def share(self) -> float:
        """The part of all that became visible after `since`."""
        rows = zip(self.times, self.offsets, strict=True)
        before = max(n for t, n in rows if t <= self.since)
        return (self.offsets[-1] - before) / max(1, self.offsets[-1] - self.offsets[0])

    def rate(self, events: int) -> float:
        """Events per second from the first visible transactions to the last.

        What the first ones brought is not counted, since how long it took is not known.
        """
        return events * self.share / max(1e-9, self.last - self.since)

    def rates(self, events: int, parts: int) -> list[float]:
        """The rates of equal parts of what `rate` counts, in the order of time."""
        offsets, at = np.unique(self.offsets, return_index=True)
        times = np.maximum(np.array(self.times)[at], self.since)
        begin = float(np.interp(self.since, self.times, self.offsets))
        marks = np.interp(np.linspace(begin, self.offsets[-1], parts + 1), offsets, times)
        each = events * self.share / parts
        return [each / max(1e-9, seconds) for seconds in np.diff(marks).tolist()]


class Watch:
    """Notes how a topic grows, 40 times a second, by asking for its last stable offsets."""

    def __init__(self, bootstrap_servers: str, name: str, partitions: int) -> None:
        self._consumer = asking_consumer(bootstrap_servers)
        self._name, self._partitions = name, partitions
        self._times: list[float] = []
        self._offsets: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._note()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY):
            self._note()

    def _note(self) -> None:
        offsets = stable_offsets(self._consumer, self._name, self._partitions)
        now = time.time()
        if len(self._offsets) < 2 or offsets != self._offsets[-1]:
            self._times.append(now)
            self._offsets.append(offsets)

    @property
    def offsets(self) -> int:
        """What is visible now."""
        return self._offsets[-1]

    @property
    def growth(self) -> Growth:
        """What was seen so far."""
        return Growth(list(self._times), list(self._offsets))

    def settled(self, at_least: int, quiet: float = 3.0, timeout: float = 3600) -> None:
        """Waits until so many offsets are visible and nothing came for `quiet` seconds.

        Raises:
            TimeoutError: that did not happen.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.offsets >= at_least and time.time() - self._times[-1] > quiet:
                return
            time.sleep(0.1)
        raise TimeoutError(f"{self._name}: {self.offsets} of {at_least} after {timeout:.0f} s")
