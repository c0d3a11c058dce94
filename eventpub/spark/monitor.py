"""Status and progress of a query, from its batches' journals."""

from __future__ import annotations

import json
import queue
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import structlog

from eventpub.channel import Report, Request
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator.health import SILENT_AFTER, STALLED_AFTER, NamedChecks, State, paused
from eventpub.coordinator.progress import Progress, Rate, ReportLog, ShownLag
from eventpub.coordinator.status import document, unanswered
from eventpub.errors import EventpubError
from eventpub.publisher.prepare import Prepared
from eventpub.publisher.publisher import StatusFile
from eventpub.publisher.workers import ChecksWork, Worker
from eventpub.sink.numbered import NumberedSink
from eventpub.spark.checkpoint import TopicWatch
from eventpub.spark.journal import Journals
from eventpub.spark.notes import Notes, Requests
from eventpub.spark.options import Publisher
from eventpub.spark.place import Place
from eventpub.spark.plan import Plan
from eventpub.state import StateDir

_LAG_EVERY, _BROKER_EVERY = 1.0, 5.0
_LIMITS = {"database": SILENT_AFTER, "boundary": 2 * SILENT_AFTER}

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Pausable(Protocol):
    @property
    def is_paused(self) -> bool:
        """Whether nothing is published for now."""

    @property
    def paused_by(self) -> str:
        """Who has paused it, and when."""


class Monitor:
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
        place = Place(publisher.location)
        self._journals = Journals(place, publisher.query)
        self._plan: Plan = publisher.initial
        self._reports: dict[int, Report] = {}
        self._seen = _committed(place, publisher.query)  # not counted again
        self.progress = Progress(server=prepared.start_state.server)
        begin = prepared.start_state
        self.progress.position = begin.start if begin.position is None else begin.position
        self._stand_at(self._seen)
        self._rate = Rate()
        self._log = ReportLog(config)
        self._requests = Requests(config, state, publisher.query)
        self._notes = Notes(state)
        self._refused: dict[tuple[int, int], list[tuple[str, int, str]]] = {}
        self._is_away = self._is_placed = False
        self._sampled_by = prepared.assignment.layout.sampled_by
        self._active_at: float | None = None
        self._of_topic: EventpubError | None = None
        self._well_since: float | None = None
        now = time.monotonic()
        self._checks = NamedChecks(self._shards, now)
        self._lag = ShownLag(self.progress)
        self._lag.begin(now)
        self._file = StatusFile(config, state, begin.run)
        self._events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self._checks_work = checks = ChecksWork(prepared.assignment)
        self._watch = TopicWatch(prepared, self._published)
        self._lag_work = Worker("eventpub-lag", checks.do, self._events.put, checks.close)
        self._broker_work = Worker("eventpub-broker", self._watch.do, self._events.put)
        self._due = {"lag": 0.0, "broker": 0.0}
        self._remembered: dict[str, Any] = {}
        self._document = self._made(now)

    @property
    def _shards(self) -> list[str]:
        return [f"shard {number}" for number in range(self._config.run.shards)]

    def _published(self) -> dict[int, int]:
        return {n: int(shard["published"]) for n, shard in [*self.progress.per_shard.items()]}

    def close(self) -> None:
        self._lag_work.end(0.3)
        self._broker_work.end(0.3)

    # -- what happens -----------------------------------------------------------------------------

    def started(self, session: Any) -> None:
        address = session.sparkContext.uiWebUrl or ""
        if address != self.progress.spark_ui:
            log.info("Spark's pages", address=address)
        self.progress.spark_ui = address
        self.remember()

    def look(self, query: Any, now: float) -> EventpubError | None:
        """Process new batches and events; returns the topic's error, if any."""
        self._take_notes(now)
        if query is not None:
            with suppress(Exception):  # if Spark is gone, the owner notices
                self._take(query, now)
        while not self._events.empty():
            self._observe(self._events.get(), now)
        if now >= self._due["lag"]:
            self._due["lag"] = now + _LAG_EVERY
            self._lag_work.put(e.MeasureLag(self.progress.position, self.progress.rows_read))
        if now >= self._due["broker"]:
            self._due["broker"] = now + _BROKER_EVERY
            self._broker_work.put(e.CheckTopic({}))
        return self._of_topic

    def _take(self, query: Any, now: float) -> None:
        last = query.lastProgress
        if last is None:
            return
        if not self._is_away:
            self._mark("boundary", "ok", "", now)
        offset = last.sources[0].endOffset
        plan = Plan.from_offset(json.loads(offset) if isinstance(offset, str) else offset)
        self._take_upto(plan.batch, now)
        if plan.batch > self._plan.batch:
            self._stand_at(plan.batch)
            self._plan = plan
            self._well_since = self._well_since or now
            self._mark("publishing", "ok", "", now)
            self._mark("index", "ok", "", now)
            self.remember()

    def _take_upto(self, newest: int, now: float) -> None:
        for batch in range(self._seen + 1, newest + 1):
            self._take_notes(now)  # for rows that the broker has refused
            for report in self._heads(batch):
                self._reported(batch, report, now)
            self._seen = batch

    def _heads(self, batch: int) -> list[Report]:
        heads = (self._journals.head(batch, n) for n in range(self._config.run.shards))
        return [head["report"] for head in heads if head is not None]

    def _stand_at(self, batch: int) -> None:
        for report in self._heads(batch):
            self._reports[report.shard] = report
            if report.shard not in self.progress.per_shard:  # a former process's: nothing new
                is_there = {n: getattr(report, n) for n in ("position", "low", "holds", "next_due")}
                self.progress.add(Report(report.shard, **is_there), "Spark")
        if len(self._reports) == self._config.run.shards:
            self.progress.position = min(r.position for r in self._reports.values())

    def ended(self) -> None:
        """The query has ended by itself, so every batch is committed."""
        newest = self._journals.newest()
        self._take_upto(newest, time.monotonic())
        self._stand_at(newest)
        self._watch.measure()
        self.remember()

    def settle(self) -> None:
        """The query was stopped: markers on the topic tell whether its last batch was published."""
        newest, shards = self._journals.newest(), range(self._config.run.shards)
        heads = [self._journals.head(newest, n) for n in shards] if newest else [None]
        if newest <= self._plan.batch or None in heads:
            return
        with_rows = {n for n, head in zip(shards, heads, strict=True) if head and head["rows"]}
        sink = NumberedSink(self._prepared.assignment.parts.clients, self._config.app.id)
        if with_rows <= sink.published_tasks(self._publisher.query, newest - 1):
            self._take_upto(newest, time.monotonic())
            self._stand_at(newest)
            self.remember()

    def _take_notes(self, now: float) -> None:
        for note in self._notes.take():
            self._noted(note, now)

    def _noted(self, note: dict[str, Any], now: float) -> None:
        for shard, refused in note.get("refused", {}).items():
            self._refused[int(note["batch"]) + 1, int(shard)] = refused
        if note.get("altered"):
            self._lag_work.put(e.CheckTable())
        self.progress.last_error = note.get("error") or self.progress.last_error
        for level, text, facts in note.get("lines", ()):
            getattr(log, level)(text, **facts)
        for name, value in note.get("seen", {}).items():
            setattr(self.progress, name, value)
        for name, more in note.get("counted", {}).items():
            setattr(self.progress, name, getattr(self.progress, name) + more)
        for name, (state, message) in note.get("checks", {}).items():
            self._mark(name, state, message, now)
            if name == "boundary":
                self._is_away = state == "error"
                self._active_at = self._active_at if self._is_away else now
                if not (self._is_away or self.progress.lag_seconds):  # nothing is due
                    self._well_since = self._well_since or now

    def _reported(self, batch: int, report: Report, now: float) -> None:
        refused = self._refused.pop((batch, report.shard), [])
        if refused:  # by the broker: the journal does not know
            dead = [
                dict(zip(("aggregate_id", "version", "reason"), r, strict=True)) for r in refused
            ]
            published = report.published - len(refused)
            report = replace(report, published=published, dead=[*report.dead, *dead])
        self.progress.add(report, "Spark")
        self._is_placed = self._is_placed or report.is_placed
        if report.published and not self._watch.ends:
            self._due["broker"] = now  # without known ends, a lost topic would be recreated
        self._rate.add(now, self.progress.published)
        self._mark(f"shard {report.shard}", "ok", "", now)
        for line in self._log.lines(report, self.progress, now):
            getattr(log, line.level)(line.text, **line.facts)
        for id_, answer in report.answers.items():
            is_refused = any(self._requests.is_to_publish(id_, a, v) for a, v, _ in refused)
            is_refused = is_refused and answer == "published"
            self._requests.answered(id_, report.shard, "refused again" if is_refused else answer)

    def _observe(self, event: e.Event, now: float) -> None:
        if isinstance(event, e.LagMeasured):
            self._mark("database", "ok", "", now)
            self._lag.measured(event, self.progress.position, now)
            self.progress.time = event.upper + self._config.read.delay
        elif isinstance(event, e.TopicChecked):
            self._of_topic = None
            self._mark("broker", "ok", "", now)
            self.remember()
        elif isinstance(event, e.TableChecked):
            self._checks_work.use(replace(self._prepared.assignment, layout=event.layout))
            self._sampled_by = event.layout.sampled_by
        elif isinstance(event, e.Failed):
            is_of_lag = isinstance(event.command, e.MeasureLag)
            if is_of_lag and event.error.code in {"store.index_missing", "store.column_missing"}:
                self._lag_work.put(e.CheckTable())
            is_of_topic = isinstance(event.command, e.CheckTopic)
            self._of_topic = event.error if is_of_topic else self._of_topic
            self.progress.last_error = str(event.error)
            name = "broker" if is_of_topic else "database"
            self._mark(name, "error", f"{event.error.code}: {event.error.message}", now)

    def failed(self, error: EventpubError, now: float) -> None:
        self._take_notes(now)
        self._well_since = None
        self.progress.last_error = str(error)
        text = f"{error.code}: {error.message}"
        self._mark("publishing", "error", text, now)
        if error.code.startswith("store."):
            self._is_away = True
            self._mark("boundary", "error", text, now)

    def well_for(self, now: float) -> float:
        """Seconds since the first batch after the last failure; 0: none yet."""
        return 0.0 if self._well_since is None else now - self._well_since

    def _mark(self, name: str, state: State, message: str, now: float) -> None:
        self._checks.set(name, state, message, now)
        for recovered, seconds in self._checks.take_recovered():
            log.info(f"{recovered}: ok again after {seconds:.0f} s")

    # -- what is written down ---------------------------------------------------------------------

    def remember(self) -> None:
        begin, reports = self._prepared.start_state, [*self._reports.values()]
        is_whole = len(reports) == self._config.run.shards
        start = begin.start if begin.position is None else begin.position
        newest = self._plan.newest or begin.newest
        unpublished_since = self._plan.unpublished_since
        what = begin.document(
            self.progress,
            position=min(r.position for r in reports) if is_whole else start,
            low=min(r.low for r in reports) if is_whole else begin.low,
            hidden_since=unpublished_since if self._plan.batch else begin.hidden_since,
            newest=newest and [*newest, self._sampled_by],
            ends=self._watch.ends,
            shards=self._config.run.shards,
            placed=begin.is_placed or self._is_placed,
            engine="spark",
            query=self._publisher.query,
            is_paused=self._query.is_paused,
            paused_by=self._query.paused_by,
        )
        if what != self._remembered:
            with suppress(EventpubError):
                self._state.write(self._state.progress_file, what, lasting=True)
                self._remembered = what

    def show(
        self, now: float, *, error: EventpubError | None = None, is_over: bool = False
    ) -> dict[str, Any]:
        """The status; written to its file if it has changed or is old."""
        found = self._document = self._made(now)
        self._file.keep(found, error, is_over=is_over)
        return found

    def status(self) -> dict[str, Any]:
        """The status of the last second; thread-safe."""
        return unanswered(self._document, self._document["at"], time.time())

    def _made(self, now: float) -> dict[str, Any]:
        progress, is_paused = self.progress, self._query.is_paused
        checks, publishing = self._checks.now(now, _LIMITS), self._checks["publishing"]
        if is_paused:
            text = paused(self._query.paused_by)
            checks["publishing"] = replace(publishing, state="warn", message=text, since=now)
        elif publishing.state == "ok" and progress.lag_seconds > STALLED_AFTER:
            text = f"events are due for {progress.lag_seconds:.0f} s"
            checks["publishing"] = replace(publishing, state="error", message=text, since=now)
        reports = self._reports
        low = min((report.low for report in reports.values()), default=progress.position)
        lag = round(self._lag.seconds(low, now), 3)
        shards: list[dict[str, Any]] = []
        for number in range(self._config.run.shards):
            report = reports.get(number)
            shards.append(
                {
                    "lag_seconds": lag if report is None or report.holds or lag else 0.0,
                    "is_running": report is not None and not is_paused,
                    "in_work": 0,
                    "last_error": None,
                }
            )
        found = document(self._lag, self._rate, low, checks=checks.values(), shards=shards, now=now)
        return {
            **self._file.identity,
            **found,
            "engine": "spark",
            "spark_ui": progress.spark_ui,
            "state": "paused" if is_paused else "running" if reports else "starting",
            "is_paused": is_paused,
            "paused_by": self._query.paused_by,
            "is_alive": True,
            "poll_age_seconds": (
                None if self._active_at is None else round(now - self._active_at, 3)
            ),
        }

    # -- requests ---------------------------------------------------------------------------------

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        return self._requests.ask(request, timeout, is_paused=self._query.is_paused)

    def withdraw(self, id: str) -> None:
        self._requests.withdraw(id)


def _committed(place: Place, query: str) -> int:
    """The last batch that Spark has committed; 0: none."""
    names = (name.rpartition("/")[2] for name in place.names(f"checkpoint/{query}/commits"))
    return max((int(name) + 1 for name in names if name.isdigit()), default=0)
