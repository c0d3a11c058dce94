"""What a publisher has written to its topics, for commands that look something up there.

Reads by the sink's code; what compares store and topic does not (`ops.topic`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import closing
from typing import Any

from eventpub.config import Config
from eventpub.sink.client import Clients
from eventpub.sink.reading import Message, Place, own_records, read_committed
from eventpub.sink.topics import list_offsets, offsets_at, partition_counts


class OwnTopics:
    """Reads the records of a publisher, of its name and its former ones, in all partitions: one
    written before partitions were added is not in the partition of its key.

    Args:
        until: as of `sink.reading.read_committed`.

    Attributes:
        clients: of the cluster.
        unread: partitions that were not read to their ends.
        is_cut: whether retention has removed records of the topic of events behind `starts`.
    """

    def __init__(self, config: Config, until: float = float("inf")) -> None:
        self.clients, self._sink = Clients(config.sink), config.sink
        self._ids = {config.app.id, *config.app.former_ids}
        self._until = until
        self._counts = partition_counts(self.clients)
        self.unread: set[Place] = set()
        self.is_cut = False

    def places(self, *topics: str) -> list[Place]:
        return [(topic, n) for topic in topics for n in range(self._counts.get(topic, 0))]

    def starts(self, places: list[Place], since: int | None) -> dict[Place, int]:
        """Below them is no record with a timestamp at or after `since`, ms; None: none at all."""
        starts = dict.fromkeys(places, 0)
        if since is not None:
            starts = offsets_at(self.clients, places, since)
        events = [place for place in places if place[0] == self._sink.topic]
        lows = list_offsets(self.clients, events, "earliest")
        self.is_cut |= any(0 < low >= starts[place] for place, low in lows.items())
        return starts

    def read(
        self,
        starts: Mapping[Place, int],
        ends: Mapping[Place, int] | None = None,
        keys: Collection[str] | None = None,
    ) -> Generator[tuple[Message, dict[str, Any]], None, None]:
        """Records, each with its headers; close it to stop reading.

        Args:
            ends: None: as they are now.
            keys: the aggregates; None: all.
        """
        wanted = None if keys is None else {key.encode() for key in keys}
        with closing(read_committed(self.clients, starts, self._until, ends)) as reading:
            yield from own_records(reading, self._ids, wanted)
            self.unread |= reading.unread
