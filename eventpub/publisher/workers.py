"""Worker threads: boundary polls, and checks of database and broker. None blocks another."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from eventpub.admission.model import window_of
from eventpub.coordinator import events as e
from eventpub.coordinator.boundary import Boundary, PollResult
from eventpub.coordinator.database_changes import MOST, SAMPLE
from eventpub.errors import EventpubError, StateError, words_of
from eventpub.shard.assignment import Assignment
from eventpub.sink.faults import topic_gone
from eventpub.sink.layout import check_written
from eventpub.sink.reading import check_between
from eventpub.sink.topics import open_below, topic_ids, visible_ends

_TIMEOUT = 2.0
"""Seconds for a periodic request to the broker."""

MOST_EVENTS = 20_000
"""Most unread events counted: once a second, counting 100,000 costs the database a fifth of
reading them."""

Post = Callable[[e.Event], None]
T = TypeVar("T")


def in_thread(do: Callable[[], T], name: str | None = None) -> Future[T]:
    """Do it in a thread that does not keep the process from ending."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(do())
        except BaseException as error:  # raised where the result is taken
            outcome.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return outcome


class Worker:
    """A thread that executes commands in order, and posts `Done` or `Failed` for each."""

    def __init__(
        self,
        name: str,
        do: Callable[[e.Command], Any],
        post: Post,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._do = do
        self._post = post
        self._close = close
        self._commands: queue.SimpleQueue[e.Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, command: e.Command) -> None:
        self._commands.put(command)

    def end(self) -> threading.Thread:
        """End after the current command; returns its thread."""
        self._commands.put(None)
        return self._thread

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            outcome: e.Event
            try:
                outcome = e.Done(command, self._do(command))
            except EventpubError as error:
                outcome = e.Failed(command, error)
            except Exception as error:
                outcome = e.Failed(command, unexpected(command, error))
            self._post(outcome)
            if isinstance(outcome, e.Failed):
                gc.collect()  # clients that failed refer to their own errors
        with suppress(EventpubError):
            self._close()


def end_all(workers: Sequence[Worker], timeout: float) -> None:
    """End workers after their current commands; wait at most `timeout` s for all."""
    deadline = time.monotonic() + timeout
    for thread in [worker.end() for worker in workers]:
        thread.join(max(0.0, deadline - time.monotonic()))


def unexpected(command: e.Command, error: Exception) -> StateError:
    return StateError(
        "coordinator.failed",
        f"unexpected error in {type(command).__name__}: {type(error).__name__}: {words_of(error)}",
        suggestion="this is a bug in eventpub, please report it; retrying",
        retriable=True,
    )


class BoundaryWork:
    def __init__(self, assignment: Assignment, until: int | None) -> None:
        self._assignment = assignment
        self._until = until
        self._boundary: Boundary | None = None

    def use(self, assignment: Assignment) -> None:
        self._assignment = assignment

    def do(self, command: e.Command) -> PollResult:
        assert isinstance(command, e.Poll)
        if command.reconnect:
            self.close()
        if self._boundary is None:
            self._boundary = Boundary(self._assignment, self._until, command.hidden_since)
        return self._boundary.poll(
            command.after,
            command.next_due,
            with_rows=command.with_rows,
            page_rows=command.page_rows,
            page_bytes=command.page_bytes,
        )

    def close(self) -> None:
        if self._boundary is not None:
            self._boundary.close()
            self._boundary = None


class ChecksWork:
    def __init__(self, assignment: Assignment) -> None:
        self._config, self._stores = assignment.config, assignment.parts.stores
        self.store = self._stores(self._config.store, assignment.layout)

    def use(self, assignment: Assignment) -> None:
        self.store.close()
        self.store = self._stores(self._config.store, assignment.layout)

    def do(self, command: e.Command) -> e.Counted | e.Sampled | e.LagMeasured | e.TableChecked:
        if isinstance(command, e.Count):
            return self.count(command)
        if isinstance(command, e.Sample):
            return self.sample(command.above)
        if isinstance(command, e.MeasureLag):
            return self.lag(command.position)
        assert isinstance(command, e.CheckTable)
        return self.table()

    def count(self, command: e.Count) -> e.Counted:
        now = self.store.now()
        windows = [window_of(bucket, command.position) for bucket in command.buckets]
        rows = dict(zip(command.buckets, self.store.counts(windows), strict=True))
        return e.Counted(now, rows)

    def sample(self, above: int | None = None) -> e.Sampled:
        rows = self.store.newest(SAMPLE if above is None else MOST, above)
        ahead, rows_ahead = self.store.ahead()
        return e.Sampled(rows, ahead, above, rows_ahead)

    def lag(self, position: int) -> e.LagMeasured:
        """Age and number of the unread events below the boundary."""
        poll = self.store.poll(position, self._config.read.delay, 1)
        if not poll.has_rows:
            return e.LagMeasured(position, poll.upper, 0.0, 0)
        [events] = self.store.counts([(position, poll.upper)], MOST_EVENTS)
        seconds = max(0.0, (poll.upper - (poll.page_end or poll.upper)) / 1e6)
        return e.LagMeasured(position, poll.upper, seconds, max(1, events))

    def table(self) -> e.TableChecked:
        layout = self._stores.discover(self._config.store)
        with self._stores(self._config.store, layout) as as_it_is:
            return e.TableChecked(layout, as_it_is.never_read())

    def close(self) -> None:
        self.store.close()


BROKER_CHECKS = (e.CheckTopic, e.CheckOpen)


class BrokerWork:
    def __init__(self, assignment: Assignment, topics: dict[str, str]) -> None:
        self._app, self._clients = assignment.config.app, assignment.parts.clients
        self._topics, self._partitions = topics, assignment.partitions

    def do(self, command: e.Command) -> bool | None:
        if isinstance(command, e.CheckOpen):
            return bool(open_below(self._clients, command.ends, 0, timeout=_TIMEOUT))
        assert isinstance(command, e.CheckTopic)
        app, clients, sink = self._app, self._clients, self._clients.sink
        ids = topic_ids(clients, (sink.topic,), _TIMEOUT)
        if sink.topic in self._topics and sink.topic not in ids:
            raise topic_gone(sink, self._partitions)
        check_written(clients, ids, self._topics, {})
        ends = command.ends
        found = visible_ends(clients, list(ends), _TIMEOUT) if ends else {}
        between = {p: (ends[p], end) for p, end in found.items() if end > ends[p]}
        if between:
            check_between(clients, app.id, between)
        return None
