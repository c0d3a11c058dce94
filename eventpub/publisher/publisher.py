"""One run of the publisher: its start and end, and the coordinator's loop.

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
from concurrent import futures
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import structlog

from eventpub import __version__
from eventpub.channel import Request
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator.coordinator import Coordinator
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.status import notable, shown, status, unanswered
from eventpub.errors import EventpubError
from eventpub.failpoint import failpoint
from eventpub.masking import mask_all
from eventpub.ops.pages import Pages
from eventpub.publisher.prepare import Prepared, prepare
from eventpub.publisher.workers import (
    BROKER_CHECKS,
    BoundaryWork,
    BrokerWork,
    ChecksWork,
    Worker,
    end_all,
    in_thread,
)
from eventpub.shard.assignment import real_parts
from eventpub.shard.runner import serve
from eventpub.state import StateDir

_WORKERS_END = 0.3
"""Seconds for a thread to finish when the publisher stops."""

_ANSWER_TIMEOUT = 60.0

_KEPT_EVERY = 10.0
"""Seconds after which the status is written without a change: `at` shows its age."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class StatusFile:
    """The status on disk, for when the publisher does not run or answer.

    `document`: see `coordinator.status`; called in the thread of the engine's loop.
    """

    def __init__(
        self, state: StateDir, prepared: Prepared, document: Callable[[], dict[str, Any]]
    ) -> None:
        config = prepared.assignment.config
        self._state, self._document = state, document
        self._checks: list[tuple[str, str, str]] = []
        self._at = float("-inf")
        self._identity: dict[str, Any] = {
            "version": __version__,
            "app": config.app.id,
            "table": config.store.table,
            "topic": config.sink.topic,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "run": prepared.start_state.run,
            "started_at": round(time.time(), 3),
        }
        self._last = self._identity | document()

    def keep(self, *, is_over: bool = False) -> dict[str, Any]:
        """Show the status; write it if a check has changed, the file is old, or the run is over."""
        found = self._last = self._identity | self._document()
        now, checks = time.monotonic(), notable(found)
        if not is_over and checks == self._checks and now - self._at < _KEPT_EVERY:
            return found
        self._checks, self._at = checks, now
        if is_over:
            found |= {"state": "stopped", "stopped_by": None, "stopped_at": time.time()}
        with suppress(EventpubError):  # a full disk is reported elsewhere
            self._state.write(self._state.status_file, mask_all(found))
        return found

    def status(self) -> dict[str, Any]:
        """The status of the last second; thread-safe."""
        return unanswered(self._last, self._last["at"], time.time())


def remember(state: StateDir, command: e.Remember) -> e.Event:
    """Write the position durably, then clean up; returns `Done` or `Failed`."""
    failpoint("before_remember")
    try:
        state.write(state.progress_file, dict(command.what), lasting=True)
    except EventpubError as error:
        return e.Failed(command, error)
    failpoint("after_remember")
    if command.then is not None:
        if command.then.shards is not None:
            state.forget_shards(command.then.shards)
        state.forget_former()
    return e.Done(command)


class CommandRunner:
    """Carries out an engine's commands in threads, and passes on what others ask of its loop.

    Args:
        document: see `StatusFile`.
        post: takes what has happened, from any thread.
        check_broker: None: as `BrokerWork` does it.
        answer: answers a request at once, or returns None.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        state: StateDir,
        prepared: Prepared,
        document: Callable[[], dict[str, Any]],
        post: Callable[[e.Event], None],
        *,
        check_broker: Callable[[e.Command], Any] | None = None,
        answer: Callable[[Request], dict[str, str] | None] = lambda _: None,
    ) -> None:
        self._state, self._post = state, post
        self._answer, self._pause = answer, prepared.start_state.pause
        self._assignment = assignment = prepared.assignment
        file = StatusFile(state, prepared, document)
        self.keep_status, self.status = file.keep, file.status
        self._boundary_work = work = BoundaryWork(assignment, prepared.start_state.until)
        self._checks_work = checks = ChecksWork(assignment)
        check_broker = check_broker or BrokerWork(assignment, prepared.topics).do
        self._boundary = Worker("eventpub-boundary", work.do, post, work.close)
        self._checks = Worker("eventpub-checks", checks.do, post, checks.close)
        self._broker = Worker("eventpub-broker", check_broker, post)
        self.pages = Pages(assignment.config, self, state)

    def close(self) -> None:
        self.pages.end()
        end_all([self._boundary, self._checks, self._broker], _WORKERS_END)

    def show(self) -> None:
        self._state.beat()
        with suppress(EventpubError):  # looked at again within a second
            self._look_for_pause()
        self.pages.sample(self.keep_status())

    def do(self, command: e.Command) -> None:
        if isinstance(command, e.Poll):
            self._boundary.put(command)
        elif isinstance(command, e.StartRunner):
            shard, post = command.shard, self._post
            arguments = (self._assignment, shard, command.beginning, command.lane, post)
            name = f"eventpub-shard-{shard}"
            threading.Thread(target=serve, args=arguments, name=name, daemon=True).start()
        elif isinstance(command, e.Reassign):
            self._assignment = replace(self._assignment, layout=command.layout)
            self._boundary_work.use(self._assignment)
            self._checks_work.use(self._assignment)
        elif isinstance(command, e.Remember):
            self._post(remember(self._state, command))
        elif isinstance(command, e.Log):
            getattr(log, command.level)(command.text, **command.facts)
        elif isinstance(command, BROKER_CHECKS):
            self._broker.put(command)
        else:
            self._checks.put(command)

    # -- what others ask ---------------------------------------------------------------------------

    def pause(self, is_paused: bool, by: str) -> None:
        """Have the engine's loop pause or resume publishing; raises StateError: not saved."""
        self._state.keep_pause(is_paused, by)
        self._look_for_pause()

    def _look_for_pause(self) -> None:
        """`eventpub pause` writes the file itself where it gets no answer."""
        found = self._state.pause()
        if found != self._pause:
            self._pause = found
            self._post(e.PauseAsked(*found))

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        """Have shards do something. No `answers`: it timed out, or see `error`."""
        if (answers := self._answer(request)) is not None:
            return {"answers": answers, "error": None}
        timeout = min(max(timeout, 0.0), _ANSWER_TIMEOUT)
        outcome = self._reply(lambda reply: e.RequestReceived(request, reply), timeout)
        if outcome is None:
            self.withdraw(request.id)
        if outcome is None or isinstance(outcome, EventpubError):
            return {"answers": None, "error": outcome and outcome.to_dict()}
        answers = {str(shard): answer for shard, answer in outcome.items()}
        return {"answers": answers, "error": None}

    def withdraw(self, id: str) -> None:
        self._post(e.Withdrawn(id))

    def _reply(self, event: Callable[[Callable[[Any], None]], e.Event], timeout: float) -> Any:
        """What is replied to an event, in another thread; None: timed out."""
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._post(event(replies.put))
        with suppress(queue.Empty):
            return replies.get(timeout=timeout)
        return None


_STOP_SEEN_WITHIN = 0.2
"""Seconds until a signal is noticed while the start checks its servers."""


class Publisher:
    def __init__(
        self, config: Config, available_now: bool, on_progress: Callable[[Progress], None]
    ) -> None:
        self._config = config
        self._available_now = available_now
        self._on_progress = on_progress
        self._state = StateDir(config.app.state_dir)
        self._events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self._stopped_by: int | None = None

    def run(self) -> Progress:
        self._state.lock()
        with ExitStack() as stack:
            # for everything that this process and its children create
            stack.callback(os.umask, os.umask(0o077))
            stack.callback(self._state.unlock)
            self._catch_signals(stack)
            try:
                return self._run()
            except EventpubError as error:
                self._keep_error(error)
                raise

    def _run(self) -> Progress:
        self._state.clear()
        if self._state.protect():
            log.warning(
                "other users had access to state files; their access was removed",
                state_dir=str(self._state.root),
            )
        prepared = self._prepare()
        if prepared is None:
            return Progress(stopped_by=self._stopped_by)
        is_paused, by = prepared.start_state.pause
        if is_paused:
            log.warning("starting paused; run `eventpub resume` to start publishing", by=by)
        # collect cycles less often: rows make none, and it slows a drain by a tenth
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        return self._publish(prepared)

    def _prepared(self) -> Prepared:
        parts, now = real_parts(self._config), self._available_now
        return prepare(self._config, self._state, parts, available_now=now)

    def _prepare(self) -> Prepared | None:
        """Prepare the start; None: a stop was requested meanwhile."""
        preparing = in_thread(self._prepared, "eventpub-prepare")
        while self._stopped_by is None and not preparing.done():
            futures.wait([preparing], _STOP_SEEN_WITHIN)
        if self._stopped_by is not None:
            return None
        prepared = preparing.result()
        requests = tuple((r, partial(self._forget, r)) for r in self._state.kept())
        return replace(prepared, start_state=replace(prepared.start_state, requests=requests))

    def _keep_error(self, error: EventpubError) -> None:
        """Add the error to the last status."""
        if error.code == "run.paused":
            return  # not a fault: the last run's end is more useful
        found = self._state.read(self._state.status_file) or {}
        found |= {"state": "stopped", "stopped_by": str(error), "stopped_at": time.time()}
        with suppress(EventpubError):
            self._state.write(self._state.status_file, mask_all(found))

    def _publish(self, prepared: Prepared) -> Progress:
        coordinator = Coordinator(self._config, prepared.start_state)

        def document() -> dict[str, Any]:
            return status(coordinator, time.monotonic())

        with closing(CommandRunner(self._state, prepared, document, self._events.put)) as runner:
            runner.pages.begin()
            event: e.Event = e.Tick()
            while True:
                now = time.monotonic()
                commands = coordinator.on(event, now)
                coordinator.progress.stopped_by = self._stopped_by
                for command in commands:
                    if isinstance(command, e.Show):
                        self._on_progress(shown(coordinator, now))
                        runner.show()
                    elif isinstance(command, e.Finish):
                        runner.keep_status(is_over=True)
                        if command.error is not None and self._stopped_by is None:
                            raise command.error
                        return coordinator.progress
                    else:
                        runner.do(command)
                event = self._next(coordinator)

    def _next(self, coordinator: Coordinator) -> e.Event:
        """The next event; a tick when due, however many events are pending."""
        wait = coordinator.next_tick(time.monotonic())
        with suppress(queue.Empty):
            if wait > 0:
                return self._events.get(timeout=wait)
        return e.Tick()

    def _forget(self, request: Request, outcome: dict[int, str] | EventpubError) -> None:
        if not isinstance(outcome, EventpubError):  # else the next start retries it
            self._state.withdraw(request)

    def _catch_signals(self, stack: ExitStack) -> None:
        if threading.current_thread() is not threading.main_thread():
            return

        def stop(number: int, _: FrameType | None) -> None:
            if self._stopped_by is not None:
                os._exit(128 + number)  # second signal: the next start aborts open transactions
            self._stopped_by = number
            self._events.put(e.StopAsked())  # SimpleQueue.put is safe in signal handlers

        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, stop))
