"""What is shown and written down of a query: its batches, as their journals report them."""

from __future__ import annotations

import json
import os
import queue
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

import structlog

from eventpub import __version__
from eventpub.channel import Report, Request
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator.health import SILENT_AFTER, STALLED_AFTER, Check
from eventpub.coordinator.progress import Progress, Rate
from eventpub.coordinator.requests import paused
from eventpub.coordinator.status import notable, unanswered
from eventpub.coordinator.wording import ReportLog
from eventpub.errors import EventpubError
from eventpub.index import glance
from eventpub.log import dropped
from eventpub.masking import mask_all
from eventpub.publisher.prepare import Prepared
from eventpub.publisher.workers import BrokerWork, ChecksWork, Worker
from eventpub.sink.numbered import NumberedSink, markers_of
from eventpub.spark.journal import Journals
from eventpub.spark.options import Publisher
from eventpub.spark.place import Place
from eventpub.spark.planner import Plan
from eventpub.state import StateDir

_LAG_EVERY, _BROKER_EVERY, _KEPT_EVERY = 1.0, 5.0, 10.0

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Pausable(Protocol):
    """What a query says of itself."""

    @property
    def is_paused(self) -> bool:
        """Whether nothing is published for now."""

    @property
    def paused_by(self) -> str:
        """Who has paused it, and when."""


class Monitor:
    """See the module. Times of the machine are seconds.

    Args:
        config: the whole configuration.
        state: where progress and status are written.
        prepared: what the start has found out.
        publisher: the checkpoint.
        query: says whether it is paused.

    Attributes:
        progress: totals since the start of the process.
    """

    def __init__(
        self,
        config: Config,
        state: StateDir,
        prepared: Prepared,
        publisher: Publisher,
        query: Pausable,
    ) -> None:
        self._config, self._state, self._prepared = config, state, prepared
        self._publisher, self._query = publisher, query
        self._journals = Journals(Place(publisher.location), publisher.query)
        self._plan: Plan = publisher.initial
        self._reports: dict[int, Report] = {}
        self._seen = self._journals.newest()  # what a former process did is not counted
        self.progress = Progress(server=prepared.start_state.server)
        self._stand_at(self._seen - 1)  # the last one may not be committed
        self._rate = Rate()
        self._log = ReportLog(config)
        self._waiting: dict[str, tuple[Request, queue.SimpleQueue[Any], dict[int, str]]] = {}
        self._begun = time.time()
        self._active_at: float | None = None
        self._well_since: float | None = None
        self._checks: dict[str, Check] = {}
        self._events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        checks = ChecksWork(config, prepared.assignment.layout)
        broker = BrokerWork(config, prepared.topics)
        self._lag_work = Worker("eventpub-lag", checks.do, self._events.put, checks.close)
        self._broker_work = Worker("eventpub-broker", broker.do, self._events.put)
        self._due = {"lag": 0.0, "broker": 0.0}
        self._boundary, self._lag_at = 0, time.monotonic()
        self._remembered: dict[str, Any] = {}
        self._kept: Any = None
        self._kept_at = 0.0
        self._ui = ""
        self._document: dict[str, Any] = {}
        now = time.monotonic()
        for name in ("database", "boundary", "publishing", *self._shards, "index", "broker"):
            self._mark(name, "error", "not seen to work yet", now)
        for name in ("recount", "times"):
            self._mark(name, "ok", "", now)
        self._document = self._made(now)

    @property
    def _shards(self) -> list[str]:
        return [f"shard {number}" for number in range(self._config.run.shards)]

    def close(self) -> None:
        """End the threads."""
        self._lag_work.end(0.3)
        self._broker_work.end(0.3)

    # -- what happens -----------------------------------------------------------------------------

    def started(self, session: Any) -> None:
        """The query was started."""
        self._ui = session.sparkContext.uiWebUrl or ""
        if self._ui:
            log.info("Spark's pages", address=self._ui)
        self.remember()

    def look(self, query: Any, now: float) -> None:
        """Take over the batches that were done since the last call, and what is asked for."""
        if query is not None:
            with suppress(Exception):  # Spark's process may be gone, which its owner sees
                self._take(query, now)
        while not self._events.empty():
            self._observe(self._events.get(), now)
        if now >= self._due["lag"]:
            self._due["lag"] = now + _LAG_EVERY
            self._lag_work.put(e.MeasureLag(self.progress.position, self.progress.rows_read))
        if now >= self._due["broker"]:
            self._due["broker"] = now + _BROKER_EVERY
            self._broker_work.put(e.CheckTopic({}))

    def _take(self, query: Any, now: float) -> None:
        if query.isActive:
            self._active_at = now
        last = query.lastProgress
        if last is None:
            return
        self._mark("boundary", "ok", "", now)
        offset = last.sources[0].endOffset
        plan = Plan.from_offset(json.loads(offset) if isinstance(offset, str) else offset)
        for batch in range(self._seen + 1, plan.batch + 1):
            for report in self._heads(batch):
                self._reported(report, now)
            self._seen = batch
        if plan.batch > self._plan.batch:
            self._stand_at(plan.batch)
            self._plan = plan
            self._well_since = self._well_since or now
            self._mark("publishing", "ok", "", now)
            self._mark("index", "ok", "", now)
            self.remember()

    def _heads(self, batch: int) -> list[Report]:
        heads = (self._journals.head(batch, n) for n in range(self._config.run.shards))
        return [head["report"] for head in heads if head is not None]

    def _stand_at(self, batch: int) -> None:
        """A batch is committed: where its shards are is where the publisher is."""
        for report in self._heads(batch):
            self._reports[report.shard] = report
            if report.shard not in self.progress.per_shard:  # of a former process: nothing is new
                is_there = {n: getattr(report, n) for n in ("position", "low", "holds", "next_due")}
                self.progress.add(Report(report.shard, **is_there), "Spark")
        if len(self._reports) == self._config.run.shards:
            self.progress.position = min(r.position for r in self._reports.values())

    def ended(self) -> None:
        """The query has ended by itself, so that every batch is committed."""
        self._stand_at(self._journals.newest())
        self.remember()

    def settle(self) -> None:
        """The query was stopped, perhaps before Spark has noted that its last batch is done: the
        markers on the topic say so."""
        newest, shards = self._journals.newest(), range(self._config.run.shards)
        heads = [self._journals.head(newest, n) for n in shards] if newest else [None]
        if newest <= self._plan.batch or None in heads:
            return
        with_rows = {n for n, head in zip(shards, heads, strict=True) if head and head["rows"]}
        sink = NumberedSink(self._config.sink, self._config.app.id, markers_of(self._config.sink))
        if with_rows <= sink.published_tasks(self._publisher.query, newest - 1):
            for batch in range(self._seen + 1, newest + 1):
                for report in self._heads(batch):
                    self._reported(report, time.monotonic())
            self._stand_at(newest)
            self.remember()

    def _reported(self, report: Report, now: float) -> None:
        self.progress.add(report, "Spark")
        self._rate.add(now, self.progress.published)
        self._mark(f"shard {report.shard}", "ok", "", now)
        for line in self._log.lines(report, self.progress, now):
            getattr(log, line.level)(line.text, **line.facts)
        for id_, answer in report.answers.items():
            self._answered(id_, report.shard, answer)

    def _observe(self, event: e.Event, now: float) -> None:
        if isinstance(event, e.LagMeasured):
            self._mark("database", "ok", "", now)
            self._boundary, self._lag_at = event.upper, now
            self.progress.lag_seconds, self.progress.lag_events = event.seconds, event.events
            self.progress.time = event.upper + self._config.read.delay
        elif isinstance(event, e.TopicChecked):
            self._mark("broker", "ok", "", now)
        elif isinstance(event, e.Failed):
            name = "broker" if isinstance(event.command, e.CheckTopic) else "database"
            self._mark(name, "error", f"{event.error.code}: {event.error.message}", now)

    def failed(self, error: EventpubError, now: float) -> None:
        """The query has ended with an error."""
        self._well_since = None
        self.progress.last_error = str(error)
        self._mark("publishing", "error", f"{error.code}: {error.message}", now)

    def well_for(self, now: float) -> float:
        """Seconds since the first batch after the last failure; 0: there was none."""
        return 0.0 if self._well_since is None else now - self._well_since

    def _mark(self, name: str, state: Any, message: str, now: float) -> None:
        before = self._checks.get(name)
        if state == "ok" and before is not None and before.state == "error" and before.last_ok:
            log.info(f"{name}: ok again after {now - before.last_ok:.0f} s")
        since = before.since if before is not None and before.state == state else now
        last_ok = now if state == "ok" else None if before is None else before.last_ok
        self._checks[name] = Check(name, state, message, since, last_ok)

    # -- what is written down ---------------------------------------------------------------------

    def remember(self) -> None:
        """Write down where the publisher is, where that has changed."""
        begin, reports = self._prepared.start_state, [*self._reports.values()]
        is_whole = len(reports) == self._config.run.shards
        start = begin.start if begin.position is None else begin.position
        what = {
            **begin.kept,
            "engine": "spark",
            "query": self._publisher.query,
            "run": begin.run,
            "position": min(r.position for r in reports) if is_whole else start,
            "low": min(r.low for r in reports) if is_whole else begin.low,
            "hidden_since": (
                self._plan.unpublished_since if self._plan.batch else begin.hidden_since
            ),
            "holds": self.progress.holds_open,
            "ends": [[*place, end] for place, end in begin.acknowledged.items()],
            "shards": self._config.run.shards,
            "partitions": begin.partitions,
            "placed": True if is_whole else begin.is_placed,
            "server": self.progress.server,
            "is_paused": self._query.is_paused,
            "paused_by": self._query.paused_by,
        }
        if what != self._remembered:
            with suppress(EventpubError):
                self._state.write(self._state.progress_file, what, lasting=True)
                self._remembered = what

    def show(
        self, now: float, *, error: EventpubError | None = None, is_over: bool = False
    ) -> dict[str, Any]:
        """The status; also written down where it has changed or is old."""
        found = self._document = self._made(now)
        checks = notable(found)
        if is_over or checks != self._kept or now - self._kept_at > _KEPT_EVERY:
            self._kept, self._kept_at = checks, now
            if is_over:
                why = None if error is None else str(error)
                found |= {"state": "stopped", "stopped_by": why, "stopped_at": time.time()}
            with suppress(EventpubError):
                self._state.write(self._state.status_file, mask_all(found))
        return found

    def status(self) -> dict[str, Any]:
        """The status of the last second; in any thread."""
        return unanswered(self._document, self._document.get("at", self._begun), time.time())

    def _lag(self, now: float) -> float:
        lag = self.progress.lag_seconds
        age = now - self._lag_at
        lag += age if age > 5.0 else 0.0
        if self.progress.holds_open and self._boundary and self._reports:
            low = min(report.low for report in self._reports.values())
            lag = max(lag, (self._boundary - low) / 1e6)
        return lag

    def _made(self, now: float) -> dict[str, Any]:
        """As of `coordinator.status.status`."""
        wall, progress, lag = time.time(), self.progress, self._lag(now)
        is_paused, checks = self._query.is_paused, dict(self._checks)
        for name, limit in (("database", SILENT_AFTER), ("boundary", 2 * SILENT_AFTER)):
            check = checks[name]
            if check.state == "ok" and check.last_ok and now - check.last_ok > limit:
                text = f"no answer for {now - check.last_ok:.0f} s"
                checks[name] = Check(name, "error", text, check.last_ok, check.last_ok)
        if is_paused:
            by = f" by {self._query.paused_by}" if self._query.paused_by else ""
            text = f"paused{by}; run `eventpub resume` to publish again"
            checks["publishing"] = Check("publishing", "warn", text, now)
        elif checks["publishing"].state == "ok" and progress.lag_seconds > STALLED_AFTER:
            text = f"events are due for {progress.lag_seconds:.0f} s"
            checks["publishing"] = Check("publishing", "error", text, now)

        def unix(at: float | None) -> float | None:
            return None if at is None else round(wall - (now - at), 3)

        known = now - self._lag_at <= 5.0 and self._boundary > 0
        state = "paused" if is_paused else "running" if self._reports else "starting"
        return {
            "version": __version__,
            "app": self._config.app.id,
            "table": self._config.store.table,
            "topic": self._config.sink.topic,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "run": self._prepared.start_state.run,
            "started_at": round(self._begun, 3),
            "engine": "spark",
            "spark_ui": self._ui,
            "state": state,
            "at": round(wall, 3),
            "is_paused": is_paused,
            "paused_by": self._query.paused_by,
            "is_alive": True,
            "position": progress.position,
            "database_time": progress.time,
            "lag": {
                "seconds": round(lag, 3),
                "events": progress.lag_events + progress.holds_open if known else None,
                "ahead_seconds": 0.0,
                "ahead_rows": 0,
            },
            "rates": {"published": round(self._rate.at(now), 1)},
            "poll_age_seconds": None
            if self._active_at is None
            else round(now - self._active_at, 3),
            "watermark": "open" if self._plan.hidden_since else "off",
            "counters": progress.counters() | {"log_lines_dropped": dropped()},
            "holds_open": progress.holds_open,
            "latency": asdict(progress.latency),
            "steps": {step: asdict(found) for step, found in progress.steps.items()},
            "last_error": progress.last_error,
            "checks": [
                asdict(c) | {"since": unix(c.since), "last_ok": unix(c.last_ok)}
                for c in checks.values()
            ],
            "shards": [self._shard(number, lag) for number in range(self._config.run.shards)],
        }

    def _shard(self, number: int, lag: float) -> dict[str, Any]:
        known, report = self.progress.per_shard.get(number, {}), self._reports.get(number)
        return {
            "shard": number,
            "where": known.get("where", ""),
            "position": known.get("position"),
            "lag_seconds": lag if report is None or report.holds or lag else 0.0,
            "holds": known.get("holds", 0),
            "next_due": known.get("next_due"),
            "published": known.get("published", 0),
            "index_bytes": known.get("index_bytes"),
            "lease": self._plan.batch,
            "is_running": report is not None and not self._query.is_paused,
            "in_work": 0,
            "last_error": None,
        }

    # -- requests ---------------------------------------------------------------------------------

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        """Have shards do something in the next batch; see `ops.pages.Source`."""
        if self._query.is_paused and request.action != "list":
            return {"answers": None, "error": paused().to_dict()}
        if request.action == "list" and not request.aggregate_id and (here := self._list(request)):
            return {"answers": here, "error": None}
        answers: queue.SimpleQueue[dict[int, str]] = queue.SimpleQueue()
        self._waiting[request.id] = request, answers, {}
        self._state.keep(request)
        try:
            found = answers.get(timeout=timeout)
        except queue.Empty:
            self.withdraw(request.id)
            return {"answers": None, "error": None}
        return {"answers": {str(s): answer for s, answer in found.items()}, "error": None}

    def _list(self, request: Request) -> dict[str, str]:
        """What waits, by shard, of indexes that are on this machine; none: they are not."""
        found = {}
        for number in range(self._config.run.shards):
            folder = self._state.query_index(self._publisher.query, number)
            if not (folder / "CURRENT").exists():
                return {}
            found[str(number)] = json.dumps(asdict(glance(folder, request.most, request.about)))
        return found

    def withdraw(self, id: str) -> None:
        """Take back a request that waits."""
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            self._state.withdraw(waiting[0])

    def _answered(self, id_: str, shard: int, answer: str) -> None:
        waiting = self._waiting.get(id_)
        if waiting is None:
            for request in self._state.kept():  # left for this publisher
                if request.id == id_:
                    self._state.withdraw(request)
            return
        request, answers, given = waiting
        given[shard] = answer
        is_of_all = request.action == "list" and not request.aggregate_id
        if len(given) == (self._config.run.shards if is_of_all else 1):
            del self._waiting[id_]
            self._state.withdraw(request)
            answers.put(given)
