"""`eventpub run` with the engine `spark`: a streaming query from `eventstore` to `eventpub`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace

import structlog

from eventpub.coordinator.events import CheckTopic
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.shards import MOST_FAILURES, Failures
from eventpub.coordinator.status import shown
from eventpub.errors import EventpubError, StateError
from eventpub.publisher.prepare import Prepared
from eventpub.publisher.publisher import Publisher as Run
from eventpub.publisher.workers import in_thread
from eventpub.sink.transaction import fence_all
from eventpub.spark.checkpoint import HANGING, Checkpoints, require_still_owner
from eventpub.spark.monitor import Monitor
from eventpub.spark.options import FIRST_BYTES, LEAST_BYTES, Publisher
from eventpub.spark.place import Place
from eventpub.spark.session import (
    NO_EXECUTOR,
    Spark,
    Watched,
    error_of,
    is_in_batch,
    limit_log,
    require_java,
)

_LOOKS_EVERY = 0.25
_SHOWN_EVERY = 1.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 15.0
"""Backoff in seconds before a failed query is restarted, doubling."""

_FAILURES_OF_A_SESSION = 4
"""Consecutive failures after which Spark is restarted too, which takes ten seconds."""

_WELL_AFTER = 60.0
"""Seconds without failure that reset backoff and failures."""

_BATCH_ENDS_WITHIN = 2.0
"""Seconds for a batch to end before its query is stopped; otherwise the next start repeats it."""
_STOPS_WITHIN = 3.5
_STOPS_AT_LAST = 30.0
"""Seconds before Spark is restarted if a paused query does not end."""

_FROZEN_AFTER = 60.0
"""Seconds without an answer after which Spark's process is killed."""

_STOPS_WITHOUT_BROKER = 1.0
"""Seconds for each of two last requests to the broker; the next start repeats them."""

NOT_VISIBLE = "sink.not_visible"
"""Records that were published are lost, however old: the table is read from the start."""

TOO_LARGE = "sink.transaction_expired"
"""A decided batch, larger than what the broker takes within a transaction: smaller ones follow."""

_OF_THE_CHECKPOINT = {
    "sink.batch_changed",
    "sink.checkpoint_behind",
    "sink.markers_gone",
    NOT_VISIBLE,
    TOO_LARGE,
    "state.journal_missing",
    "state.journal_damaged",
    "state.not_shared",
    "state.checkpoint_version",
    "store.rows_gone",
}
_MAYBE_OF_THE_CHECKPOINT = {"shard.failed", "index.corrupt"}
"""Errors that a new checkpoint fixes, and errors for which it is tried before giving up."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class _UnusableError(Exception):
    """The checkpoint is damaged or no longer matches the topic."""


class SparkPublisher(Run):
    _most_bytes = 0
    """Of the first batch of a checkpoint that replaces another; 0: none does."""
    _is_not_visible = False
    _owner = ""  # names this start, once it takes the id
    _checkpoint: Publisher

    def run(self) -> Progress:
        require_java()
        self._spark = Spark(self._config, self._state)
        try:
            return super().run()
        finally:
            self._spark.end()

    def _prepare(self) -> Prepared | None:
        if not self._state.pause()[0]:
            self._spark.begin()
        return super()._prepare()

    def _prepared(self) -> Prepared:
        if self._owner:  # only a start takes over from others
            require_still_owner(self._config, self._owner)
        prepared = super()._prepared()
        if self._is_not_visible:
            begin = prepared.start_state
            prepared = replace(prepared, start_state=replace(begin, low=begin.start))
        checkpoints = Checkpoints(self._config, self._state, prepared)
        self._owner = self._owner or secrets.token_hex(8)
        self._checkpoint = checkpoints.chosen(self._owner, self._most_bytes)
        return prepared

    def _publish(self, prepared: Prepared) -> Progress:
        """Replace a damaged checkpoint, as after a power failure: the topic has all it needs."""
        query = self._query(prepared)
        while query is not None:
            try:
                with query:
                    return query.run(self._on_progress, lambda: self._stopped_by)
            except _UnusableError as unusable:
                is_too_large = str(unusable) == TOO_LARGE
                most_bytes = (self._most_bytes or FIRST_BYTES) >> is_too_large
                self._most_bytes = max(LEAST_BYTES, most_bytes)
                self._is_not_visible = str(unusable) == NOT_VISIBLE
                query = self._query(None)
        return Progress(stopped_by=self._stopped_by)

    def _query(self, prepared: Prepared | None) -> Query | None:
        """The next query; without `prepared`, of another start, to learn what was published
        meanwhile. Waits while database, broker or location is away; None: a stop was requested."""
        wait, failures = _FIRST_WAIT, Failures(self._config)
        while self._stopped_by is None:
            try:
                if (prepared := prepared or self._prepare()) is None:
                    break
                replaces, now = self._most_bytes > 0, self._available_now
                return Query(self._spark, prepared, self._checkpoint, now, replaces)
            except EventpubError as found:
                error, prepared = found, None
            if (final := failures.of_shard(0, error, 1, time.monotonic())) is not None:
                raise final
            log.warning("the start failed; trying again", error=str(error), wait=wait)
            until, wait = time.monotonic() + wait, min(2 * wait, _LONGEST_WAIT)
            while self._stopped_by is None and time.monotonic() < until:
                time.sleep(_LOOKS_EVERY)
        return None


class Query:
    """The query, its pages and its Spark session; a context manager."""

    def __init__(
        self,
        spark: Spark,
        prepared: Prepared,
        checkpoint: Publisher,
        available_now: bool,
        replaces_checkpoint: bool,
    ) -> None:
        config, state = spark.config, spark.state
        self._config, self._prepared = config, prepared
        self._spark = spark
        self._available_now = available_now
        self._replaces_checkpoint = replaces_checkpoint
        self._publisher = checkpoint
        self._checkpoints = Checkpoints(config, state, prepared)
        self.monitor = Monitor(state, prepared, self._publisher)
        self._query: Watched | None = None
        self._starting: futures.Future[EventpubError | None] | None = None
        self._stopping: futures.Future[None] | None = None
        self._is_taken_over = self._is_left = self._has_session = False
        self._wait, self._start_at, self._failures, self._unexplained = _FIRST_WAIT, 0.0, 0, 0

    def __enter__(self) -> Query:
        self.monitor.runner.pages.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        self._stop_query()
        self._spark.end(kills=self._is_stopping)
        self.monitor.runner.close()
        if self._is_taken_over:
            return
        # transactions left open by killed tasks
        clients, shards = self._prepared.assignment.parts.clients, self._config.run.shards
        _try_to(lambda: fence_all(clients, self._config.app.id, shards))

    # -- its life ---------------------------------------------------------------------------------

    def run(
        self, on_progress: Callable[[Progress], None], stopped_by: Callable[[], int | None]
    ) -> Progress:
        """Run until stopped, or over.

        Raises:
            EventpubError: what waiting cannot fix.
        """
        progress, shown_at = self.monitor.progress, 0.0
        while stopped_by() is None:
            now = time.monotonic()
            error: EventpubError | None = None
            query: Watched | None = None
            if self._starting is not None:
                if self._starting.done():
                    error, self._starting = self._starting.result(), None
            elif self.monitor.is_paused:
                self._stop_query()
            elif self._query is None and now >= self._start_at:
                self._starting = in_thread(self._try_to_start)
            else:
                query, error = self._ended()
                if query is not None and error is None:
                    self.monitor.ended()
                    break
            if error is not None:
                self._failed(query, error, now)
            was_paused = self.monitor.is_paused
            self._look(now)
            self.monitor.has_query = any((self._query, self._starting, self._is_stopping))
            if now - shown_at > _SHOWN_EVERY or self.monitor.is_paused != was_paused:
                shown_at = now
                self.monitor.runner.show()
                limit_log(self._spark.state.spark_log)
                on_progress(shown(self.monitor, now))
            time.sleep(_LOOKS_EVERY)
        progress.stopped_by = stopped_by()
        self._stop_query()
        _try_to(self.monitor.settle)
        self.monitor.runner.keep_status(is_over=True)
        on_progress(shown(self.monitor, time.monotonic()))
        return progress

    def _failed(self, query: Watched | None, error: EventpubError, now: float) -> None:
        """Restart the query, None: which did not start, after a backoff."""
        self.monitor.look(query and query.last, now)  # the last batches
        if self.monitor.well_for(now) > _WELL_AFTER:
            self._wait, self._failures, self._unexplained = _FIRST_WAIT, 0, 0
        self._failures += 1
        if self._has_session or not self._spark.has_run:  # otherwise a master may be away
            self._unexplained += error.code in _MAYBE_OF_THE_CHECKPOINT
        final = self.monitor.failures.of_shard(0, error, self._unexplained, now)
        is_last = final is not None or self._unexplained > MOST_FAILURES
        self._require_usable(error, now, gives_up=is_last and self._has_session)
        self.monitor.failed(error, now)
        if final is not None:
            self._is_taken_over = final.code == "sink.other_query"
            self.monitor.runner.keep_status(is_over=True)
            raise final
        log.warning("the query failed; restarting it", error=str(error), wait=self._wait)
        self._start_at, self._wait = now + self._wait, min(2 * self._wait, _LONGEST_WAIT)
        if self._failures % _FAILURES_OF_A_SESSION == 0 or not self._spark.is_alive:
            self._spark.end()

    def _require_usable(self, error: EventpubError, now: float, *, gives_up: bool = False) -> None:
        """Raise `_UnusableError` if a new checkpoint is needed, or the last thing to try."""
        was_well = self.monitor.well_for(now) > 0
        is_of_it = error.code in {HANGING, *_OF_THE_CHECKPOINT}
        is_of_it |= gives_up and not was_well and error.code in _MAYBE_OF_THE_CHECKPOINT
        # another one only once the last has helped, or to become smaller still
        self._replaces_checkpoint = self._replaces_checkpoint and not was_well
        if is_of_it and (error.code == TOO_LARGE or not self._replaces_checkpoint):
            log.warning("the checkpoint cannot be used; starting a new one", error=str(error))
            raise _UnusableError(error.code)

    def _look(self, now: float) -> None:
        health, lacks = self.monitor.health, self._query and self._query.lacks_executor
        if lacks and not health.lacking:
            log.warning(NO_EXECUTOR)
        health.lacking = NO_EXECUTOR if lacks else ""
        error = self.monitor.look(self._query and self._query.last, now)
        if error is not None and error.code == HANGING:
            self._require_usable(error, now)
        if error is not None and self.monitor.failures.of_command(CheckTopic({}), error, now):
            self.monitor.runner.keep_status(is_over=True)
            raise error
        if self.monitor.well_for(now):
            self.monitor.failures.is_well(0, now, has_progressed=True)

    def _try_to_start(self) -> EventpubError | None:
        try:
            self._start_query()
        except Exception as found:
            return self._cause(found)
        return None

    def _cause(self, found: Exception) -> EventpubError:
        """The eventpub error in Spark's text; without one, whether the location can be used."""
        error = error_of(found)
        if error.code == "shard.failed":
            try:
                Place(self._publisher.location).require_exclusive(self._publisher.query)
            except EventpubError as away:
                return away
        return error

    def _start_query(self) -> None:
        if self._stopping is not None:  # Spark refuses a second query of the same name
            futures.wait([self._stopping], _STOPS_AT_LAST)
            if not self._stopping.done():
                self._spark.end(kills=True)
            self._stopping = None
        if self._is_left:  # Spark may be the next query's by now
            return
        self._has_session = False
        session = self._spark.session()
        self._has_session = True
        self._checkpoints.sink().markers.check_leader()  # the first batch may be a repeated one
        packed = self._publisher.packed(self._config)
        rows = session.readStream.format("eventstore").option("publisher_secret", packed)
        writer = rows.load().writeStream.format("eventpub").option("publisher_secret", packed)
        folder = f"{self._publisher.location}/checkpoint/{self._publisher.query}"
        writer = writer.option("checkpointLocation", folder).queryName(self._config.app.id)
        if self._available_now:
            writer = writer.trigger(availableNow=True)
        else:
            seconds = self._config.batch_trigger / 1e6
            writer = writer.trigger(processingTime=f"{seconds:g} seconds")
        if self.monitor.is_paused or self._is_left:
            return
        query = Watched(writer.start(), session.sparkContext, self._cause)
        self._spark.has_run = True
        self.monitor.started(session)
        self._query = query

    def _ended(self) -> tuple[Watched | None, EventpubError | None]:
        """The query if it has ended, and why; no error: it is over."""
        query = self._query
        if query is None:
            return None, None
        query.unanswered += 1
        if query.is_active and query.unanswered * _LOOKS_EVERY <= _FROZEN_AFTER:
            return None, None
        self._query = None
        if query.is_active:
            self._spark.end(kills=True)
            return query, StateError(
                "shard.failed",
                f"Spark's process has not answered for {_FROZEN_AFTER:.0f} s, and was ended",
                suggestion="nothing to do: it is started again; if this repeats, give it more"
                " memory (spark.driver.memory in [spark.properties])",
                retriable=True,
            )
        if query.error is None and not self._available_now:
            return query, error_of(RuntimeError("it was stopped through Spark"))
        return query, query.error

    def _stop_query(self) -> None:
        watched, self._query = self._query, None
        if watched is None:
            return
        query = watched.query

        def stop() -> None:
            until = time.monotonic() + _BATCH_ENDS_WITHIN
            while is_in_batch(query) and time.monotonic() < until:
                time.sleep(0.02)
            query.stop()

        self._stopping = in_thread(stop)
        futures.wait([self._stopping], _STOPS_WITHIN)
        watched.wait(_LOOKS_EVERY)
        self.monitor.look(watched.last, time.monotonic())  # the last batches

    @property
    def _is_stopping(self) -> bool:
        return self._stopping is not None and not self._stopping.done()


def _try_to(do: Callable[[], object]) -> None:
    """Clean up before the end, if the broker answers in time."""
    futures.wait([in_thread(do)], _STOPS_WITHOUT_BROKER)
