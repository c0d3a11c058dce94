"""The topic of the markers that tell which batches are published: one partition for each id."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from eventpub.errors import SinkError
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients
from eventpub.sink.fold import end_all
from eventpub.sink.layout import check_leaders
from eventpub.sink.missing_markers import PartitionId, hanging
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.sink.reading import iter_ranges
from eventpub.sink.records import SOURCE, Header, Record
from eventpub.sink.topics import create, list_offsets, open_below
from eventpub.sink.transaction import Transactions

_OPEN_FOR = 90.0
"""Seconds for which a transaction of another task may hide markers: longer than one may last."""

_READ_AT_FIRST = 64
"""Markers that are read back at first; four times as many each time that they do not tell."""

_PARTITIONS = 16
"""Number of partitions of a topic of markers that is created."""

Marker = tuple[str, dict[str, Any]]
"""Its key, ``<id>/<task>``, and what it says."""


def place_of(markers: str, id_: str, partitions: int) -> PartitionId:
    """The partition that has the markers of an id."""
    return markers, zlib.crc32(id_.encode()) % partitions


class Markers:
    """Those of one id.

    Args:
        clients: of the cluster.
        id_: names what publishes.
        topic: made where it is missing.
        partitions: of it; None: it is missing.
    """

    def __init__(self, clients: Clients, id_: str, topic: str, partitions: int | None) -> None:
        self._clients = clients
        self._id = id_
        number = partitions or create(clients, [topic], _PARTITIONS, policy="compact")[topic]
        self.place = place_of(topic, id_, number)

    def back_to(self, query: str, batch: int) -> list[Marker]:
        """The markers of this id back to the batch before this one, or to another query's; the last
        first.

        A task of which nothing was published has no marker: there may be none of a batch.

        Raises:
            SinkError: sink.hanging_transaction, ….
        """
        low, end, count = 0, self._stable_end(), _READ_AT_FIRST
        while True:
            begin = max(low, end - count)
            try:
                found = self._read(begin, end)
            except SinkError as error:
                if error.code != "sink.offset_gone":
                    raise
                low = list_offsets(self._clients, [self.place], "earliest")[self.place]
                continue
            is_enough = any(
                marker["query"] != query or marker["batch"] < batch for _, marker in found
            )
            if is_enough or begin == low:
                return found
            count *= 4

    def _read(self, begin: int, end: int) -> list[Marker]:
        """The markers of this id in a range, the last first."""
        found: list[Marker] = []
        ranges = {self.place: (begin, end)}
        for message in iter_ranges(self._clients, ranges, committed=True, few=True):
            key = (message.key() or b"").decode(errors="replace")
            if key.rpartition("/")[0] == self._id and message.value():
                found.append((key, json.loads(message.value())))
        return found[::-1]

    def _stable_end(self) -> int:
        """The end of the markers, when no transaction is open before it."""
        end = list_offsets(self._clients, [self.place], "latest")[self.place]
        deadline = self._clients.clock.monotonic() + _OPEN_FOR
        while True:
            stable = list_offsets(self._clients, [self.place], "latest", committed=True)
            if stable[self.place] >= end:
                return end
            if self._clients.clock.monotonic() > deadline:
                raise hanging(self._clients.sink, self.place, stable[self.place], end, _OPEN_FOR)
            self._clients.clock.sleep(0.02)

    def batch(self, markers: Mapping[int, Mapping[str, Any]]) -> Batch:
        """The markers of tasks, to be written."""
        now = int(self._clients.clock.time() * 1000)
        own: list[Header] = [(SOURCE, self._id)]
        values = {f"{self._id}/{task}": json.dumps(each).encode() for task, each in markers.items()}
        records = [Record(key, value, self.place[1], now, own) for key, value in values.items()]
        return Batch({}, [(self.place[0], record) for record in records])

    def check_leader(self) -> None:
        """Whether the markers are all read: a leader that is cut off from the other brokers goes on
        to answer, and does not have the last ones.

        Raises:
            SinkError: as of `check_leaders`.
        """
        check_leaders(self._clients, [self.place])

    def end_left_open(self, tasks: int) -> None:
        """End what the broker has left open before their end, whoever of this id has written it.

        By transactions that are aborted: a new checkpoint does not need the markers of its
        predecessor. What another id has open stays.

        Args:
            tasks: at least as many as have written.

        Raises:
            SinkError: as of `OwnedProducer.ready`, ….
        """
        try:
            end_all(self._clients, [self.place], lambda _: self._end_open(tasks), lambda: None)
        except SinkError as error:
            if error.code != "sink.hanging_transaction":
                raise

    def _end_open(self, tasks: int) -> None:
        ends = list_offsets(self._clients, [self.place], "latest")
        for number in ("owner", *range(tasks)):
            with closing(OwnedProducer(self._clients, self._id, number)) as owned:
                owned.ready()
                Transactions(self._clients, 1, owned).run_in_vain([self.place])
            if not open_below(self._clients, ends, 0):
                return
