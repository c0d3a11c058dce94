"""Where the topics end, and what is wrong with them: asked of the broker now and then.

Tasks publish in processes of their own, and do not report offsets. So the ends are asked for: they
say at the next start whether records were lost, and what was written between two of them is looked
at where this publisher has written nothing, and in one partition more, in turn. And they say
whether the broker has left a transaction of this publisher open, which hides what was published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from eventpub import config
from eventpub.channel import PartitionId
from eventpub.coordinator import events as e
from eventpub.errors import EventpubError
from eventpub.publisher.prepare import Prepared
from eventpub.publisher.workers import BrokerWork
from eventpub.sink.fencing import hanging, is_held_by
from eventpub.sink.markers import place_of
from eventpub.sink.numbered import markers_of
from eventpub.sink.topics import list_offsets, partition_counts, visible_ends

_TIMEOUT = 2.0
_ENDED_WITHIN = 30.0
"""Seconds within which the broker ends a transaction that has lasted too long."""


class TopicWatch:
    """Does `CheckTopic`, in one thread.

    Args:
        prepared: what the start has found.
        published: how many events each shard has published.
    """

    def __init__(self, prepared: Prepared, published: Callable[[], dict[int, int]]) -> None:
        assignment = prepared.assignment
        self._config, self._clients = assignment.config, assignment.parts.clients
        self._work = BrokerWork(assignment, prepared.topics)
        self._published = published
        self._before: dict[int, int] = {}
        self._turn = 0
        self._held: dict[PartitionId, tuple[int, float]] = {}
        self.ends: Mapping[PartitionId, int] = dict(prepared.start_state.acknowledged)

    def do(self, command: e.Command) -> e.Event | None:
        """The outcome of a command.

        Raises:
            SinkError: `sink.hanging_transaction`, or as of `BrokerWork.do`.
        """
        del command
        published, self._before = self._before, self._published()
        ours = [place for place in self.ends if place[0] == self._config.sink.topic]
        quiet = {n for n, count in self._before.items() if published.get(n) == count}
        looked_at = {p for p in ours if p[1] % self._config.run.shards in quiet}
        if ours:
            self._turn = (self._turn + 1) % len(ours)
            looked_at.add(ours[self._turn])
        done = self._work.do(e.CheckTopic({place: self.ends[place] for place in looked_at}))
        self._require_none_left_open(self._measure(), time.monotonic())
        return done

    def measure(self) -> None:
        """At the end of a run: where the topics end now, if the broker answers."""
        with suppress(EventpubError):
            self._measure()

    def _measure(self) -> dict[PartitionId, int]:
        """Up to where readers come, also in the partition of the markers."""
        sink, markers = self._config.sink, markers_of(self._config.sink)
        counts = partition_counts(self._clients, _TIMEOUT)
        places = [(t, n) for t in sink.topics for n in range(counts.get(t, 0))]
        if markers in counts:
            places.append(place_of(markers, self._config.app.id, counts[markers]))
        found = visible_ends(self._clients, places, _TIMEOUT)
        self.ends = {place: end for place, end in found.items() if end and place[0] != markers}
        return found

    def _require_none_left_open(self, stable: Mapping[PartitionId, int], now: float) -> None:
        sink, app_id = self._config.sink, self._config.app.id
        optional, clients = frozenset(sink.topics), self._clients
        highs = list_offsets(clients, [*stable], "latest", optional=optional, timeout=_TIMEOUT)
        before, self._held = self._held, {}
        for place, end in highs.items():
            if (at := stable[place]) < end:
                same = before.get(place)
                self._held[place] = same if same is not None and same[0] == at else (at, now)
        for place, (at, since) in self._held.items():
            is_over = now - since > unnoticed_for(sink)  # so long no transaction may last
            if is_over and is_held_by(clients, app_id, place, at, highs[place]):
                raise hanging(sink, place, at, highs[place], now - since)


def unnoticed_for(sink: config.Sink) -> float:
    """Seconds for which a transaction that the broker has left open may look like any other."""
    return sink.transaction_timeout / 1e6 + _ENDED_WITHIN
