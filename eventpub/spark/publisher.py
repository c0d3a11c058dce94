"""`eventpub run` with the engine `spark`: a streaming query from `eventstore` to `eventpub`.

Scheduling, retries and restarts of tasks are Spark's. Here are the start and end of the query, what
is reported of it, and what a new checkpoint begins with: where there is none, or it does not belong
to what is known of the topic, the query gets a new name, owns the id from then on, and its first
batch reads the topic back.
"""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from eventpub.channel import Lease, Request
from eventpub.config import Config, format_time
from eventpub.coordinator.failures import Failures
from eventpub.coordinator.progress import Progress
from eventpub.errors import EventpubError, StateError, find_marked, words_of
from eventpub.ops.http import Pages
from eventpub.publisher.prepare import Prepared
from eventpub.publisher.publisher import Publisher as Run
from eventpub.sink import fence_all
from eventpub.sink.numbered import NumberedSink, markers_of
from eventpub.spark.monitor import Monitor
from eventpub.spark.options import Publisher
from eventpub.spark.place import Place
from eventpub.spark.planner import Plan
from eventpub.spark.session import end_session, ignoring, new_session
from eventpub.state import StateDir

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOKS_EVERY = 0.25
_SHOWN_EVERY = 1.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 15.0
"""Seconds until a query that has failed is started again, twice as many each time."""

_WELL_AFTER = 60.0
"""Seconds after which a failure before does not count any more."""

_BATCH_ENDS_WITHIN = 2.0
"""Seconds in which a batch may end before the query is stopped: else the next start repeats it."""
_STOPS_WITHIN = 3.5

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class SparkPublisher(Run):
    """See the module; `run` is its whole life."""

    def run(self) -> Progress:
        require_java()
        return super().run()

    def _publish(self, prepared: Prepared) -> Progress:
        with Query(self._config, self._state, prepared, available_now=self._available_now) as query:
            return query.run(self._on_progress, lambda: self._stopped_by)


class Query:
    """The query and what is around it; a context manager.

    Args:
        config: the whole configuration.
        state: of this machine.
        prepared: what the start has found out.
        available_now: end when everything up to now is published.
    """

    def __init__(
        self, config: Config, state: StateDir, prepared: Prepared, *, available_now: bool
    ) -> None:
        self._config = config
        self._state = state
        self._prepared = prepared
        self._available_now = available_now
        self._failures = Failures(config)
        self._paused_by = prepared.start_state.paused_by
        self._is_paused = prepared.start_state.is_paused
        self._pauses: queue.SimpleQueue[tuple[bool, str, Callable[[], None]]] = queue.SimpleQueue()
        self._publisher, is_new = self._checkpoint()
        self.monitor = Monitor(config, state, prepared, self._publisher, self)
        self._pages = Pages(config, self, state)
        self._session: SparkSession | None = None
        self._query: Any = None
        self._starting: threading.Thread | None = None
        self._start_error: EventpubError | None = None
        if is_new:
            self._sink().take(self._publisher.query, prepared.assignment.partitions)

    def __enter__(self) -> Query:
        self._pages.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_query()
        self._end_session()
        self.monitor.close()
        self._pages.end()
        with suppress(EventpubError):  # what was open when tasks were ended
            fence_all(self._config.sink, self._config.app.id, self._config.run.shards)

    # -- the checkpoint ---------------------------------------------------------------------------

    def _checkpoint(self) -> tuple[Publisher, bool]:
        """The checkpoint to go on with, and whether it is a new one."""
        config, begin = self._config, self._prepared.start_state
        location = config.state.location or str(self._state.root / "shared")
        known = self._state.read(self._state.query_file) or {}
        belongs = {
            "engine": "spark",
            "location": location,
            "shards": config.run.shards,
            "partitions": begin.partitions,
            "topics": self._prepared.topics,
        }
        progress = self._state.read(self._state.progress_file) or {}
        is_of_spark = progress.get("engine") == "spark" and progress.get("query") == known.get(
            "query"
        )
        is_same = is_of_spark and all(known.get(name) == belongs[name] for name in belongs)
        name = str(known.get("query", ""))
        has_begun = is_same and any(Place(location).names(f"checkpoint/{name}/offsets"))
        # another publisher of this id may have published since: only the topic knows what
        if has_begun and self._sink().owner() == name:
            return self._of(name, location, Plan(name)), False
        name = secrets.token_hex(8)
        log.info("new checkpoint: the topic is read back first", query=name, location=location)
        start = None if begin.start == 0 else begin.start
        low = begin.low - config.recount.horizon
        plan = Plan(
            name,
            start=start,
            begin=max(begin.start, low),
            upto=begin.start if begin.position is None else begin.position,
            unpublished_since=begin.hidden_since,
        )
        self._state.write(self._state.query_file, {**belongs, "query": name}, lasting=True)
        if (former := known.get("query")) is not None:
            self._forget(str(former), str(known.get("location", location)))
        return self._of(name, location, plan), True

    def _sink(self) -> NumberedSink:
        sink = self._config.sink
        return NumberedSink(sink, self._config.app.id, markers_of(sink))

    def _forget(self, name: str, location: str) -> None:
        """Remove what a checkpoint that is no longer used has left."""
        shutil.rmtree(self._state.root / "query" / name, ignore_errors=True)
        with suppress(EventpubError):
            place = Place(location)
            for prefix in (name, f"checkpoint/{name}"):
                place.delete(*place.names(prefix))

    def _of(self, name: str, location: str, initial: Plan) -> Publisher:
        begin = self._prepared.start_state
        lease = Lease(
            1,
            low=begin.low,
            position=begin.start if begin.position is None else begin.position,
            acknowledged=dict(begin.acknowledged),
            is_placed=begin.is_placed,
            hidden_since=begin.hidden_since,
            former_shards=begin.former_shards,
            former_indexes=begin.former_indexes,
        )
        return Publisher(name, location, begin.partitions, initial, lease)

    # -- its life ---------------------------------------------------------------------------------

    def run(
        self, on_progress: Callable[[Progress], None], stopped_by: Callable[[], int | None]
    ) -> Progress:
        """Until it is stopped, or over.

        Raises:
            EventpubError: what waiting cannot fix.
        """
        wait, start_at, failures, shown_at = _FIRST_WAIT, 0.0, 0, 0.0
        progress = self.monitor.progress
        while stopped_by() is None:
            now = time.monotonic()
            self._take_pauses()
            error: EventpubError | None = None
            if self._starting is not None:
                if not self._starting.is_alive():
                    self._starting, error = None, self._start_error
            elif self._query is None and not self._is_paused and now >= start_at:
                self._starting = threading.Thread(target=self._try_to_start, daemon=True)
                self._starting.start()
            elif self._query is not None and not self._query.isActive:
                error = self._why_it_ended()
                self._query = None
                if error is None:
                    self.monitor.ended()
                    break
            if error is not None:
                if self.monitor.well_for(now) > _WELL_AFTER:
                    wait, failures = _FIRST_WAIT, 0
                failures += 1
                self.monitor.failed(error, now)
                final = self._failures.of_shard(0, error, failures, now)
                if final is not None:
                    self.monitor.show(now, error=final, is_over=True)
                    raise final
                log.warning("the query failed and is started again", error=str(error), wait=wait)
                start_at, wait = now + wait, min(2 * wait, _LONGEST_WAIT)
                self._end_session()
            self.monitor.look(self._query, now)
            if now - shown_at > _SHOWN_EVERY:
                shown_at = now
                self._state.beat()
                self._pages.sample(self.monitor.show(now))
                on_progress(progress)
            time.sleep(_LOOKS_EVERY)
        progress.stopped_by = stopped_by()
        self._stop_query()
        with suppress(EventpubError):
            self.monitor.settle()
        self.monitor.show(time.monotonic(), is_over=True)
        on_progress(progress)
        return progress

    def _try_to_start(self) -> None:
        """In a thread: Spark takes its time, and a signal is seen meanwhile."""
        self._start_error = None
        try:
            self._start_query()
        except Exception as found:
            self._start_error = _error_of(found)

    def _start_query(self) -> None:
        if self._session is None:
            self._session = new_session(self._config, self._state)
        packed = self._publisher.packed(self._config)
        rows = self._session.readStream.format("eventstore").option("publisher_secret", packed)
        writer = rows.load().writeStream.format("eventpub").option("publisher_secret", packed)
        folder = f"{self._publisher.location}/checkpoint/{self._publisher.query}"
        writer = writer.option("checkpointLocation", folder).queryName(self._config.app.id)
        if self._available_now:
            writer = writer.trigger(availableNow=True)
        else:
            seconds = self._config.run.trigger / 1e6
            writer = writer.trigger(processingTime=f"{seconds:g} seconds")
        query = writer.start()
        self.monitor.started(self._session)
        self._query = query

    def _why_it_ended(self) -> EventpubError | None:
        with suppress(Exception):
            failed = self._query.exception()
            return None if failed is None else _error_of(failed)
        return _error_of(RuntimeError("Spark's process has ended"))

    def _stop_query(self) -> None:
        query, self._query = self._query, None
        if query is None:
            return

        def stop() -> None:
            until = time.monotonic() + _BATCH_ENDS_WITHIN
            while query.status["message"].startswith("Processing") and time.monotonic() < until:
                time.sleep(0.02)
            query.stop()

        stopping = threading.Thread(target=lambda: ignoring(stop), daemon=True)
        stopping.start()
        stopping.join(_STOPS_WITHIN)
        self.monitor.look(query, time.monotonic())  # what was done since the last time

    def _end_session(self) -> None:
        self._session = None
        if "pyspark" in sys.modules:
            end_session(is_local=self._config.spark.master.startswith("local"))

    # -- what others ask --------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether nothing is published for now."""
        return self._is_paused

    @property
    def paused_by(self) -> str:
        """Who has paused it, and when."""
        return self._paused_by

    def status(self) -> dict[str, Any]:
        """As of `ops.pages.Source`."""
        return self.monitor.status()

    def pause(self, is_paused: bool, by: str) -> dict[str, Any]:
        """As of `ops.pages.Source`: the query is stopped, or started."""
        done = threading.Event()
        by = f"{by or 'unknown'} at {format_time(round(time.time() * 1e6))}"
        self._pauses.put((is_paused, by, done.set))
        answered = done.wait(_STOPS_WITHIN + 5)
        return {"is_paused": is_paused if answered else None, "in_work": 0, "error": None}

    def _take_pauses(self) -> None:
        while not self._pauses.empty():
            is_paused, by, done = self._pauses.get()
            if is_paused != self._is_paused:
                self._is_paused, self._paused_by = is_paused, by if is_paused else ""
                text = "paused: run `eventpub resume` to publish again"
                log.info(text if is_paused else "resumed", by=by)
                if is_paused:
                    self._stop_query()
                self.monitor.remember()
            done()

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        """As of `ops.pages.Source`."""
        return self.monitor.ask(request, timeout)

    def withdraw(self, id: str) -> None:
        """As of `ops.pages.Source`."""
        self.monitor.withdraw(id)


def require_java() -> None:
    """Whether there is a Java that starts Spark.

    Raises:
        StateError: spark.java_missing
    """
    home = os.environ.get("JAVA_HOME")
    is_there = bool(home) and (Path(home or "") / "bin" / "java").exists()
    if not (is_there or shutil.which("java")):
        raise StateError(
            "spark.java_missing",
            "Spark needs Java 17 or newer, and there is no java on the PATH or in JAVA_HOME",
            suggestion="install it (Debian: apt-get install openjdk-17-jre-headless) or set"
            " JAVA_HOME",
        )


def _error_of(error: Exception) -> EventpubError:
    """The error of ours in what Spark says, or one for it."""
    if isinstance(error, EventpubError):
        return error
    text = words_of(error)
    found = find_marked(text)
    if found is not None:
        return found
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return StateError(
        "shard.failed",
        f"the query failed: {lines[0] if lines else type(error).__name__}",
        suggestion="see spark.log in app.state_dir; if it is eventpub's, please report it",
        retriable=True,
    )
