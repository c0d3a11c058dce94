"""One run of the publisher: the coordinator's loop, and what carries out its commands.

events ──▶ Coordinator.on ──▶ commands ──▶ workers (boundary, checks, broker), shards, disk, log
   ▲                                                        │
   └────────────────────────────────────────────────────────┘

Workers and shards are threads of this process.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import structlog

from eventpub import __version__
from eventpub.channel import Hello, Request
from eventpub.channel.lane import IsCurrent
from eventpub.channel.local import LocalLink
from eventpub.config import Config, format_time
from eventpub.coordinator import events as e
from eventpub.coordinator.coordinator import Coordinator
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.status import notable, status, unanswered
from eventpub.errors import EventpubError
from eventpub.failpoint import failpoint
from eventpub.log import dropped
from eventpub.masking import mask_all
from eventpub.ops.http import Pages
from eventpub.publisher.prepare import Prepared, prepare
from eventpub.publisher.workers import (
    BROKER_CHECKS,
    BoundaryWork,
    BrokerWork,
    ChecksWork,
    Worker,
)
from eventpub.shard.assignment import Assignment
from eventpub.shard.runner import serve
from eventpub.state import StateDir

_WORKERS_END = 0.3
"""Seconds for a thread to finish what it does when the publisher stops."""

_STOP_SEEN_WITHIN = 0.2
"""Seconds until a signal is seen while the start still checks its servers."""

_ANSWER_TIMEOUT = 60.0
_PAUSE_TIMEOUT = 5.0

_STATUS_TIMEOUT = 1.0
"""Seconds in which the loop makes a status; else it hangs, on a disk perhaps."""

_STATUS_EVERY = 10.0
"""Seconds after which the status is written down though no check has changed: `at` says how old it
is."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Publisher:
    """See the module; `run` is its whole life."""

    def __init__(
        self, config: Config, available_now: bool, on_progress: Callable[[Progress], None]
    ) -> None:
        self._config = config
        self._available_now = available_now
        self._on_progress = on_progress
        self._state = StateDir(config.app.state_dir)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped_by: int | None = None

    def run(self) -> Progress:
        self._state.lock()
        restore = self._catch_signals()
        mask = os.umask(0o077)  # of all that this process and its children make
        try:
            self._state.clear()
            if self._state.protect():
                log.warning(
                    "other users had access to state files; their access was removed",
                    state_dir=str(self._state.root),
                )
            try:
                prepared = self._prepare()
            except EventpubError as error:
                self._keep_failed_start(error)
                raise
            if prepared is None:
                return Progress(stopped_by=self._stopped_by)
            _tune_garbage_collector()
            return self._publish(prepared)
        finally:
            restore()
            self._state.unlock()
            os.umask(mask)

    def _prepare(self) -> Prepared | None:
        """None: it was asked to stop meanwhile.

        In a thread: a server that does not answer is waited for some 10 s. Nothing is open before
        it is prepared, so who is asked to stop leaves at once, as if killed.
        """
        outcomes: queue.SimpleQueue[Prepared | BaseException] = queue.SimpleQueue()

        def work() -> None:
            try:
                outcomes.put(prepare(self._config, self._state, available_now=self._available_now))
            except BaseException as error:  # raised by the main thread
                outcomes.put(error)

        threading.Thread(target=work, name="eventpub-prepare", daemon=True).start()
        while True:
            with suppress(queue.Empty):
                outcome = outcomes.get(timeout=_STOP_SEEN_WITHIN)
                if self._stopped_by is not None:
                    return None
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome
            if self._stopped_by is not None:
                return None

    def _keep_failed_start(self, error: EventpubError) -> None:
        """Write down why it did not start, beside how the last one stood."""
        if error.code == "run.paused":
            return  # nothing is wrong, and how the last one ended is of more use
        found = self._state.read(self._state.status_file) or {}
        found |= {"state": "stopped", "stopped_by": str(error), "stopped_at": time.time()}
        with suppress(EventpubError):
            self._state.write(self._state.status_file, mask_all(found))

    def _publish(self, prepared: Prepared) -> Progress:
        requests = tuple((r, self._forget(r)) for r in self._kept_requests())
        start_state = replace(prepared.start_state, requests=requests)
        coordinator = Coordinator(self._config, start_state)
        with CommandRunner(
            self._config, self._state, prepared, coordinator, self._events
        ) as runner:
            runner.begin()
            event: e.Event | _StatusAsked = e.Tick()
            while True:
                now = time.monotonic()
                if isinstance(event, _StatusAsked):
                    event.reply(runner.document(now))
                    event = self._next(coordinator)
                    continue
                commands = coordinator.on(event, now)
                coordinator.progress.stopped_by = self._stopped_by
                for command in commands:
                    if isinstance(command, e.Show):
                        self._on_progress(_shown(coordinator, now))
                        runner.show()
                    elif isinstance(command, e.Finish):
                        runner.keep_status(command.error, is_over=True)
                        if command.error is not None and self._stopped_by is None:
                            raise command.error
                        return coordinator.progress
                    else:
                        runner.do(command)
                event = self._next(coordinator)

    def _next(self, coordinator: Coordinator) -> e.Event | _StatusAsked:
        """What has happened; a tick where its time has come, however much happens."""
        wait = coordinator.next_tick(time.monotonic())
        if wait <= 0:
            return e.Tick()
        try:
            found: e.Event | _StatusAsked = self._events.get(timeout=wait)
        except queue.Empty:
            return e.Tick()
        return found

    def _kept_requests(self) -> list[Request]:
        for file in self._state.set_invalid_requests_aside():
            log.warning("not a request; it was moved aside", file=str(file))
        return self._state.kept()

    def _forget(self, request: Request) -> e.Reply:
        def forget(outcome: dict[int, str] | EventpubError) -> None:
            if not isinstance(outcome, EventpubError):  # else the next start tries it again
                self._state.withdraw(request)

        return forget

    def _catch_signals(self) -> Callable[[], None]:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        numbers = (signal.SIGTERM, signal.SIGINT)

        def stop(number: int, _: FrameType | None) -> None:
            if self._stopped_by is not None:
                os._exit(128 + number)  # asked twice: what is open is aborted by the next start
            self._stopped_by = number
            self._events.put(e.StopAsked())  # a queue that may be put to from a signal handler

        before = {number: signal.signal(number, stop) for number in numbers}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore


def _shown(coordinator: Coordinator, now: float) -> Progress:
    """The progress, with the lag that every other place shows: what is held is not published."""
    events = coordinator.lag_events(now)
    return replace(
        coordinator.progress,
        lag_seconds=coordinator.lag_seconds(now),
        lag_events=-1 if events is None else events,
    )


@dataclass(frozen=True)
class _StatusAsked:
    """Another thread wants the status: only the loop reads what the loop changes."""

    reply: Callable[[dict[str, Any]], None]


class CommandRunner:
    """Carries out the coordinator's commands; a context manager that ends what it has started."""

    def __init__(
        self,
        config: Config,
        state: StateDir,
        prepared: Prepared,
        coordinator: Coordinator,
        events: queue.SimpleQueue[Any],
    ) -> None:
        self._config = config
        self._state = state
        self._assignment = prepared.assignment
        self._events = events
        self._coordinator = coordinator
        self._identity = {
            "version": __version__,
            "app": config.app.id,
            "table": config.store.table,
            "topic": config.sink.topic,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "run": prepared.start_state.run,
            "started_at": round(time.time(), 3),
        }
        self._kept: list[tuple[str, str, str]] = []
        self._kept_at = 0.0
        self._last = self.document(time.monotonic())
        self._is_asked = threading.Lock()
        begin = prepared.start_state
        self._boundary_work = BoundaryWork(config, begin.layout, begin.partitions, begin.until)
        self._checks_work = ChecksWork(config, begin.layout)
        broker_work = BrokerWork(config, prepared.topics)
        post = events.put
        work = self._boundary_work
        self._boundary = Worker("eventpub-boundary", work.do, post, work.close)
        self._checks = Worker(
            "eventpub-checks", self._checks_work.do, post, self._checks_work.close
        )
        self._broker = Worker("eventpub-broker", broker_work.do, post)
        self._pages = Pages(config, self, state)

    def begin(self) -> None:
        """Answer commands."""
        if self._coordinator.is_paused:
            log.warning(
                "starting paused; run `eventpub resume` to start publishing",
                by=self._coordinator.paused_by,
            )
        self._pages.begin()

    def __enter__(self) -> CommandRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._pages.end()
        self._boundary.end(_WORKERS_END)
        self._checks.end(_WORKERS_END)
        self._broker.end(_WORKERS_END)

    def show(self) -> None:
        """About once a second: how it stands is kept."""
        self._state.beat()
        found = self.keep_status()
        self._pages.sample(found)

    def do(self, command: e.Command) -> None:
        """Have it done; what comes of it is posted."""
        if isinstance(command, e.Poll):
            self._boundary.put(command)
        elif isinstance(command, e.StartRunner):
            start_runner(self._assignment, command, self._events.put, self._coordinator.is_current)
        elif isinstance(command, e.Reassign):
            self._assignment = replace(self._assignment, layout=command.layout)
            self._boundary_work.use(command.layout)
            self._checks_work.use(command.layout)
        elif isinstance(command, e.Remember):
            failpoint("before_remember")
            try:
                self._state.write(self._state.progress_file, dict(command.what), lasting=True)
                failpoint("after_remember")
                self._events.put(e.Written(command.what))
                self._forget(command.then)
            except EventpubError as error:
                self._events.put(e.Failed(command, error))
        elif isinstance(command, e.Log):
            getattr(log, command.level)(command.text, **command.facts)
        elif isinstance(command, BROKER_CHECKS):
            self._broker.put(command)
        else:
            self._checks.put(command)

    def _forget(self, former: e.ForgetFormer | None) -> None:
        if former is not None:
            if former.shards is not None:
                self._state.forget_shards(former.shards)
            self._state.forget_former()

    # -- what others ask ---------------------------------------------------------------------------

    def document(self, now: float) -> dict[str, Any]:
        """The status, made in the loop's thread; nothing in it changes any more.

        Args:
            now: the machine's monotonic time, s.
        """
        found: dict[str, Any] = self._identity | status(self._coordinator, now)
        found["counters"]["log_lines_dropped"] = dropped()
        self._last = found
        return found

    def status(self) -> dict[str, Any]:
        """The status as the loop says it; may be called in any thread but the loop's.

        Where the loop does not answer: the last one, marked as of `unanswered`.
        """
        replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        if self._is_asked.acquire(timeout=_STATUS_TIMEOUT):
            try:
                self._events.put(_StatusAsked(replies.put))
                return replies.get(timeout=_STATUS_TIMEOUT)
            except queue.Empty:
                pass
            finally:
                self._is_asked.release()
        return unanswered(self._last, self._last["at"], time.time())

    def pause(self, is_paused: bool, by: str) -> dict[str, Any]:
        """Have nothing published for now, or end that; may be called in any thread.

        Args:
            by: who wants it, for log and status.

        Returns:
            `is_paused`; None: the coordinator has not answered in time. With an `error`, it holds
            until the publisher ends: it could not be written down.
        """
        replies: queue.SimpleQueue[int | EventpubError] = queue.SimpleQueue()
        by = f"{by or 'unknown'} at {format_time(round(time.time() * 1e6))}"
        self._events.put(e.PauseAsked(is_paused, replies.put, by))
        try:
            outcome = replies.get(timeout=_PAUSE_TIMEOUT)
        except queue.Empty:
            return {"is_paused": None, "in_work": 0, "error": None}
        if isinstance(outcome, EventpubError):
            return {"is_paused": is_paused, "in_work": 0, "error": outcome.to_dict()}
        return {"is_paused": is_paused, "in_work": outcome, "error": None}

    def keep_status(
        self, error: EventpubError | None = None, *, is_over: bool = False
    ) -> dict[str, Any]:
        """The status, written down for when none runs, where it has changed or is old."""
        now = time.monotonic()
        found = self.document(now)
        checks = notable(found)
        if not is_over and checks == self._kept and now - self._kept_at < _STATUS_EVERY:
            return found
        self._kept, self._kept_at = checks, now
        if is_over:
            why = None if error is None else str(error)
            found |= {"state": "stopped", "stopped_by": why, "stopped_at": time.time()}
        with suppress(EventpubError):  # a full disk is met, and said, by what matters more
            self._state.write(self._state.status_file, mask_all(found))
        return found

    def withdraw(self, id: str) -> None:
        """Take back a request that waits; may be called in any thread."""
        self._events.put(e.Withdrawn(id))

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        """Have shards do something; may be called in any thread.

        Returns:
            `answers` by shard; None: there are none, because of `error`, or in time where that is
            None, too.
        """
        outcomes: queue.SimpleQueue[dict[int, str] | EventpubError] = queue.SimpleQueue()
        self._events.put(e.RequestReceived(request, outcomes.put))
        try:
            outcome = outcomes.get(timeout=min(max(timeout, 0.0), _ANSWER_TIMEOUT))
        except queue.Empty:
            self._events.put(e.Withdrawn(request.id))
            return {"answers": None, "error": None}
        if isinstance(outcome, EventpubError):
            return {"answers": None, "error": outcome.to_dict()}
        answers = {str(shard): answer for shard, answer in outcome.items()}
        return {"answers": answers, "error": None}


def start_runner(
    assignment: Assignment,
    command: e.StartRunner,
    post: Callable[[e.Event], None],
    is_current: IsCurrent,
) -> None:
    """Publish a shard in a thread, which connects to the coordinator by itself. Does not wait.

    Args:
        assignment: of all shards.
        command: which shard.
        post: takes what happens.
        is_current: see `IsCurrent`.
    """
    shard = command.shard

    def work() -> None:
        link = LocalLink(Hello(shard, "this process", command.attempt), post, is_current)
        try:
            serve(assignment, shard, link)
        except BaseException:
            link.lose()
            raise

    threading.Thread(target=work, name=f"eventpub-shard-{shard}", daemon=True).start()


def _tune_garbage_collector() -> None:
    """Let Python's search for cycles look at less, less often: rows make none, and a drain is a
    tenth slower with it."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
