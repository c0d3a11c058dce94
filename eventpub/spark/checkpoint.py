"""The checkpoint that the query of `eventpub run` continues with, or a new one."""

from __future__ import annotations

import json
import secrets
import shutil
from contextlib import suppress
from typing import Any

import structlog

from eventpub.channel import Request
from eventpub.config import Config
from eventpub.coordinator.position import DurableState
from eventpub.errors import EventpubError, SinkError
from eventpub.index import Pending
from eventpub.publisher.prepare import Prepared
from eventpub.sink.client import Clients
from eventpub.sink.numbered import NumberedSink, require_owner
from eventpub.spark.journal import Journals, Snapshots
from eventpub.spark.notes import listed
from eventpub.spark.options import FIRST_BYTES, Plan, Publisher
from eventpub.spark.place import Place
from eventpub.state import StateDir

HANGING = "sink.hanging_transaction"
"""The broker has left a transaction open; taking a new checkpoint ends it and publishes again."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Checkpoints:
    """Chooses the checkpoint to continue with.

    If none fits the topic, or a start on another state, such as a copy, has had the id since, the
    query gets a new name, and its first batch reads the topic back.
    """

    def __init__(self, config: Config, state: StateDir, prepared: Prepared) -> None:
        self._config, self._state, self._prepared = config, state, prepared

    def sink(self) -> NumberedSink:
        return NumberedSink(self._prepared.assignment.parts.clients, self._config.app.id)

    def chosen(self, owner: str, most_bytes: int) -> Publisher:
        """The checkpoint to continue with, or a new one if `most_bytes`, of its first batch."""
        config, begin = self._config, self._prepared.start_state
        location = _location(config, self._state)
        known = self._state.read(self._state.query_file) or {}
        next(Place(location).names("checkpoint"), None)  # raises if it cannot be used
        belongs = {
            "engine": "spark",
            "location": location,
            "shards": config.run.shards,
            "partitions": begin.partitions,
            "first_version": config.store.first_version,
            "topics": self._prepared.topics,
            # an index built while versions were unique cannot tell rows of one apart; the topic can
            "contents": not begin.layout.key_is_unique,
        }
        progress = self._state.read(self._state.progress_file) or {}
        name, topics = str(known.get("query", "")), known.get("topics", {})
        remade = {t for t, id_ in self._prepared.topics.items() if topics.get(t, id_) != id_}
        is_same = (progress.get("engine"), progress.get("query")) == ("spark", name)
        is_same &= config.sink.topic not in remade and not most_bytes
        is_same &= all(known.get(n) == belongs[n] for n in belongs if n != "topics")
        belongs["owners"] = [owner]
        if is_same and self._goes_on(name, location, known, owner):
            for topic in sorted(remade):  # a side topic, on which nothing depends
                text = "the topic was deleted and created again; its records are lost"
                log.warning(text, topic=topic)
            self._state.write(self._state.query_file, {**belongs, "query": name}, lasting=True)
            return self._of(name, location, Plan(name), owner)
        former, name = name, secrets.token_hex(8)
        log.info("new checkpoint: the topic is read back first", query=name, location=location)
        low = begin.low
        if former and progress.get("query") == former:
            with suppress(EventpubError):  # a location that is gone; `low` is of a second before
                journals = Journals(Place(str(known.get("location", location))), former)
                found = journals.oldest(int(progress.get("batch", 0)), int(known["shards"]))
                low = min([low, *(at - 1 for at in found)])
        plan = Plan(
            name,
            start=begin.start or None,
            begin=max(begin.start, low - config.recount.horizon),
            upto=begin.start if begin.position is None else begin.position,
            newest=begin.newest,
            server=begin.server,
            unpublished_since=begin.hidden_since,
            most_bytes=most_bytes or FIRST_BYTES,
        )
        if low < progress.get("low", low):  # or a start after this one would not know
            lower = {**progress, "low": low}
            self._state.write(self._state.progress_file, lower, lasting=True)
        self._state.write(self._state.query_file, {**belongs, "query": name}, lasting=True)
        self.sink().take(name, self._prepared.assignment.partitions, owner)
        if former:
            self._forget(former, str(known.get("location", location)))
        return self._of(name, location, plan, owner)

    def _goes_on(self, name: str, location: str, known: dict[str, Any], owner: str) -> bool:
        """Take the id; False if another start has had it, or the checkpoint is a backup."""
        sink, owners = self.sink(), known.get("owners", [])
        both = {**known, "owners": [*owners, owner]}  # either, if this start ends meanwhile
        self._state.write(self._state.query_file, both, lasting=True)
        try:
            if not sink.take(name, self._prepared.assignment.partitions, owner, owners):
                return False
            found = sink.markers.back_to(name, 1 << 62)  # no other start publishes now
        except SinkError as error:
            if error.code != HANGING:
                raise
            return False
        place = Place(location)
        metadata = place.read(f"checkpoint/{name}/metadata")
        try:
            json.loads(b"{}" if metadata is None else metadata)
        except ValueError:  # a power failure has cut it, and Spark would not start
            return False
        files = place.names(f"checkpoint/{name}/offsets")
        numbers = [int(tail) for file in files if (tail := file.rpartition("/")[2]).isdigit()]
        published = (marker["batch"] for _, marker in found if marker["query"] == name)
        return bool(numbers) and max(published, default=-1) <= max(numbers)

    def _forget(self, name: str, location: str) -> None:
        shutil.rmtree(self._state.root / "query" / name, ignore_errors=True)
        with suppress(EventpubError):
            place = Place(location)
            for prefix in (name, f"checkpoint/{name}"):
                place.delete(*place.names(prefix))

    def _of(self, name: str, location: str, initial: Plan, owner: str) -> Publisher:
        begin = self._prepared.start_state
        beginning = DurableState(begin).beginning(None, None)
        of = self._prepared.assignment
        whose = of.accepts_topic, of.start_id, owner
        return Publisher(name, location, begin.partitions, initial, beginning, *whose)


def require_still_owner(config: Config, owner: str) -> None:
    """Raise sink.other_query if another publisher has taken over from this start."""
    try:
        require_owner(Clients(config.sink), config.app.id, owner)
    except SinkError as error:
        if error.code != HANGING:
            raise


def _location(config: Config, state: StateDir) -> str:
    return config.state.location or str(state.root / "shared")


def pending_at(config: Config, state: StateDir, request: Request) -> list[Pending]:
    """By shard, what waits after the last batch of a query that does not answer."""
    progress, place = state.read_progress() or {}, Place(_location(config, state))
    query = str(progress.get("query"))
    upto = max(last_committed(place, query), int(progress.get("batch", 0)))
    shards = int(progress.get("shards", config.run.shards))
    folders = [state.query_index(query, number) for number in range(shards)]
    return listed(folders, upto, request) or [
        Snapshots(place, query, number).pending(upto, request, Journals(place, query))
        for number in range(shards)
    ]


def last_committed(place: Place, query: str) -> int:
    """The last batch that Spark has committed; 0: none."""
    names = (name.rpartition("/")[2] for name in place.names(f"checkpoint/{query}/commits"))
    return max((int(name) + 1 for name in names if name.isdigit()), default=0)
