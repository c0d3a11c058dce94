"""The checkpoint that the query of `eventpub run` uses, and whether the topic still fits it."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from eventpub import config as settings
from eventpub.channel import Beginning, PartitionId
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.errors import EventpubError, SinkError
from eventpub.publisher.prepare import Prepared
from eventpub.publisher.workers import BrokerWork
from eventpub.sink.markers import place_of
from eventpub.sink.missing_markers import is_held_by
from eventpub.sink.numbered import NumberedSink, markers_of
from eventpub.sink.topics import hanging, list_offsets, partition_counts, visible_ends
from eventpub.spark.options import Publisher
from eventpub.spark.place import Place
from eventpub.spark.plan import Plan
from eventpub.state import StateDir

HANGING = "sink.hanging_transaction"
"""The broker has left a transaction open; taking a new checkpoint ends it and publishes again."""

_TIMEOUT = 2.0
_ENDED_WITHIN = 30.0
"""Seconds within which the broker aborts an overdue transaction."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Checkpoints:
    """Chooses the checkpoint to continue with.

    If none fits the topic, the query gets a new name and owns the id from then on, and its first
    batch reads the topic back.
    """

    def __init__(self, config: Config, state: StateDir, prepared: Prepared) -> None:
        self._config, self._state, self._prepared = config, state, prepared

    def sink(self) -> NumberedSink:
        return NumberedSink(self._prepared.assignment.parts.clients, self._config.app.id)

    def chosen(self, *, is_new: bool) -> Publisher:
        """The checkpoint to continue with, or a new one if `is_new`."""
        config, begin = self._config, self._prepared.start_state
        location = config.state.location or str(self._state.root / "shared")
        known = self._state.read(self._state.query_file) or {}
        belongs = {
            "engine": "spark",
            "location": location,
            "shards": config.run.shards,
            "partitions": begin.partitions,
            "topics": self._prepared.topics,
            # an index built while versions were unique cannot tell rows of one apart; the topic can
            "contents": not begin.layout.key_is_unique,
        }
        progress = self._state.read(self._state.progress_file) or {}
        name, topics = str(known.get("query", "")), known.get("topics", {})
        remade = {t for t, id_ in self._prepared.topics.items() if topics.get(t, id_) != id_}
        is_same = (progress.get("engine"), progress.get("query")) == ("spark", name)
        is_same &= config.sink.topic not in remade and not is_new
        is_same &= all(known.get(n) == belongs[n] for n in belongs if n != "topics")
        if is_same and self._goes_on(name, location):
            for topic in sorted(remade):  # a side topic, on which nothing depends
                text = "the topic was deleted and created again; its records are lost"
                log.warning(text, topic=topic)
            self._state.write(self._state.query_file, {**belongs, "query": name}, lasting=True)
            return self._of(name, location, Plan(name))
        former, name = name, secrets.token_hex(8)
        log.info("new checkpoint: the topic is read back first", query=name, location=location)
        start = None if begin.start == 0 else begin.start
        low = begin.low - config.recount.horizon
        low -= int(2e6 * unnoticed_for(config.sink))  # rows still hidden are published again
        plan = Plan(
            name,
            start=start,
            begin=max(begin.start, low),
            upto=begin.start if begin.position is None else begin.position,
            newest=begin.newest,
            server=begin.server,
            unpublished_since=begin.hidden_since,
        )
        self._state.write(self._state.query_file, {**belongs, "query": name}, lasting=True)
        if former:
            self._forget(former, str(known.get("location", location)))
        self.sink().take(name, self._prepared.assignment.partitions)
        return self._of(name, location, plan)

    def _goes_on(self, name: str, location: str) -> bool:
        """False if another publisher has published for this id, or the checkpoint is a backup."""
        files = Place(location).names(f"checkpoint/{name}/offsets")
        numbers = [int(tail) for file in files if (tail := file.rpartition("/")[2]).isdigit()]
        try:
            found = self.sink().owner() if numbers else None
        except SinkError as error:
            if error.code != HANGING:
                raise
            return False
        return found is not None and found[0] == name and found[1] <= max(numbers)

    def _forget(self, name: str, location: str) -> None:
        shutil.rmtree(self._state.root / "query" / name, ignore_errors=True)
        with suppress(EventpubError):
            place = Place(location)
            for prefix in (name, f"checkpoint/{name}"):
                place.delete(*place.names(prefix))

    def _of(self, name: str, location: str, initial: Plan) -> Publisher:
        begin = self._prepared.start_state
        beginning = Beginning(
            low=begin.low,
            position=begin.start if begin.position is None else begin.position,
            acknowledged=dict(begin.acknowledged),
            is_placed=begin.is_placed,
            hidden_since=begin.hidden_since,
            former_shards=begin.former_shards,
            former_indexes=begin.former_indexes,
        )
        return Publisher(name, location, begin.partitions, initial, beginning)


class TopicWatch:
    """Watches the topics' ends and health; used by one thread.

    Spark's tasks do not report offsets; from the ends the next start knows whether records were
    lost. Records between two ends are checked where this publisher has written nothing, and in one
    more partition in turn. A transaction of ours left open hides what was published after it.

    `published` returns the number of events that each shard has published.
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
        """Do `CheckTopic` for the partitions due; also raises sink.hanging_transaction."""
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
        with suppress(EventpubError):
            self._measure()

    def _measure(self) -> dict[PartitionId, int]:
        """Ends that readers can reach, also of the markers' partition."""
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
            is_over = now - since > unnoticed_for(sink)  # no transaction may last this long
            if is_over and is_held_by(clients, app_id, place, at, highs[place]):
                raise hanging(sink, place, at, highs[place], now - since)


def unnoticed_for(sink: settings.Sink) -> float:
    """Seconds for which a transaction left open looks like any other."""
    return sink.transaction_timeout / 1e6 + _ENDED_WITHIN
