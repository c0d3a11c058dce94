"""Status and progress of a query, from its batches' journals."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import structlog

from eventpub.channel import Ended, Lane, PartitionId, Report, Request
from eventpub.coordinator import events as e
from eventpub.coordinator.shards import Shard
from eventpub.coordinator.status import Overview, status
from eventpub.errors import EventpubError, StateError
from eventpub.publisher.prepare import Prepared
from eventpub.publisher.publisher import CommandRunner
from eventpub.publisher.workers import BrokerWork
from eventpub.sink.layout import tail_gone
from eventpub.sink.markers import place_of, unnoticed_for
from eventpub.sink.missing_markers import is_held_by
from eventpub.sink.numbered import NumberedSink, markers_of
from eventpub.sink.topics import hanging, list_offsets, partition_counts, visible_ends
from eventpub.spark.checkpoint import last_committed
from eventpub.spark.journal import Journals
from eventpub.spark.notes import Notes, leave, listed
from eventpub.spark.options import Plan, Publisher
from eventpub.spark.place import Place
from eventpub.state import StateDir

_TIMEOUT = 2.0
"""Seconds."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Monitor(Overview):
    """The publisher's side of a query; a shard's runner is the query itself."""

    where = "Spark"
    gives_up = False  # a batch answers with the error

    def __init__(self, state: StateDir, prepared: Prepared, publisher: Publisher) -> None:
        super().__init__(prepared.assignment.config, prepared.start_state, self._execute)
        self._state, self._prepared, self._publisher = state, prepared, publisher
        self._layout = prepared.assignment.layout
        place = Place(publisher.location)
        self._journals = Journals(place, publisher.query)
        self._plan: Plan = publisher.initial
        self._seen = last_committed(place, publisher.query)  # not counted again
        self._left: list[Request] = []
        leave(state, [])
        self._notes = Notes(state)
        self._published_how: dict[tuple[int, int], dict[str, Any]] = {}
        self.has_query = False
        self._well_since: float | None = None
        self._events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self._watch = TopicWatch(prepared, self._published, lambda: self._seen)
        self.runner = CommandRunner(
            state,
            prepared,
            self._document,
            self._events.put,
            check_broker=self._watch.do,
            answer=self._listed,
        )
        self._watch.may_hide(self._seen, prepared.start_state.low + 1)
        self._stand_at(self._seen)
        self.see(e.Tick(), time.monotonic())
        self.runner.keep_status()

    def _published(self) -> dict[int, int]:
        return {n: int(shard["published"]) for n, shard in [*self.progress.per_shard.items()]}

    def in_work(self, _: Shard) -> int:
        """A paused query that is not stopped yet may publish its batch."""
        return int(self.is_paused and self.has_query)

    def _execute(self, command: e.Command) -> None:
        self.runner.do(command)

    # -- what happens -----------------------------------------------------------------------------

    def started(self, session: Any) -> None:
        address = session.sparkContext.uiWebUrl or ""
        if address != self.progress.spark_ui:
            log.info("Spark's pages", address=address)
        self.progress.spark_ui = address
        for shard in self.shards:
            shard.begin(Lane())  # whose requests are left for the planner
            shard.has_begun = True
        self.remember()

    def look(self, last: Any, now: float) -> EventpubError | None:
        """Process new batches and events; returns the topic's error, if any.

        `last`: the query's last progress, None without one.
        """
        self.see(e.Tick(), now)
        self._take_notes(now)
        if last is not None:
            with suppress(Exception):  # a location that is away: tasks report it
                self._take(last, now)
        self._observe_all(now)
        self.requests.send(is_paused=self.is_paused)
        if (requests := self.requests.take_back()) != self._left:
            self._left = requests if leave(self._state, requests) else []
        if self.schedule.is_second(now):
            self.rate.add(now, self.progress.published)
        for command in self.schedule.due(now, 0, self.progress.position, {}, self.shards):
            self._execute(command)
        return self._watch.error

    def _take(self, last: Any, now: float) -> None:
        offset = last.sources[0].endOffset
        plan = Plan.from_offset(json.loads(offset) if isinstance(offset, str) else offset)
        self._take_upto(plan.batch, now)
        if plan.batch > self._plan.batch:
            self._plan = plan
            self._well_since = self._well_since or now
            self.remember()

    def _take_upto(self, newest: int, now: float) -> None:
        for batch in range(self._seen + 1, newest + 1):
            self._take_notes(now)  # for rows that the broker has refused
            for report in self._heads(batch):
                self._reported(batch, report, now)
            self._seen = batch

    def _heads(self, batch: int) -> list[Report]:
        heads = (self._journals.head(batch, shard.number) for shard in self.shards)
        return [head["report"] for head in heads if head is not None]

    def _stand_at(self, batch: int) -> None:
        """Begin after a batch of a former process."""
        heads: list[Report] = []
        with suppress(StateError):  # a new checkpoint replaces it: the query meets the error, too
            heads = self._heads(batch)
        for report in heads:
            self.shards[report.shard].report = report
            for request_id, answer in report.answers.items():
                self.requests.answered(request_id, report.shard, answer)
            self.durable.take(self.shards, report, None)
            self._watch.may_hide(batch, report.oldest)
            is_there = {n: getattr(report, n) for n in ("position", "low", "holds", "next_due")}
            self.progress.add(Report(report.shard, **is_there), self.where)
        self.progress.position = self.durable.position

    def ended(self) -> None:
        """The query has ended by itself, so every batch is committed."""
        self._take_upto(self._journals.newest(), time.monotonic())
        self._watch.measure()
        self.remember()
        self._observe_all(time.monotonic())

    def settle(self) -> None:
        """The query was stopped: markers on the topic tell whether its last batch was published."""
        newest, shards = self._journals.newest(), range(len(self.shards))
        heads = [self._journals.head(newest, n) for n in shards] if newest else [None]
        if newest > self._plan.batch and None not in heads:
            with_rows = {n for n, head in zip(shards, heads, strict=True) if head and head["rows"]}
            assignment = self._prepared.assignment
            sink = NumberedSink(assignment.parts.clients, assignment.config.app.id)
            if with_rows <= sink.published_tasks(self._publisher.query, newest - 1):
                self._take_upto(newest, time.monotonic())
        self._watch.measure()
        self.remember()
        self._observe_all(time.monotonic())

    def _take_notes(self, now: float) -> None:
        for note in self._notes.take():
            for shard, how in note.get("published", {}).items():
                self._published_how[int(note["batch"]) + 1, int(shard)] = how
            self.progress.last_error = note.get("error") or self.progress.last_error
            for level, text, facts in note.get("lines", ()):
                getattr(log, level)(text, **facts)
            for name, value in note.get("seen", {}).items():
                setattr(self.progress, name, value)
            for name, more in note.get("counted", {}).items():
                setattr(self.progress, name, getattr(self.progress, name) + more)
            for name, (state, message) in note.get("checks", {}).items():
                self.health.set(name, state, message, now)
                if (name, state) == ("boundary", "ok") and not self.progress.lag_seconds:
                    self._well_since = self._well_since or now  # nothing is due

    def _reported(self, batch: int, report: Report, now: float) -> None:
        how = self._published_how.pop((batch, report.shard), {})  # a journal is written before
        refused = how.pop("refused", ())
        report = replace(report, seconds=report.seconds | how.pop("seconds", {}), **how)
        if refused:
            dead = [
                dict(zip(("aggregate_id", "version", "reason"), r, strict=True)) for r in refused
            ]
            answers = {
                id_: "refused again" if self._is_of(id_, refused, answer) else answer
                for id_, answer in report.answers.items()
            }
            published, dead = report.published - len(refused), [*report.dead, *dead]
            report = replace(report, published=published, dead=dead, answers=answers)
        self._watch.may_hide(batch, report.oldest)
        self.shards[report.shard].take_report(report)
        self.see(report, now)
        self.account(report, None, now)
        if report.published and not self._watch.ends:
            # without known ends, a lost topic would be recreated
            self.schedule.hasten(e.CheckTopic, now)

    def _is_of(self, id_: str, refused: list[tuple[str, int, str]], answer: str) -> bool:
        """Whether the row that a request has published is among the refused ones."""
        request = self.requests.get(id_)
        if request is None or answer != "published":
            return False
        return any((request.aggregate_id, request.version) == (a, v) for a, v, _ in refused)

    def _observe_all(self, now: float) -> None:
        while not self._events.empty():
            self._observe(self._events.get(), now)

    def _observe(self, event: e.Event, now: float) -> None:
        self.see(event, now)
        if isinstance(event, e.Done):
            self._done(event.command, event.result, now)
        elif isinstance(event, e.Failed):
            self.progress.last_error = str(event.error)
            if isinstance(event.command, e.CheckTopic):
                self._watch.error = event.error
        elif isinstance(event, e.PauseAsked):
            self.take_pause(event)

    def _done(self, command: e.Command, found: Any, now: float) -> None:
        if isinstance(command, e.MeasureLag):
            self.progress.time = found.upper + self._prepared.assignment.config.read.delay
            self.polled_at = now
            # the planner is not asked during a batch, nor while paused
            if self.is_paused or not self.health.is_away("boundary"):
                self.health.set("boundary", "ok", "", now)
        elif isinstance(command, e.CheckTopic):
            self._watch.error = None
            self.remember()
        elif isinstance(command, e.CheckTable) and found.layout != self._layout:
            self._layout = found.layout
            self.runner.do(e.Reassign(found.layout))

    def failed(self, error: EventpubError, now: float) -> None:
        self._take_notes(now)
        self._well_since = None
        self.progress.last_error = str(error)
        for shard in self.shards:
            self.see(Ended(shard.number, error), now)
            shard.end()
        if error.code.startswith("store."):
            self.health.set("boundary", "error", f"{error.code}: {error.message}", now)

    def well_for(self, now: float) -> float:
        """Seconds since the first batch after the last failure; 0: none yet."""
        return 0.0 if self._well_since is None else now - self._well_since

    # -- what is written down ---------------------------------------------------------------------

    def remember(self) -> None:
        plan = self._plan
        if self._seen:  # a new checkpoint's first batch has read them
            self.durable.take_over_former()
        begin, self.durable.acknowledged = self._prepared.start_state, dict(self._watch.ends)
        hidden_since = plan.unpublished_since if plan.batch else begin.hidden_since
        newest = plan.newest or begin.newest
        low = min([self.durable.low, *self._watch.lowest_hidden()])
        where = {"engine": "spark", "query": plan.query, "batch": self._seen, "low": low}
        self.write(hidden_since, newest, **where)

    def _document(self) -> dict[str, Any]:
        shown = {"engine": "spark", "spark_ui": self.progress.spark_ui}
        return status(self, time.monotonic()) | shown

    def _listed(self, request: Request) -> dict[str, str] | None:
        """A list's answers from indexes on this machine, also while the query is paused."""
        if request.action == "list":
            numbers, query = range(len(self.shards)), self._publisher.query
            folders = [self._state.query_index(query, n) for n in numbers]
            with suppress(EventpubError):
                if here := listed(folders, self._seen, request):
                    return {str(n): json.dumps(asdict(here[n])) for n in numbers}
        return None


class TopicWatch:
    """Watches the topics' ends and health; used by one thread.

    Spark's tasks do not report offsets; from the ends the next start knows whether records were
    lost. Records between two ends are checked where this publisher has written nothing, and in one
    more partition in turn. A transaction of ours left open hides what was published after it.

    `published` returns the number of events that each shard has published, `taken` the last batch
    known to be committed; consumers see everything of those up to `visible_upto`.
    """

    error: EventpubError | None = None

    def __init__(
        self,
        prepared: Prepared,
        published: Callable[[], dict[int, int]],
        taken: Callable[[], int],
    ) -> None:
        assignment = prepared.assignment
        self._config, self._clients = assignment.config, assignment.parts.clients
        self._work = BrokerWork(assignment, prepared.topics)
        self._published, self._taken = published, taken
        self.visible_upto = -1
        self._hidden: list[tuple[int, int]] = []
        self._awaited: tuple[int, Mapping[PartitionId, int]] = -1, {}
        self._before: dict[int, int] = {}
        self._turn = 0
        self._held: dict[PartitionId, tuple[int, float]] = {}
        self.ends: Mapping[PartitionId, int] = dict(prepared.start_state.acknowledged)

    def do(self, command: e.Command) -> None:
        """Do `CheckTopic` for the partitions due; also raises sink.hanging_transaction."""
        del command
        published, self._before = self._before, self._published()
        ours = [place for place in self.ends if place[0] == self._config.sink.topic]
        quiet = {n for n, count in self._before.items() if published.get(n) == count}
        looked_at = {p for p in ours if p[1] % self._config.run.shards in quiet}
        if ours:
            self._turn = (self._turn + 1) % len(ours)
            looked_at.add(ours[self._turn])
        self._work.do(e.CheckTopic({place: self.ends[place] for place in looked_at}))
        self._require_none_left_open(*self._measure(), time.monotonic())

    def may_hide(self, batch: int, oldest: int | None) -> None:
        """Consumers may not see this batch yet; `oldest`: its oldest event's time, µs, if any."""
        if oldest is not None:
            self._hidden.append((batch, oldest - 1))

    def lowest_hidden(self) -> list[int]:
        """Of each batch that may be hidden, a time, µs, before all of its events."""
        self._hidden = [(batch, low) for batch, low in self._hidden if batch > self.visible_upto]
        return [low for _, low in self._hidden]

    def measure(self) -> None:
        with suppress(EventpubError):
            self._measure()

    def _measure(self) -> tuple[dict[PartitionId, int], dict[PartitionId, int]]:
        """Ends that readers can reach, and those of the log; also of the markers' partition."""
        taken, clients = self._taken(), self._clients
        sink, markers = self._config.sink, markers_of(self._config.sink)
        counts = partition_counts(self._clients, _TIMEOUT)
        places = [(t, n) for t in sink.topics for n in range(counts.get(t, 0))]
        if markers in counts:
            places.append(place_of(markers, self._config.app.id, counts[markers]))
        found = visible_ends(self._clients, places, _TIMEOUT)
        optional = frozenset(sink.topics)
        highs = list_offsets(clients, [*found], "latest", optional=optional, timeout=_TIMEOUT)
        for place, end in self.ends.items():
            if place[0] == sink.topic and highs.get(place, end) < end - 1:  # 1: a missing marker
                raise tail_gone(clients, place, end, highs[place])
        self.ends = {place: end for place, end in found.items() if end and place[0] != markers}
        for batch, ends in (self._awaited, (taken, highs)):
            if all(found.get(place, end) >= end for place, end in ends.items()):
                self.visible_upto, self._awaited = max(batch, self.visible_upto), (taken, highs)
        return found, highs

    def _require_none_left_open(
        self, stable: Mapping[PartitionId, int], highs: Mapping[PartitionId, int], now: float
    ) -> None:
        sink, app_id, clients = self._config.sink, self._config.app.id, self._clients
        before, self._held = self._held, {}
        for place, end in highs.items():
            if (at := stable[place]) < end:
                same = before.get(place)
                self._held[place] = same if same is not None and same[0] == at else (at, now)
        for place, (at, since) in self._held.items():
            is_over = now - since > unnoticed_for(sink)  # no transaction may last this long
            if is_over and is_held_by(clients, app_id, place, at, highs[place]):
                raise hanging(sink, place, at, highs[place], now - since)
