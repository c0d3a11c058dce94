"""Which checkpoint the query of `eventpub run` goes on with.

Where there is none, or it does not belong to what is known of the topic, the query gets a new name,
owns the id from then on, and its first batch reads the topic back.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress

import structlog

from eventpub.channel import Beginning
from eventpub.config import Config
from eventpub.errors import EventpubError, SinkError
from eventpub.publisher.prepare import Prepared
from eventpub.sink.numbered import NumberedSink
from eventpub.spark.options import Publisher
from eventpub.spark.place import Place
from eventpub.spark.plan import Plan
from eventpub.spark.topic_watch import unnoticed_for
from eventpub.state import StateDir

HANGING = "sink.hanging_transaction"
"""The broker has left a transaction open; a new checkpoint ends it, and publishes again."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Checkpoints:
    """See the module.

    Args:
        config: the whole configuration.
        state: of this machine.
        prepared: what the start has found out.
    """

    def __init__(self, config: Config, state: StateDir, prepared: Prepared) -> None:
        self._config, self._state, self._prepared = config, state, prepared

    def sink(self) -> NumberedSink:
        """That of the query, as the topics are now."""
        return NumberedSink(self._prepared.assignment.parts.clients, self._config.app.id)

    def chosen(self, *, is_new: bool) -> Publisher:
        """The checkpoint to go on with.

        Args:
            is_new: begin a new one even if the old one could be used.

        Raises:
            StateError, SinkError: it cannot be read or taken.
        """
        config, begin = self._config, self._prepared.start_state
        location = config.state.location or str(self._state.root / "shared")
        known = self._state.read(self._state.query_file) or {}
        belongs = {
            "engine": "spark",
            "location": location,
            "shards": config.run.shards,
            "partitions": begin.partitions,
            "topics": self._prepared.topics,
            # an index from when no version had two rows cannot tell them apart; the topic can
            "contents": not begin.layout.key_is_unique,
        }
        progress = self._state.read(self._state.progress_file) or {}
        is_of_spark = progress.get("engine") == "spark" and progress.get("query") == known.get(
            "query"
        )
        topics, remade = known.get("topics", {}), set[str]()
        if is_of_spark:
            remade = {t for t, id_ in self._prepared.topics.items() if topics.get(t, id_) != id_}
        is_same = is_of_spark and config.sink.topic not in remade
        is_same = is_same and all(known.get(n) == belongs[n] for n in belongs if n != "topics")
        name = str(known.get("query", ""))
        if is_same and not is_new and self._goes_on(name, location):
            for topic in sorted(remade):  # a side topic, on which nothing depends
                text = "the topic was deleted and created again; its records are lost"
                log.warning(text, topic=topic)
            self._state.write(self._state.query_file, {**belongs, "query": name}, lasting=True)
            return self._of(name, location, Plan(name))
        name = secrets.token_hex(8)
        log.info("new checkpoint: the topic is read back first", query=name, location=location)
        start = None if begin.start == 0 else begin.start
        low = begin.low - config.recount.horizon
        low -= int(2e6 * unnoticed_for(config.sink))  # what of it is not visible is published again
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
        if (former := known.get("query")) is not None:
            self._forget(str(former), str(known.get("location", location)))
        self.sink().take(name, self._prepared.assignment.partitions)
        return self._of(name, location, plan)

    def _goes_on(self, name: str, location: str) -> bool:
        """Whether a checkpoint has all that was published for this id, so that it may go on.

        Another publisher may have published since; and one that was restored from a backup is older
        than the topic. Only the topic knows what was published then.
        """
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
        """Remove what a checkpoint that is no longer used has left."""
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
