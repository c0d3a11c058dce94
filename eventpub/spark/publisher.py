"""The publisher: a streaming query whose micro-batches each publish one window, shard by shard.

The driver decides nothing about events. It starts the query, collects what the shards report,
writes `progress.json`, waits out what can be waited out, and stops cleanly on a signal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import structlog

from eventpub.config import Config, format_time
from eventpub.errors import (
    EventpubError,
    SinkError,
    StateError,
    StoreError,
    find_marked,
    from_dict,
    words_of,
)
from eventpub.sink import (
    are_left_open,
    check_between,
    check_sample,
    check_topics,
    check_written,
    fence_all,
    has_written,
    sources_of,
    topic_ids,
    visible_ends,
)
from eventpub.spark import head_start
from eventpub.spark.boundary import Bounds
from eventpub.spark.failpoint import failpoint, is_wanted_elsewhere
from eventpub.spark.fold_log import FoldLog
from eventpub.spark.head_start import HeadStart, Tasks
from eventpub.spark.jvm import archive_file, find_java, has_archive
from eventpub.spark.lag import Lag
from eventpub.spark.newest import MOST, SAMPLE, NewestRows
from eventpub.spark.passed import told
from eventpub.spark.progress import Progress, ShardReport
from eventpub.spark.recount import bucket_of
from eventpub.spark.recounting import Recounting
from eventpub.spark.recovery import kept_progress, kept_start, start_lost
from eventpub.spark.session import Session
from eventpub.spark.shard import Job, publish_window
from eventpub.spark.source import (
    BEGINNING,
    EventStoreDataSource,
    options_of,
    start_position,
)
from eventpub.spark.state import StateDir
from eventpub.stop_flag import StopFlag
from eventpub.store import EventStore
from eventpub.store.events import NewRow
from eventpub.store.server import UNGUARDED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LONGEST_WAIT = 30.0
"""Seconds between two tries while a service is away."""

_MOST_FAILURES = 5
"""Failures of the query in a row, for a reason that eventpub does not know, before it gives up."""

_TAKEOVER = 20.0
"""Seconds after its first batch in which a publisher leaves it to an older one to notice both."""

_MOST_SIGHTINGS = 3
"""Batches in which another publisher shows, within `_SIGHTINGS_WITHIN`, before this one stops. One
may be a task of our own that had stalled."""

_SIGHTINGS_WITHIN = 3600.0
"""With little to publish, two of one id meet once in a batch of minutes. What looks like another
publisher and is none, a transaction that this process let expire, is not counted."""

_FOLLOWS = 10.0
_FOLLOWS_HERE = 300.0
_FOLLOWS_WAITED_FOR = 1.0
"""Seconds for which tasks follow the boundary, unless another is wanted: in general; where all
indexes are on this machine, so that a task that is done again finds its own; where something waits
for the end of the batch."""

_WATCHED_EVERY = 0.25
"""Seconds between two looks whether the query still runs, each a question to the JVM."""

_ENDS_WITHIN = 0.05
"""Seconds after which the tasks of the last batch are asked to end; again after up to a second."""

_RESTS_AFTER = 2.0
"""Seconds without a window after which tasks that follow the boundary have nothing to do."""

_PASSES_WITHIN = {
    "sink.topic_missing": 30.0,
    "store.table_missing": 60.0,
    "store.column_missing": 60.0,
    "store.index_missing": 60.0,
    "store.query_failed": 60.0,
}
"""Seconds for which something may be wrong while running before it counts as wrong: brokers that
start know of no topic, a migration takes a table or an index away and gives it back, a server or a
proxy in between has no disk, memory or threads for a moment and words it in its own way."""

_TABLE_EVERY = 60.0
"""Seconds between two looks whether the event table is the same: by an altered type its times are
read wrongly, by an altered collation no index is of use any more."""

_TOPIC_EVERY = 10.0
"""Seconds between two looks whether the topic is the same, and whether another publisher writes to
it where this one does not."""

_OPEN_EVERY = 10.0
"""Seconds without a window after which readers' ends are compared with what was published."""
_OPEN_TIMEOUT = 2.0

_ENDED_FOR = 60.0
"""Seconds for which rows are explained by a transaction that has ended."""

_SAID_EVERY = 60.0
"""Seconds between two warnings of one kind, where their reason lasts."""

_CLOCK_TOLERANCE = 60_000_000
"""µs by which an event may lie in the future without a word."""

_MANY_BEGIN_ABOVE = 1_000
"""Aggregates without their first version from which on that is said."""

_WATERMARK = {
    "denied": "the account may not see open transactions, so the boundary is the database's time"
    " less read.delay; late commits are still found (GRANT PROCESS ON *.* lets it see them)",
    "stale": "no fresh answer about open transactions, since something else reads"
    " information_schema.innodb_trx too often; the boundary is the database's time less"
    " read.delay, late commits are still found",
}

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


def run(
    config: Config,
    *,
    available_now: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Publish until stopped.

    SIGTERM and SIGINT finish the running batch, then this returns (when called in the main thread);
    a second one ends the process at once, as a kill would.

    Args:
        config: the whole configuration.
        available_now: publish every event that was committed before the call, holds included, then
            return.
        on_progress: called after each micro-batch and about every second in between.

    Returns:
        The totals at the end.

    Raises:
        StoreError, SinkError, StateError, ConfigError: what waiting cannot fix, and anything that
            is wrong when it starts.
    """
    return _Publisher(config, available_now, on_progress or (lambda _: None)).run()


class _Publisher:
    def __init__(
        self, config: Config, available_now: bool, on_progress: Callable[[Progress], None]
    ) -> None:
        self._config = config
        self._available_now = available_now
        self._on_progress = on_progress
        self._state = StateDir(config.app.state_dir)
        self._progress = Progress()
        self._stop = StopFlag()
        self._until: int | None = None
        self._boundary = 0
        self._batch = threading.Lock()
        self._closed = False
        self._batches_done = head_start.FIRST - 1
        self._remembered = head_start.FIRST - 1
        self._begun: int | None = None
        self._head_start: HeadStart | None = None
        self._remembering = threading.Lock()
        self._former_shards: int | None = None
        self._has_read = False
        self._shards_hidden_since: int | None = None
        self._heard = 0
        self._next_due: int | None = None
        self._holds = 0
        self._all_buckets = True
        self._files = threading.Lock()
        self._wanted = 0
        self._running: int | None = None
        self._queries = 0
        self._showing = threading.Lock()
        self._watermark = ""
        self._lag = Lag()
        self._newest = NewestRows(config.recount.horizon, BEGINNING)
        self._newest_done: tuple[int, int] | None = None
        self._ended: dict[tuple[int, int], float] = {}
        self._said_of_past = self._said_of_future = float("-inf")
        self._failure: EventpubError | None = None
        self._ends: dict[int, dict[tuple[str, int], int]] = {}
        self._acknowledged: dict[tuple[str, int], int] = {}
        self._left_open = False
        self._look_for_open = 0.0
        self._stands: tuple[int | None, list[int]] = None, []
        self._stands_since = 0.0
        self._first_batch: float | None = None
        self._sightings: list[float] = []
        self._wrong_since: float | None = None
        self._fatal: EventpubError | None = None
        self._topics: dict[str, str] = {}
        self._is_placed = False
        self._written: dict[str, Any] | None = None
        self._numbers: list[int] = []
        self._look_at_topic = 0.0
        self._look_at_table = time.monotonic() + _TABLE_EVERY
        self._stood: dict[tuple[str, int], int] = {}
        self._started: dict[str, Any] = {}
        self._noted = ""
        self._run: int | None = None
        self._folding = FoldLog()
        self._begin_above_said = _MANY_BEGIN_ABOVE

    # -- start -----------------------------------------------------------------------------------

    def run(self) -> Progress:
        self._state.lock()
        restore = self._catch_signals()
        mask = os.umask(0o077)  # of all that this process and its children make
        try:
            self._state.clear()  # also what a killed run has left for others to read
            if self._state.protect():
                log.warning(
                    "other users had access to files of the state; it was taken away",
                    state_dir=str(self._state.root),
                )
            self._prepare()
            if self._stop.is_set():
                return self._progress
            self._begin_head_start()
            self._suggest_archive()
            stops = self._stop.is_set
            with Session(self._config, self._state.spark_log, stops=stops) as spark:
                spark.dataSource.register(EventStoreDataSource)
                self._publish(spark)
        except StateError as error:
            if error.code != "run.stopping" or not self._stop.is_set():
                raise
        finally:
            self._end_head_start()
            restore()
            self._state.forget_pages()
            self._state.unlock()
            os.umask(mask)
        return self._progress

    def _suggest_archive(self) -> None:
        """Not made by itself: a second JVM beside a publisher may be more than a machine has."""
        if self._is_local and not has_archive(archive_file(find_java())):
            log.info(
                "Spark starts twice as fast with an archive of its classes; to make it, once an"
                f" installation: {sys.executable} -m eventpub.spark.jvm"
            )

    def _prepare(self) -> None:
        """Everything that can be wrong is found here, before Spark takes its seconds."""
        config = self._config
        if self._is_local:
            find_java()
        server = EventStore.server(config.store)
        if config.store.allow_replica and server.is_replica(config.store):
            log.warning(
                f"the database server {server.what_it_is}, and store.allow_replica = true",
                not_guaranteed=UNGUARDED,
            )
        layout = EventStore.discover(config.store)
        if layout.zone is not None and layout.id_index is None:
            log.warning(
                "writers whose sessions keep another time zone, or an import of old rows, would not"
                " be noticed: create_time is a DATETIME, and the table has no index on a number"
                " `id` (eventpub doctor says how to add it)",
                time_zone=layout.zone.name,
            )
        before = self._state.read(self._state.progress_file) or {}
        ends = {(t, p): end for t, p, end in before.get("ends", ())}
        topics = check_topics(
            config.sink,
            shards=config.spark.shards,
            late=config.gaps.late == "divert",
            was_written=any(t == config.sink.topic and end > 0 for (t, _), end in ends.items()),
        )
        self._acknowledged = self._know_topics(before, ends)
        check_sample(config.sink, sources_of(config.sink, config.app.id, config.app.former_ids))
        with EventStore(config.store, layout) as store:
            start = self._start(store)
            now = store.now()
        if self._available_now:
            self._until = now
        before = kept_progress(self._state, config.spark.shards, start)
        former = before.get("shards", config.spark.shards)
        # before fencing: a task of a former run takes its shard before that, and is fenced, or
        # after it, and sees that it is of a former run
        run = self._begin_run(now)
        # whatever number of shards has run last: that it did may not have come to be remembered
        for app_id in (config.app.id, *config.app.former_ids):
            fence_all(config.sink, app_id, max(former, topics.partitions))
        self._take_over(before, former, topics.partitions)
        if former != config.spark.shards:
            # of an earlier run with this number: what the former run knows is newer
            self._state.forget_shards(config.spark.shards)
            self._former_shards = former
        self._low = before.get("low", start)
        self._position = self._reached = before.get("position", start)
        self._has_read = "position" in before
        self._shards_hidden_since = before.get("hidden_since")
        self._heard = before.get("heard", 0)
        self._recounting = Recounting(
            config.recount.horizon,
            start,
            now,
            self._position if self._has_read else None,
            self._shards_hidden_since,
        )
        newest = before.get("newest")
        self._newest_done = None if newest is None else (int(newest[0]), int(newest[1]))
        self._newest = NewestRows(config.recount.horizon, start, self._newest_done)
        self._meet(server.identity)
        self._job = Job(
            config,
            layout,
            topics.partitions,
            None if start == BEGINNING else start,
            self._low,
            run,
            accepts_topic=self._topics.get(config.sink.topic) == config.sink.accept_topic_id,
            former_indexes=self._state.former_indexes(),
            is_placed=self._is_placed,
        )

    def _know_topics(
        self, before: dict[str, Any], ends: dict[tuple[str, int], int]
    ) -> dict[tuple[str, int], int]:
        """Take the topics' ids; which of the ends that were reached still mean something."""
        sink = self._config.sink
        self._topics = topic_ids(sink, sink.topics)
        known = before.get("topics", {})
        kept = check_written(sink, self._topics, known, ends)
        is_same = self._topics.get(sink.topic) == known.get(sink.topic)
        if before and is_same and known:
            self._is_placed = before.get("placed", False)
        else:  # of a topic without records nothing needs to be remembered
            self._is_placed = not any(visible_ends(sink).values())
        return kept

    def _take_over(self, before: dict[str, Any], shards: int, partitions: int) -> None:
        """What the indexes know is taken over where partitions were added since."""
        former = before.get("partitions", partitions)
        self._numbers = before.get("numbers", [])
        if former == partitions:
            return
        self._numbers = [*(n for n in self._numbers if n != former), former]
        self._is_placed = False
        self._state.set_aside(shards, former)
        log.warning(
            "the topic's number of partitions has changed: events of one aggregate may stand in"
            " another partition from now on than before; all partitions are read back once",
            before=former,
            now=partitions,
        )

    def _meet(self, identity: str) -> None:
        """Which server is read; a change is said, and everything is counted again."""
        if identity == self._progress.server:
            return
        before = self._progress.server
        if not before:
            with suppress(StateError):  # unreadable: not known
                before = (self._state.read(self._state.server_file) or {}).get("identity", "")
        self._progress.server = identity
        if before == identity:
            return
        if before:
            log.warning(
                "another database server answers than before: a failover, a restored copy, or"
                " another store. What it has and the former had not is published; events that are"
                " missing on it stay on the topic; an event that it has under a version that was"
                " published as another event becomes a dead letter (admission.version_conflict)."
                " `eventpub verify` compares the whole",
                before=before,
                now=identity,
            )
            self._recounting.count_everything()
        # last: a full disk ends this here, and it is not met again
        self._state.write(self._state.server_file, {"identity": identity})

    def _begin_run(self, now: int) -> int:
        """The number of this run: larger than those before, in this directory or another one."""
        state = self._state
        before = (state.read(state.run_file) or {}).get("run", 0)
        of_progress = (state.read(state.progress_file) or {}).get("comparison", {}).get("run", 0)
        run: int = max(now, before + 1, of_progress + 1)
        state.write(state.run_file, {"run": run, "start": self._started}, lasting=True)
        self._run = run
        return run

    def _start(self, store: EventStore) -> int:
        """Where this publisher started: resolved once, and kept."""
        configured = self._config.read.start
        kept = kept_start(self._state, configured)
        if kept is not None and kept["configured"] != configured:
            log.warning(
                "read.start changed; the first start stays in force",
                configured=configured,
                first=kept["configured"],
            )
        if kept is None:
            sink, app = self._config.sink, self._config.app
            if configured == "now" and has_written(sink, sources_of(sink, app.id, app.former_ids)):
                raise start_lost(self._state)  # as with a container whose volume is gone
            position = start_position(self._config.read, store.now)
            kept = {"configured": configured, "position": position, "time": format_time(position)}
        self._started = kept
        if self._state.read(self._state.start_file) != kept:
            self._state.write(self._state.start_file, kept, lasting=True)
        return int(kept["position"])

    def _catch_signals(self) -> Callable[[], None]:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        numbers = (signal.SIGTERM, signal.SIGINT)

        def stop(number: int, _: FrameType | None) -> None:
            if self._stop.is_set():
                os._exit(128 + number)  # asked twice: what is open is aborted by the next start
            self._progress.stopped_by = number
            self._stop.set()
            if self._run is not None:
                self._state.ask_to_stop(self._run)

        before = {number: signal.signal(number, stop) for number in numbers}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore

    # -- publish ---------------------------------------------------------------------------------

    def _publish(self, spark: SparkSession) -> None:
        """Keep a query running: what a retry may fix is retried, with growing waits."""
        wait = 0.25
        failures = 0
        while not self._stop.is_set():
            if self._fatal is not None:
                raise self._fatal
            done = max(self._batches_done, -1)  # those of the head start say nothing of Spark's
            query: StreamingQuery | None = None
            try:
                query = self._start_query(spark)
                finished = self._watch(query)
            except Exception as error:
                finished = False
                failure = self._failure or _understood(error)
                self._note(failure, words_of(error))
                failures = 1 if self._batches_done > done else failures + 1
                if failure.code == "sink.fenced" and not self._another_publisher_seen():
                    failure.retriable = True
                if self._may_pass(failure.code):
                    failure.retriable = True
                if not failure.retriable or (
                    failure.code == "spark.query_failed" and failures > _MOST_FAILURES
                ):
                    raise failure from error
                self._met(failure)
                log.debug("waiting", error=str(failure), seconds=wait)
            finally:
                if query is not None:
                    self._end_query(query)
            if finished:
                return
            if self._batches_done > done:
                self._noted = ""
            wait = 0.25 if self._batches_done > done else min(wait * 2, _LONGEST_WAIT)
            self._stop.wait(wait)

    def _start_query(self, spark: SparkSession) -> StreamingQuery:
        config = self._config
        self._closed = False
        self._failure = None
        self._running = None
        if self._queries:  # what has ended the one before may be that the table was altered
            self._know_table()
        self._queries += 1
        self._state.forget_pages()
        options = self._options() | {
            "looks_every": str(config.spark.trigger),
            "boundary_file": str(self._state.boundary_file),
            "live_dir": str(self._state.live),
        }
        if self._is_local:
            if config.gaps.policy != "hold_shard":
                options["rests_in_tasks"] = "true"
            pages = self._state.pages / f"{self._job.run}.{self._queries}"
            options["page_dir"] = str(pages)
            self._job = replace(self._job, pages=pages)
        return (
            spark.readStream.format("eventstore")
            .options(**options)
            .load()
            .writeStream.foreachBatch(self._micro_batch)
            .option("checkpointLocation", str(self._state.checkpoint))
            .trigger(processingTime=f"{config.spark.trigger // 1000} milliseconds")
            .start()
        )

    def _options(self) -> dict[str, str]:
        """Of the source, whoever runs its tasks."""
        config = self._config
        options = options_of(config.store, config.read) | {
            "windows": "true",
            "shards": str(config.spark.shards),
            "partitions": str(self._job.partitions),
            "position": str(self._position),
            "wake_file": str(self._state.progress_file),
            "passed_file": str(self._state.passed_file),
            "horizon": str(config.recount.horizon),
        }
        if self._has_read:
            # this source begins where another has seen nothing hidden that was created before
            hidden = self._hidden_since()
            since = self._position if hidden is None else min(hidden, self._position)
            options["hidden_since"] = str(since)
        if self._until is not None:
            options["until"] = str(self._until)
        return options

    def _begin_head_start(self) -> None:
        """Not on a cluster: the indexes are there. A run that ends by itself gains nothing."""
        if self._is_local and self._until is None and not is_wanted_elsewhere("head_start"):
            self._head_start = HeadStart(
                self._options(), self._publish_batch, self._look_meanwhile, self._missed
            )

    def _look_meanwhile(self) -> None:
        """What `_watch` does once a second, until there is a query to be watched."""
        if not self._queries:
            with EventStore(self._config.store, self._job.layout) as store:
                self._look(store, [])
                self._look_at_newest(store)
                self._see_to(store, None, [])
            self._show(None, [])

    def _end_head_start(self) -> None:
        if self._head_start is not None:
            self._head_start.end()

    def _missed(self, error: Exception) -> None:
        """What has ended the head start is met again by Spark's tasks, if it lasts."""
        failure = _understood(error)
        if failure.code in {"sink.other_publisher", "sink.topic_recreated"}:
            self._fatal = failure
        if not self._stop.is_set():
            self._met(failure)

    def _may_pass(self, code: str) -> bool:
        """Whether what was met has not lasted for long since the last batch that went well."""
        if code not in _PASSES_WITHIN:
            return False
        now = time.monotonic()
        self._wrong_since = self._wrong_since or now
        return now - self._wrong_since < _PASSES_WITHIN[code]

    def _micro_batch(self, windows: DataFrame, batch_id: int) -> None:
        """One window: every shard publishes its part, in one stage without a shuffle."""
        failpoint("after_offset_log")
        with self._batch:
            if self._closed:
                raise StateError("run.stopping", "stopped before this batch", retriable=True)
            if self._head_start is not None and self._head_start.is_running:
                windows.mapInArrow(_same, windows.schema).collect()  # forks workers, loads classes
                self._end_head_start()

            def run(tasks: Tasks) -> list[Any]:
                rows = windows.mapInArrow(tasks, "report string").collect()
                return [json.loads(row["report"]) for row in rows]

            try:
                self._publish_batch(batch_id, run)
            except EventpubError as error:
                self._failure = error
                raise
        failpoint("before_commit_log")

    def _publish_batch(self, number: int, run: Callable[[Tasks], list[Any]]) -> None:
        """One window, by tasks that Spark runs, or the head start."""
        started = time.perf_counter()
        comparison = self._recounting.next_comparison()
        for file in self._state.set_invalid_requests_aside():
            log.warning("not a request; it was moved aside", file=str(file))
        requests = self._state.asked()
        self._running = number
        job = replace(
            self._job,
            batch=number,
            goes_on=number > self._batches_done,
            takes_over=self._begun,
            wanted=self._wanted,
            low=self._low,
            position=self._position,
            comparison=comparison,
            all_buckets=self._all_buckets,
            requests=tuple(requests),
            former_shards=self._former_shards,
            acknowledged=self._acknowledged,
            is_placed=self._is_placed,
            ends=self._ends,
            follows=self._follows(bool(requests)),
            uncounted_since=self._recounting.uncounted_since,
        )
        self._ends = {}
        if number < 0:  # of the head start: nobody leaves pages for it, or tries it again
            job = replace(job, pages=None)
            self._begun = number
        outcomes = run(_task(job))
        if failures := [from_dict(o["error"]) for o in outcomes if "error" in o]:
            raise _foremost(failures)
        reports = [ShardReport(**outcome) for outcome in outcomes]
        if self._all_buckets:
            self._recounting.read_before(reports)
        self._recounting.hear(reports)
        self._all_buckets = False
        with self._remembering:
            self._remember(reports)
            self._remembered = number
        if self._former_shards is not None:
            self._state.forget_shards(self._former_shards)
            self._former_shards = None
        if self._job.former_indexes:
            self._state.forget_former()
            self._job = replace(self._job, former_indexes=())
        for report in reports:
            for request_id, outcome in report.answers.items():
                self._state.answer(request_id, outcome)
                asked = next((r for r in requests if r.id == request_id), None)
                if asked is not None:
                    log.info(
                        f"gaps {asked.action} was requested",
                        aggregate_id=asked.aggregate_id,
                        outcome=outcome,
                    )
        with self._showing:
            self._running = None
            self._progress.add(reports, time.perf_counter() - started)
        self._batches_done = number
        self._begun = None
        if self._position >= self._boundary:
            self._progress.lag_seconds, self._progress.lag_events = 0.0, 0
            self._lag.nothing()
        self._say(reports)
        self._ends = {r.shard: {(t, p): end for t, p, end in r.offsets} for r in reports}
        self._first_batch = self._first_batch or time.monotonic()
        if any(r.foreign for r in reports) and self._another_publisher_seen():
            raise SinkError(
                "sink.fenced",
                "another publisher with the same app.id is publishing to this topic; nothing "
                "was lost or repeated, and this one, the older, stops",
                where=f"app.id = {self._config.app.id}, topic {self._config.sink.topic}",
                suggestion="let only one publisher run for an app.id",
            )
        self._on_progress(self._progress)

    def _follows(self, is_waited_for: bool) -> float:
        """Seconds for which the next batch's tasks may follow the boundary.

        Those of the first only while full pages wait: the change to the second takes a second.

        Not long where something waits for the end of the batch, or for the one after it: a shard
        that holds is looked after once a batch, and what tasks elsewhere have compared may be heard
        of only then.
        """
        is_waited_for = is_waited_for or self._config.gaps.policy == "hold_shard"
        if self._all_buckets:  # what a start finds out is reported soon
            return 0.0 if is_waited_for or self._former_shards is not None else _FOLLOWS
        if is_waited_for or (bool(self._recounting.comparison.buckets) and not self._is_local):
            return _FOLLOWS_WAITED_FOR
        return _FOLLOWS_HERE if self._is_local else _FOLLOWS

    @property
    def _is_local(self) -> bool:
        master = self._config.spark.master
        return master == "local" or master.startswith("local[")

    def _note(self, failure: EventpubError, words: str) -> None:
        """Keep the whole of an error in spark.log; of one that repeats, that it did."""
        is_known = failure.code != "spark.query_failed" and failure.code == self._noted
        self._noted = failure.code
        with suppress(OSError), self._state.spark_log.open("a") as log_file:
            log_file.write(f"again: {failure}\n" if is_known else f"{words}\n")

    def _met(self, failure: EventpubError) -> None:
        """Show what is waited out."""
        self._progress.last_error = str(failure)
        self._on_progress(self._progress)

    def _another_publisher_seen(self) -> bool:
        """Note it; whether it was seen so often that this publisher has to give way."""
        now = time.monotonic()
        if self._first_batch is None or now - self._first_batch < _TAKEOVER:
            return False
        recent = [seen for seen in self._sightings if now - seen < _SIGHTINGS_WITHIN]
        self._sightings = [*recent, now]
        return len(self._sightings) >= _MOST_SIGHTINGS

    def _remember_meanwhile(self, batch: int | None, live: Sequence[ShardReport]) -> None:
        """Take over what the tasks of a running batch report; a batch may last minutes."""
        with self._remembering:
            if live and batch is not None and batch > self._remembered:
                self._remember(live)

    def _remember(self, reports: Sequence[ShardReport]) -> None:
        """Before Spark commits the batch: a later batch must not know less than the index."""
        self._wrong_since = None
        since = [r.hidden_since for r in reports if r.hidden_since is not None]
        with self._files:  # what is hidden is of no use without the position that it belongs to
            self._low = min(r.low for r in reports)
            self._position = min(r.position for r in reports)
            self._has_read = True
            self._shards_hidden_since = min(since, default=None)
        self._reached = max(r.position for r in reports)
        self._is_placed = self._is_placed or any(r.is_placed for r in reports)
        due = [r.next_due for r in reports if r.next_due is not None]
        self._next_due = min(due, default=None)
        self._holds = sum(r.holds for r in reports)
        self._left_open = False
        ends = {(t, p): end for report in reports for t, p, end in report.offsets}
        self._acknowledged = {**self._acknowledged, **ends}
        self._write_progress()

    def _write_progress(self) -> None:
        """Position and pending work, and when the source is to ask for a batch without new rows."""
        wanted_now = self._left_open or self._recounting.has_suspects() or bool(self._state.asked())
        with self._files:
            heard, hidden_since = self._heard, self._hidden_since()  # in this order
            progress = {
                "position": self._position,
                "low": self._low,
                "hidden_since": hidden_since,
                "heard": heard,
                "next_due": 0 if wanted_now else self._next_due,
                "wanted": self._wanted,
                "comparison": {"run": self._job.run, **asdict(self._recounting.comparison)},
                "holds": self._holds,
                "newest": self._newest_done,
                "ends": [[*place, end] for place, end in self._acknowledged.items()],
                "shards": self._config.spark.shards,
                "partitions": self._job.partitions,
                "topics": self._topics,
                "placed": self._is_placed,
                "numbers": self._numbers,
                "start": self._started,
            }
            if progress != self._written:  # else it waits for the disk each second of an idle day
                self._state.write(self._state.progress_file, progress, lasting=True)
                self._written = progress

    def _hidden_since(self) -> int | None:
        """As of `Bounds`, and what is heard of and not counted yet."""
        since = [self._shards_hidden_since, self._recounting.uncounted_since]
        return min((at for at in since if at is not None), default=None)

    def _say(self, reports: list[ShardReport]) -> None:
        for gap in (gap for report in reports for gap in report.skipped):
            log.warning("gap skipped", **gap)
        unnamed = sum(r.counts["gaps_skipped"] - len(r.skipped) for r in reports)
        if unnamed > 0:
            topic = self._config.sink.gaps_topic
            log.warning(
                "more gaps skipped; each is on the topic of gaps", count=unnamed, topic=topic
            )
        for row in (row for report in reports for row in report.dead):
            log.warning("refused, written to the topic of dead letters", **row)
        for jump in (jump for report in reports for jump in report.jumps):
            log.warning(
                "the topic has a version of this application's that does not follow from what was"
                " known: another process has written it, or versions between are missing",
                **jump,
            )
        for topic in sorted({topic for report in reports for topic in report.made_again}):
            log.warning(
                "the topic was deleted and created again; what stood on it is gone", topic=topic
            )
        if count := sum(report.not_ours.get("foreign", 0) for report in reports):
            log.warning(
                "records on the topics were not written by this publisher; they do not count",
                records=count,
            )
        restored = sum(report.restored for report in reports)
        if restored:
            log.warning(
                "the broker had left committed transactions open; their records were published"
                " again, before anything behind them",
                records=restored,
            )
        for report in reports:
            if report.rebuilt is not None:
                log.warning(
                    "an index was damaged, and is rebuilt from the topic",
                    shard=report.shard,
                    damage=report.rebuilt,
                )
            if report.baseline is not None:
                log.warning(
                    "the topic was cut by retention and the index is new, or older than what was"
                    " cut: events created before count as published",
                    shard=report.shard,
                    before=format_time(report.baseline),
                )
            if report.repeats_after is not None:
                log.warning(
                    "retention has removed records from the topic that the index has not read:"
                    " events among them that were created later than this are published again",
                    shard=report.shard,
                    after=format_time(report.repeats_after),
                )
        vanished = sum(report.counts["gaps_vanished"] for report in reports)
        if vanished:
            log.warning("holds ended: the events above the gap were deleted", count=vanished)
        state = reports[0].watermark
        if state != self._watermark and state in _WATERMARK:
            log.warning(_WATERMARK[state], state=state)
        if state != "held":
            self._watermark = state

    # -- watch, stop -----------------------------------------------------------------------------

    def _watch(self, query: StreamingQuery) -> bool:
        """Wait until asked to stop, or until everything is published where that was asked for."""
        with EventStore(self._config.store, self._job.layout) as store:
            looked = 0.0
            while not self._stop.wait(_WATCHED_EVERY if self._until is None else 0.05):
                if not query.isActive:
                    query.awaitTermination()
                    return False
                if self._everything_is_published() and not self._recount_finds(store, last=True):
                    return True
                if time.monotonic() - looked >= 1.0:
                    looked = time.monotonic()
                    batch, live = self._live()
                    self._look(store, live)
                    self._look_at_newest(store)
                    self._see_to(store, batch, live)
                    self._show(batch, live)
                    folding = self._state.folding(self._job.run, self._config.spark.shards)
                    self._folding.show(folding, looked)
        return True

    def _see_to(self, store: EventStore, batch: int | None, live: Sequence[ShardReport]) -> None:
        """What is not done by reading on."""
        self._see_to_topic()
        self._see_to_table()
        self._remember_meanwhile(batch, live)
        finds = self._recount_finds(store, live) and not self._is_compared_meanwhile(batch, live)
        news = any(r.has_news for r in live)
        left_open = self._finds_left_open(self._tasks_rest(batch, live))
        if finds or self._state.asked() or left_open or news:
            self._want_batch()

    def _know_table(self) -> bool:
        """Read the table's layout again; whether it has changed.

        Raises:
            StoreError: it cannot be read.
        """
        layout, before = EventStore.discover(self._config.store), self._job.layout
        self._look_at_table = time.monotonic() + _TABLE_EVERY
        self._job = replace(self._job, layout=layout)
        if layout == before:
            return False
        changed = [f.name for f in fields(layout) if vars(layout)[f.name] != vars(before)[f.name]]
        log.warning("the event table was altered", table=layout.table, changed=changed)
        return True

    def _see_to_table(self) -> None:
        """Whether the event table is as it was.

        Raises:
            StoreError: store.table_altered: all that reads it has to begin anew.
        """
        if time.monotonic() < self._look_at_table:
            return
        self._look_at_table = time.monotonic() + _TABLE_EVERY
        try:
            is_altered = self._know_table()
        except EventpubError as error:
            self._progress.last_error = str(error)
            return
        if is_altered:
            raise StoreError(
                "store.table_altered",
                "the event table was altered; it is read anew, as it is now",
                where=self._job.layout.where,
                retriable=True,
            )

    def _see_to_topic(self) -> None:
        """Whether the topic is the same, and nobody else publishes to it.

        A publisher of another id is fenced by nobody. Where this one writes, a shard sees that
        offsets are missing; this looks where it has not written for a while.

        Raises:
            SinkError: `sink.topic_recreated`, `sink.other_publisher`.
        """
        now, config = time.monotonic(), self._config
        if now < self._look_at_topic:
            return
        self._look_at_topic = now + _TOPIC_EVERY
        ends, stood = self._acknowledged, self._stood
        self._stood = ends
        rest = {place: end for place, end in ends.items() if stood.get(place) == end}
        try:
            ids = topic_ids(config.sink, (config.sink.topic,), _OPEN_TIMEOUT)
            check_written(config.sink, ids, self._topics, {})
            found = visible_ends(config.sink, list(rest), _OPEN_TIMEOUT) if rest else {}
            between = {p: (rest[p], end) for p, end in found.items() if end > rest[p]}
            if between:
                sources = sources_of(config.sink, config.app.id, config.app.former_ids)
                check_between(config.sink, sources, between)
        except SinkError as error:
            if error.code in {"sink.other_publisher", "sink.topic_recreated"}:
                raise
            self._progress.last_error = str(error)

    def _tasks_rest(self, batch: int | None, live: Sequence[ShardReport]) -> bool:
        """Whether tasks run and have not had a window for a moment."""
        now, stands = time.monotonic(), (batch, [report.position for report in live])
        if stands != self._stands:
            self._stands, self._stands_since = stands, now
        return bool(live) and now - self._stands_since > _RESTS_AFTER

    def _finds_left_open(self, tasks_rest: bool) -> bool:
        """Whether what was published last is kept from readers: a shard's next task fixes it."""
        now = time.monotonic()
        ends = self._acknowledged
        rests = tasks_rest or self._running is None
        if not (rests and self._config.sink.delivery == "exactly_once" and ends):
            self._look_for_open = now + _OPEN_EVERY
        elif now >= self._look_for_open:
            self._look_for_open = now + _OPEN_EVERY
            try:
                self._left_open = are_left_open(self._config.sink, ends, _OPEN_TIMEOUT)
            except EventpubError as error:
                self._progress.last_error = str(error)
        return self._left_open

    def _live(self) -> tuple[int | None, list[ShardReport]]:
        """The batch that runs, and what the shards have done so far, where all of them tell."""
        batch = self._running
        if batch is None:
            return None, []
        told = self._state.told(self._job.run, batch, self._config.spark.shards)
        return batch, [ShardReport(**report) for report in told]

    def _show(self, batch: int | None, live: list[ShardReport]) -> None:
        """The progress, with what the batch has done so far if it still runs."""
        with self._showing:
            shown = done = replace(self._progress)
            if live and batch == self._running:
                shown = replace(done)
                shown.add(live, 0.0)
                shown.batches, shown.batch_seconds = done.batches, done.batch_seconds
            self._warn_of_first_versions(shown.begin_above)
        self._on_progress(shown)

    def _warn_of_first_versions(self, aggregates: int) -> None:
        """Say once that very many aggregates wait for their first version, and again at tenfold."""
        if aggregates < self._begin_above_said:
            return
        self._begin_above_said = 10 * aggregates
        log.warning(
            "very many aggregates begin above the first version and wait for it, until their gaps"
            " are skipped: is store.first_version wrong, or were the first events archived?"
            " read.start leaves out what was created before a time",
            aggregates=aggregates,
            first_version=self._config.store.first_version,
        )

    def _want_batch(self) -> None:
        """The next batch shall begin soon, whether or not there are new rows."""
        self._wanted += 1
        self._write_progress()

    def _is_compared_meanwhile(self, batch: int | None, live: Sequence[ShardReport]) -> bool:
        """Whether the tasks that run do the comparison, so that no other batch is needed.

        On this machine also those that have not reported anything yet.
        """
        if batch is None or not (live or self._is_local):
            return False
        is_taken_on = self._recounting.is_taken_on()
        if is_taken_on:
            self._write_progress()
        return is_taken_on

    def _recount_finds(
        self, store: EventStore, live: Sequence[ShardReport] = (), *, last: bool = False
    ) -> bool:
        """Count what is due again; whether there are buckets that the shards have to compare.

        Args:
            live: as far as the shards are in the batch that runs.
            last: count everything within the horizon, due or not.
        """

        def stand() -> tuple[int, int, int | None]:
            since = self._shards_hidden_since
            if not live:
                return self._position, self._reached, since
            told = [report.position for report in live]
            return max(self._position, min(told)), max(self._reached, *told), since

        is_told = not self._all_buckets
        try:
            passed = told(self._state.passed_file)
            self._ended_lately(passed.keys())
            self._recounting.told(passed)
            heard = max([self._heard, *passed.values()])
            if heard > self._heard:
                self._heard = heard
                with suppress(StateError):
                    self._write_progress()
            found = self._recounting.finds(store, live, stand, is_told=is_told, last=last)
        except EventpubError as error:
            self._progress.last_error = str(error)
            return last
        if found and last:
            self._write_progress()
        return found

    def _everything_is_published(self) -> bool:
        progress = self._progress
        return (
            self._until is not None
            and progress.batches > 0
            and progress.position >= self._until
            and progress.holds_open == 0
        )

    def _look(self, store: EventStore, live: Sequence[ShardReport]) -> None:
        """How far behind the database the reader is."""
        progress, lag = self._progress, self._lag
        position = max(self._position, min((r.position for r in live), default=0))
        read = progress.rows_read + sum(r.counts["rows"] for r in live)
        try:
            poll = lag.look(store, position, self._config.read.delay, read)
        except EventpubError as error:
            progress.last_error = str(error)
            return
        self._state.see_database()
        progress.time, self._boundary = poll.now, poll.upper
        self._meet(poll.server)
        progress.lag_seconds, progress.lag_events = lag.seconds, lag.events

    def _look_at_newest(self, store: EventStore) -> None:
        """Rows that are inserted now but say that they were created long ago, or will be.

        Raises:
            StoreError: store.rows_in_past
        """
        newest, now = self._newest, self._progress.time
        if not now:  # not known yet
            return
        try:
            rows = store.newest(SAMPLE)
            ahead = store.ahead(now)
            ended = self._ended_lately(told(self._state.passed_file).keys())
            above = newest.wants_more(rows)
            if above is not None:
                rows = store.newest(MOST, above)
        except EventpubError as error:
            self._progress.last_error = str(error)
            return
        found = newest.sample(now, self._position, rows, ended)
        if not (found or self._recounting.has_late()):
            self._newest_done = newest.last
        if found:
            self._recounting.note([bucket_of(row.created) for row in found])
            self._say_past(found, now)
        self._say_future(ahead)
        if newest.trips and self._config.recount.rows_in_past == "stop":
            zone = self._job.layout.zone
            raise newest.error(now, self._job.layout.where, None if zone is None else zone.name)

    def _ended_lately(self, ended: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where transactions wrote whose end was reported in the last minute, once each."""
        now = time.monotonic()
        known = {buckets: at for buckets, at in self._ended.items() if now - at < _ENDED_FOR}
        self._ended = known | dict.fromkeys(ended, now)
        return list(self._ended)

    def _say_past(self, rows: Sequence[NewRow], now: int) -> None:
        if time.monotonic() - self._said_of_past < _SAID_EVERY:
            return
        self._said_of_past = time.monotonic()
        oldest = min(row.created for row in rows)
        log.warning(
            "rows were committed now that were created before the horizon of the recount; their"
            " seconds are counted again, which publishes them. Only the newest ids are watched: no"
            " such row is missed with a recount.horizon above that age, or GRANT PROCESS",
            code="store.rows_in_past",
            rows=len(rows),
            oldest=format_time(oldest),
            seconds=round((now - oldest) / 1e6),
        )

    def _say_future(self, ahead: int) -> None:
        before, self._progress.ahead_seconds = self._progress.ahead_seconds, 0.0
        if ahead > _CLOCK_TOLERANCE:
            self._progress.ahead_seconds = ahead / 1e6
        after = self._progress.ahead_seconds
        if after and (
            not before or (after > before and time.monotonic() - self._said_of_future > _SAID_EVERY)
        ):
            self._said_of_future = time.monotonic()
            log.warning(
                "the newest event lies in the future, and is published when its time has come; if"
                " writers' sessions keep another time zone, set store.time_zone to theirs",
                code="store.rows_in_future",
                seconds=round(after),
            )
        elif before and not after:
            log.info("no event lies in the future any more")

    def _end_query(self, query: StreamingQuery) -> None:
        """Let a running batch finish and be committed by Spark, then stop the query."""
        patience = _ENDS_WITHIN
        while not self._batch.acquire(timeout=patience):
            # not once: a batch that was about to begin did not see that another one was wanted
            with suppress(StateError):
                self._want_batch()
            patience = min(2 * patience, 1.0)
        self._closed = True
        self._batch.release()
        done = self._batches_done
        deadline = time.monotonic() + 5.0
        while done >= 0 and query.isActive and time.monotonic() < deadline:
            last = query.lastProgress
            if last is not None and last["batchId"] >= done:
                break
            time.sleep(0.02)
        query.stop()


def _same(windows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return windows


def _task(job: Job) -> Tasks:
    """The function that Spark runs for each shard's window."""

    def publish(windows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        again = context is not None and context.attemptNumber() > 0
        # what the attempt before has published is no other publisher's
        ours = replace(job, ends={}) if again else job
        for batch in windows:
            for window in batch.to_pylist():
                outcome: dict[str, Any]
                try:
                    report = publish_window(
                        ours,
                        window["shard"],
                        window["after"],
                        Bounds(
                            window["upto"],
                            window["open_since"],
                            window["more"],
                            hidden_since=window["hidden_since"],
                        ),
                        moves=window["moves"],
                    )
                    report.watermark, report.passed = window["watermark"], window["passed"]
                    outcome = vars(report)
                except EventpubError as error:
                    outcome = {"error": error.to_dict()}
                yield pa.RecordBatch.from_pydict({"report": [json.dumps(outcome)]})

    return publish


def _foremost(failures: list[EventpubError]) -> EventpubError:
    """The most serious of the errors of one batch: first what waiting does not fix.

    Those that differ from it are logged.
    """
    foremost = min(failures, key=lambda failure: failure.retriable)
    for code, failure in {f.code: f for f in failures}.items():
        if code != foremost.code:
            log.warning("another shard met another error", error=str(failure))
    return foremost


def _understood(error: Exception) -> EventpubError:
    """What an exception that came through Spark means."""
    if isinstance(error, EventpubError):
        return error
    text = words_of(error)
    found = find_marked(text)
    if found is not None:
        return found
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return StateError(
            "state.disk_full",
            "no space is left for Spark's checkpoint",
            suggestion="free space on the disk of app.state_dir; publishing goes on after it",
            retriable=True,
        )
    reasons = re.findall(r"^\s*([\w.]+(?:Error|Exception): .+)$", text, re.MULTILINE)
    reason = reasons[-1] if reasons else text.strip().split("\n", 1)[0]
    return StateError(
        "spark.query_failed",
        f"the micro-batch failed inside Spark: {reason}",
        suggestion="the whole of it is in spark.log, in app.state_dir",
        retriable=True,
    )
