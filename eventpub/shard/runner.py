"""One shard's way through its work: fold, read, admit, backtrack, publish, record, report.

A runner relies on nothing in memory: it opens the index and makes the producer, which fences all
older ones, in any process. The process may die at any point: the next runner's fold reads back what
is visible on the topic before it decides anything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from eventpub.channel import Beginning, Comparison, Ended, Lane, Post, Request, Stop, Window, Work
from eventpub.errors import EventpubError, StateError, from_dict, words_of
from eventpub.shard.assignment import Assignment, threads_of
from eventpub.shard.context import PublishingContext
from eventpub.shard.folding import Fold
from eventpub.shard.pace import Prefetch, chunks
from eventpub.shard.step import Step
from eventpub.sink.faults import topic_gone
from eventpub.sink.numbered import require_owner

log = logging.getLogger("eventpub.shard")

_SERVES_EVERY = 60.0
"""Seconds between calls that let an idle producer hand over its log."""

_REPORTS_EVERY = 5.0
"""Seconds between two reports of a long comparison."""

_COMPARES_EVERY = 0.02
"""Seconds between checks for keys of a comparison, while no rows come."""


class Reading:
    """The coordinator's work in order, by `prefetch` or `next`; owns the context's `reader`."""

    def __init__(self, context: PublishingContext) -> None:
        self._context = context
        self._last: Window | None = None
        self._unhandled: deque[Comparison | Request | Stop] = deque()
        self._is_left = False

    @property
    def received(self) -> int:
        """The number of the last window received; 0: none."""
        return 0 if self._last is None else self._last.number

    def prefetch(self) -> AbstractContextManager[Prefetch[Work]]:
        """Everything after the index's position, as far as windows reach.

        A window comes once with each chunk of its rows, and without rows at its end.
        The reading thread owns this object until the block is left. Call `handled` after other
        work.
        """
        self._is_left = False
        return self._context.parts.read_ahead(self._items, self._leave)

    def _leave(self) -> None:
        self._is_left = True
        self._context.lane.wake()

    def handled(self) -> None:
        """Drop the oldest comparison, request or stop, which is done."""
        self._unhandled.popleft()

    def next(self) -> Work:
        """The next work, without reading rows."""
        if self._unhandled:
            return self._unhandled.popleft()
        while (work := self._context.lane.receive()) is None:
            self._context.sink.serve()
        if isinstance(work, Window):
            self._last = work
        return work

    def _items(self) -> Iterator[Work]:
        context = self._context
        # what other runners published before, the fold has read from the topic
        horizon = context.assignment.config.recount.horizon
        known = context.index.position
        after = context.beginning.low - horizon if known is None else known
        after = max(context.assignment.start or 0, after)
        yield from list(self._unhandled)
        # a window received earlier, perhaps while the shard waited
        work: Work | None = self._last
        while True:
            if isinstance(work, Window):
                self._last = work
                for rows in self._window(after, work):
                    yield replace(work, rows=rows)
                yield replace(work, rows=None)
                after = max(after, work.upto)
            elif work is not None:
                self._unhandled.append(work)
                yield work
            # None: no work, or woken, perhaps for a block that was left earlier
            work = context.lane.receive()
            if self._is_left:
                self._keep(work)
                return

    def _keep(self, work: Work | None) -> None:
        """Leave for `next` what came after the last rows were read."""
        if isinstance(work, Window):
            self._last = work
        elif work is not None:
            self._unhandled.append(work)

    def _window(self, after: int, window: Window) -> Iterator[pa.Table]:
        """A window's rows in chunks: those sent along, and those missing before them."""
        rows = window.rows
        if rows is not None and after < window.upto:
            if after < window.after:
                yield from self._read(after, window.after)
            elif after > window.after:
                rows = rows.filter(pc.greater(rows.column("create_time"), pa.scalar(after)))
            if rows.num_rows:
                yield rows
        elif after < window.upto:
            yield from self._read(after, window.upto)

    def _read(self, after: int, upto: int) -> Iterator[pa.Table]:
        context = self._context
        return chunks(context.reader.window(after, upto, context.shard), context.parts.sizes)


def serve(
    assignment: Assignment, number: int, beginning: Beginning, lane: Lane, post: Post
) -> None:
    """Publish one shard until it is to stop, or fails; posts `Ended` last."""
    error: EventpubError | None = _unexpected(number, "its thread was ended")
    try:
        _serve(assignment, number, beginning, lane, post)
        error = None
    except EventpubError as found:
        # without its frames, or the producer would wait in a cycle for a garbage collection
        error = from_dict(found.to_dict())
        if found.code == "run.stopping":
            error = None
        elif found.code == "sink.topic_missing":  # it was there at the start
            error = topic_gone(assignment.config.sink, assignment.partitions)
    except Exception as found:
        log.warning("unexpected error in shard %s", number, exc_info=found)
        error = _unexpected(number, f"{type(found).__name__}: {words_of(found)}")
    finally:
        post(Ended(number, error))


def _unexpected(number: int, what: str) -> StateError:
    return StateError(
        "shard.failed",
        f"unexpected error in shard {number}: {what}",
        suggestion="this is a bug in eventpub; please report it with the traceback, which is in"
        " the log",
        retriable=True,
    )


def _serve(
    assignment: Assignment, number: int, beginning: Beginning, lane: Lane, post: Post
) -> None:
    """Like `serve`; sets a damaged index aside, and starts a new one."""
    damage: str | None = None
    while not lane.is_stopping:
        runner: Runner | None = None
        try:
            with closing(PublishingContext(assignment, number, beginning, lane, post)) as context:
                context.report.rebuilt = damage or context.report.rebuilt
                runner = Runner(context)
                runner.run()
            return
        except StateError as found:
            if found.code != "index.corrupt" or damage is not None:
                raise
            moved_to = assignment.parts.storage.set_aside(assignment.index(number))
            damage = f"{found.message}; it was moved to {moved_to}"
            if runner is not None and runner.has_begun:
                # work received since is lost with it, and is sent again to the next runner
                raise StateError(found.code, damage, where=found.where, retriable=True) from found


class Runner:
    """See the module. `has_begun`: whether it takes work."""

    def __init__(self, context: PublishingContext) -> None:
        config = context.assignment.config
        self._context = context
        self._step = Step(context, self._renew_sink)
        self._comparing = self._step.comparing
        self._reading = Reading(context)
        self._holds_shard = config.gaps.policy == "hold_shard"
        self.has_begun = False
        self._reported_at = float("-inf")

    def run(self) -> None:
        """Run until stopped.

        Raises:
            StoreError, SinkError, StateError: nothing is half done; another runner may continue.
        """
        context = self._context
        try:
            self._begin()
            goes_on = self.has_begun = True
            while goes_on and not context.is_stopping:
                waits = self._holds_shard and bool(context.index.holds)
                goes_on = self._wait_for_holds() if waits else self._read_on()
        finally:
            self._comparing.close()

    def _begin(self) -> None:
        """Fold, and report what the index knows."""
        context = self._context
        known_to = context.index.position
        self._require_owner()
        Fold(context).run()
        report = context.report
        report.read_before = known_to
        report.buckets = context.index.counts.since(context.oldest_bucket())
        self._report()

    def _renew_sink(self) -> None:
        self._context.replace_sink()
        self._require_owner()
        Fold(self._context, is_again=True).run()

    def _require_owner(self) -> None:
        """Raise if a publisher with the engine `spark` has taken over."""
        assignment = self._context.assignment
        config = assignment.config
        if config.sink.delivery == "exactly_once":
            self._context.sink.ready()
            require_owner(assignment.parts.clients, config.app.id, threads_of(assignment.run))

    def _read_on(self) -> bool:
        """Publish windows and do other work; False: stop, True: the shard waits for a hold."""
        context, comparing = self._context, self._comparing
        had_rows = False
        self._step.accounted.forget()
        with self._reading.prefetch() as items:
            while (item := self._next(items)) is not None:
                if isinstance(item, Window):
                    context.window = item
                    if item.rows is None:
                        self._step.end(item.upto, had_rows=had_rows)
                        context.report.done = item.number
                    elif not self._step.rows(item.rows):
                        self._report()
                        return not context.is_stopping
                    had_rows = item.rows is not None
                elif not self._do(item):
                    return False
                else:
                    self._reading.handled()
                comparing.go_on()
                self._report()
                if context.is_stopping:
                    return False
        return False

    def _next(self, items: Prefetch[Work]) -> Work | None:
        """The next item; a comparison continues meanwhile."""
        context, comparing = self._context, self._comparing
        while not items.wait(_COMPARES_EVERY if comparing.is_under_way else _SERVES_EVERY):
            # also during a comparison: a runner silent for a minute counts as stuck
            is_silent = context.parts.clock.monotonic() - self._reported_at > _REPORTS_EVERY
            if comparing.go_on() or (comparing.is_under_way and is_silent):
                self._report()
            context.sink.serve()
        with context.timed("read"):
            return next(items, None)

    def _wait_for_holds(self) -> bool:
        """`hold_shard`: read nothing while anything is held; False: stop, True: nothing is held."""
        context = self._context
        # received windows are read when nothing is held; the next one is for the hold
        context.report.done = max(context.report.done, self._reading.received)
        self._report()
        while context.index.holds and not context.is_stopping:
            work = self._reading.next()
            if isinstance(work, Window):
                context.window = work
                self._step.end(None)
                context.report.done = work.number
            elif not self._do(work):
                return False
            self._comparing.go_on(finish=True)
            self._report()
        return True

    def _do(self, work: Comparison | Request | Stop) -> bool:
        """Handle what is not rows; False: stop."""
        if isinstance(work, Stop):
            return False
        if isinstance(work, Comparison):
            self._comparing.begin(work)
        else:
            self._step.answering.answer(work)
        return True

    def _report(self) -> None:
        self._reported_at = self._context.parts.clock.monotonic()
        self._context.parts.failpoint("before_report")
        self._context.post(self._context.take_report())
