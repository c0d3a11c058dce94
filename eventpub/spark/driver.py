"""The source in Spark's driver: plans batches, and removes what no executor needs.

It runs in one of Spark's processes, so about once a second a note tells the publisher what was seen
of the database (`Observed`). In a user's own job, these lines go to that process's log.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import structlog

from eventpub.channel import Report
from eventpub.coordinator.events import Command, Log
from eventpub.coordinator.progress import Progress
from eventpub.errors import EventpubError, StateError, StoreError
from eventpub.failpoint import failpoint
from eventpub.sources.base import start_position
from eventpub.sources.mysql import EventStore, Layout
from eventpub.spark.journal import Journals, prune
from eventpub.spark.notes import Notes, asked
from eventpub.spark.options import Plan, SourceOptions
from eventpub.spark.place import IDENTITY, Place
from eventpub.spark.planner import Planner
from eventpub.spark.task import Part
from eventpub.state import StateDir
from eventpub.times import Patience

_NOTED_EVERY = 1.0
_SAID_EVERY = 60.0
"""Seconds between warnings that something does not answer."""

_SEEN = ("server", "watermark", "ahead_seconds", "rows_ahead")
_COUNTED = ("rows_in_past", "comparisons", "passed", "without_identity")
"""Fields of `Progress` in a note: current values, and increases since the last note."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Observed:
    """What is seen of the database; `put` takes notes, None in a user's own job."""

    def __init__(self, put: Callable[[dict[str, Any]], None] | None) -> None:
        self.progress = Progress()
        self._put = put
        self._lines: list[tuple[str, str, dict[str, Any]]] = []
        self._checks: dict[str, tuple[str, str]] = {}
        self._counted = dict.fromkeys(_COUNTED, 0)
        self._at = self._said_at = float("-inf")

    @property
    def is_of_publisher(self) -> bool:
        return self._put is not None

    def do(self, command: Command) -> None:
        if isinstance(command, Log):
            if self._put is None:
                getattr(log, command.level)(command.text, **command.facts)
            else:
                self._lines.append((command.level, command.text, dict(command.facts)))

    def decided(self, report: Report) -> None:
        """Log what a user's query does not yield; a publisher's monitor does so itself."""
        if self._put is None:
            for row in report.dead:
                log.warning('row refused; with rows = "all" it is yielded', **row)
            for gap in report.skipped:
                log.warning('gap skipped; with rows = "all" it is yielded', **gap)

    def mark(self, check: str, message: str) -> None:
        """Set a check to "warn" with this message, or to ok if it is empty."""
        self._checks[check] = "warn" if message else "ok", message

    def polled(self, now: float) -> None:
        self._checks |= {"database": ("ok", ""), "boundary": ("ok", "")}
        self._note(now)

    def failed(self, error: EventpubError, now: float) -> None:
        is_of_store = isinstance(error, StoreError)
        failing = ["boundary", *["database"] * is_of_store]
        self._checks |= dict.fromkeys(failing, ("error", f"{error.code}: {error.message}"))
        self._note(now, str(error))
        if self._put is None and now - self._said_at > _SAID_EVERY:
            self._said_at = now
            what = "the database" if is_of_store else "the state's location"
            log.warning(f"waiting for {what}", code=error.code, error=error.message)

    def _note(self, now: float, error: str | None = None) -> None:
        if self._put is None or (now - self._at < _NOTED_EVERY and not self._lines):
            return
        before = self._counted
        self._counted = {name: getattr(self.progress, name) for name in _COUNTED}
        seen = {name: getattr(self.progress, name) for name in _SEEN}
        if not self.progress.server:
            del seen["server"]
        note = {
            "lines": self._lines,
            "checks": self._checks,
            "seen": seen,
            "error": error,
            "counted": {name: count - before[name] for name, count in self._counted.items()},
        }
        self._lines, self._at = [], now
        self._put(note)


_PRUNED_EVERY = 60.0
_PAUSE = 0.5
"""Seconds before planning again after an outage, however long."""

T = TypeVar("T")

Offset = dict[str, Any]


class Driver:
    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._until: int | None = None
        self._planner: Planner | None = None
        self._begun = 0
        self._pruned_at = float("-inf")
        self._state: StateDir | None = None
        if options.publisher is not None:
            self._state = StateDir(options.config.app.state_dir)
        self._observed = Observed(None if self._state is None else Notes(self._state).put)

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def _waited(self, do: Callable[[], T]) -> T:
        """Retry while database or state location is away: an error would end the query."""
        patience = Patience("planning a batch")
        while True:
            try:
                return do()
            except (StoreError, StateError) as error:
                if not error.retriable:
                    raise
                self._failed(error)
                patience.wait(error)

    def _failed(self, error: EventpubError) -> None:
        if self._planner is not None:
            self._planner.reconnect()
        self._observed.failed(error, time.monotonic())

    def initial(self) -> Offset:
        config, publisher = self.options.config, self.options.publisher
        if publisher is not None:
            return publisher.initial.to_offset()
        start = self._waited(lambda: self._asked(lambda s: start_position(config.read, s.now)))
        return Plan(secrets.token_hex(8), start=start or None, upto=start).to_offset()

    def end_now(self) -> None:
        """Read nothing created from now on."""
        self._until = self._waited(lambda: self._asked(EventStore.now))

    def _asked(self, ask: Callable[[EventStore], T]) -> T:
        with EventStore(self.options.config.store, self._layout) as store:
            return ask(store)

    def latest(self, start: Offset) -> Offset:
        """The next batch; `start` if there is nothing to do, or during an outage."""
        last = Plan.from_offset(start)
        # or the run would end; and Spark begins with a batch, even from where it stands
        if self._until is not None or not last.batch:
            plan = self._waited(lambda: self._next(last))
        else:
            try:
                plan = self._next(last)
            except (StoreError, StateError) as error:
                if not error.retriable:
                    raise
                self._failed(error)
                time.sleep(_PAUSE)
                return start
        if plan is None:
            return start
        failpoint("after_plan")
        self._begun = plan.batch
        return plan.to_offset()

    def _next(self, last: Plan) -> Plan | None:
        if self._planner is None:
            options, place, state = self.options, Place(self.options.state), self._state
            _require_own(options, place, last)
            self._planner = Planner(
                options.config,
                self._layout,
                options.partitions,
                Journals(place, last.query),
                options.most_rows,
                until=self._until,
                requests=lambda: [] if state is None else asked(state),
                observed=self._observed,
            )
        return self._planner.next(last, is_ours=last.batch == self._begun)

    def reported(self) -> Offset | None:
        polled = None if self._planner is None else self._planner.polled
        return None if polled is None else Plan("", upto=polled.upper).to_offset()

    def parts(self, end: Offset) -> list[Part]:
        """One task per shard; raises state.foreign if a repeated batch had other options."""
        plan = Plan.from_offset(end)
        layout = self._waited(lambda: self._layout_for(plan))
        has_end = self._until is not None
        return [Part(plan, n, layout, has_end) for n in range(self.options.config.run.shards)]

    def _layout_for(self, plan: Plan) -> Layout:
        if self._planner is not None:
            return self._planner.layout
        _require_own(self.options, Place(self.options.state), plan)
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        """As found first; the planner compares the table with it."""
        return EventStore.discover(self.options.config.store)

    def committed(self, end: Offset) -> None:
        if time.monotonic() - self._pruned_at < _PRUNED_EVERY:
            return
        self._pruned_at = time.monotonic()
        plan = Plan.from_offset(end)
        try:
            shards = self.options.config.run.shards
            prune(Place(self.options.state), plan.query, plan.batch, shards)
        except StateError as error:
            log.warning(
                "old journals could not be removed; trying again in a minute", error=str(error)
            )


def parts_of_time(options: SourceOptions) -> list[Part]:
    """One task per shard of a batch read, all with the same end."""
    config = options.config
    layout = EventStore.discover(config.store)
    with EventStore(config.store, layout) as store:
        until = store.now() - config.read.delay if options.to is None else options.to
    plan = Plan("", begin=options.from_ - 1, upto=until)
    return [Part(plan, n, layout) for n in range(config.run.shards)]


def _require_own(options: SourceOptions, place: Place, plan: Plan) -> None:
    """Check that the state belongs to this table and these shards; a new query creates it."""
    name, identity = f"{plan.query}/{IDENTITY}", options.identity
    found = place.read(name)
    if found is None:
        if plan.batch:
            raise Journals(place, plan.query).missing(plan.batch)
        place.require_exclusive(plan.query)
        if place.create(name, json.dumps(identity).encode()):
            return
        found = place.read(name)
    theirs: dict[str, Any] = json.loads(found or b"{}")
    different = [key for key in identity if theirs.get(key) != identity[key]]
    if different:  # `partitions` defaults to `shards`
        key = "shards" if "shards" in different else different[0]
        raise StateError(
            "state.foreign",
            f"the checkpoint and its state belong to {key} {theirs.get(key)!r}, but the option is"
            f" {identity[key]!r}",
            where=f"{place.location}/{name}",
            suggestion=f"restore the former {key}; or use a new checkpoint, which reads the table"
            " from read.start",
        )
