"""What carries out the coordinator's commands, and asks it what other threads want to know."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from eventpub import __version__
from eventpub.channel import Request
from eventpub.config import Config, format_time
from eventpub.coordinator import events as e
from eventpub.coordinator.coordinator import Coordinator
from eventpub.coordinator.status import notable, status, unanswered
from eventpub.errors import EventpubError
from eventpub.failpoint import failpoint
from eventpub.masking import mask_all
from eventpub.ops.http import Pages
from eventpub.publisher.prepare import Prepared
from eventpub.publisher.workers import (
    BROKER_CHECKS,
    BoundaryWork,
    BrokerWork,
    ChecksWork,
    Worker,
)
from eventpub.shard.runner import serve
from eventpub.state import StateDir

_WORKERS_END = 0.3
"""Seconds for a thread to finish what it does when the publisher stops."""

_ANSWER_TIMEOUT = 60.0
_PAUSE_TIMEOUT = 5.0

_KEPT_EVERY = 10.0
"""Seconds after which the status is written although no check has changed: `at` is its age."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class StatusFile:
    """The status as it is written down, for when the publisher does not run or does not answer.

    Args:
        run: number of the run.

    Attributes:
        identity: what of the status names the publisher.
    """

    def __init__(self, config: Config, state: StateDir, run: int) -> None:
        self._state = state
        self._checks: list[tuple[str, str, str]] = []
        self._at = float("-inf")
        self.identity: dict[str, Any] = {
            "version": __version__,
            "app": config.app.id,
            "table": config.store.table,
            "topic": config.sink.topic,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "run": run,
            "started_at": round(time.time(), 3),
        }

    def keep(
        self, found: dict[str, Any], error: EventpubError | None = None, *, is_over: bool = False
    ) -> None:
        """Write a status down, where a check has changed, or the file is old, or it is over."""
        now, checks = time.monotonic(), notable(found)
        if not is_over and checks == self._checks and now - self._at < _KEPT_EVERY:
            return
        self._checks, self._at = checks, now
        if is_over:
            why = None if error is None else str(error)
            found |= {"state": "stopped", "stopped_by": why, "stopped_at": time.time()}
        with suppress(EventpubError):  # a full disk is met, and said, by what matters more
            self._state.write(self._state.status_file, mask_all(found))


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
        self._file = StatusFile(config, state, prepared.start_state.run)
        self._last = self._document()
        self._boundary_work = BoundaryWork(self._assignment, prepared.start_state.until)
        self._checks_work = ChecksWork(self._assignment)
        broker_work = BrokerWork(self._assignment, prepared.topics)
        post = events.put
        work, checks = self._boundary_work, self._checks_work
        self._boundary = Worker("eventpub-boundary", work.do, post, work.close)
        self._checks = Worker("eventpub-checks", checks.do, post, checks.close)
        self._broker = Worker("eventpub-broker", broker_work.do, post)
        self._pages = Pages(config, self, state)

    def begin(self) -> None:
        if self._coordinator.pauses.is_paused:
            log.warning(
                "starting paused; run `eventpub resume` to start publishing",
                by=self._coordinator.pauses.paused_by,
            )
        self._pages.begin()

    def __enter__(self) -> CommandRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._pages.end()
        for worker in (self._boundary, self._checks, self._broker):
            worker.end(_WORKERS_END)

    def show(self) -> None:
        self._state.beat()
        found = self.keep_status()
        self._pages.sample(found)

    def do(self, command: e.Command) -> None:
        if isinstance(command, e.Poll):
            self._boundary.put(command)
        elif isinstance(command, e.StartRunner):
            shard, post = command.shard, self._events.put
            arguments = (self._assignment, shard, command.beginning, command.lane, post)
            name = f"eventpub-shard-{shard}"
            threading.Thread(target=serve, args=arguments, name=name, daemon=True).start()
        elif isinstance(command, e.Reassign):
            self._assignment = replace(self._assignment, layout=command.layout)
            self._boundary_work.use(self._assignment)
            self._checks_work.use(self._assignment)
        elif isinstance(command, e.Remember):
            self._remember(command)
        elif isinstance(command, e.Log):
            getattr(log, command.level)(command.text, **command.facts)
        elif isinstance(command, BROKER_CHECKS):
            self._broker.put(command)
        else:
            self._checks.put(command)

    def _remember(self, command: e.Remember) -> None:
        failpoint("before_remember")
        try:
            self._state.write(self._state.progress_file, dict(command.what), lasting=True)
        except EventpubError as error:
            self._events.put(e.Failed(command, error))
            return
        failpoint("after_remember")
        self._events.put(e.Written(command.what))
        if command.then is not None:
            if command.then.shards is not None:
                self._state.forget_shards(command.then.shards)
            self._state.forget_former()

    # -- what others ask ---------------------------------------------------------------------------

    def _document(self) -> dict[str, Any]:
        return self._file.identity | status(self._coordinator, time.monotonic())

    def keep_status(
        self, error: EventpubError | None = None, *, is_over: bool = False
    ) -> dict[str, Any]:
        """The status, made in the loop's thread, and kept as of `StatusFile.keep`."""
        found = self._last = self._document()
        self._file.keep(found, error, is_over=is_over)
        return found

    def status(self) -> dict[str, Any]:
        """The status of the last second, marked as of `unanswered`; in any thread."""
        return unanswered(self._last, self._last["at"], time.time())

    def pause(self, is_paused: bool, by: str) -> dict[str, Any]:
        """Have nothing published for now, or end that; may be called in any thread.

        Args:
            by: who wants it, for log and status.

        Returns:
            `is_paused`; None: the coordinator has not answered in time. With an `error`, it holds
            until the publisher ends: it could not be written down.
        """
        by = f"{by or 'unknown'} at {format_time(round(time.time() * 1e6))}"
        outcome = self._answer(lambda reply: e.PauseAsked(is_paused, reply, by), _PAUSE_TIMEOUT)
        return {
            "is_paused": None if outcome is None else is_paused,
            "in_work": outcome if isinstance(outcome, int) else 0,
            "error": outcome.to_dict() if isinstance(outcome, EventpubError) else None,
        }

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        """Have shards do something; may be called in any thread.

        Returns:
            `answers` by shard; None: there are none, because of `error`, or in time where that is
            None, too.
        """
        timeout = min(max(timeout, 0.0), _ANSWER_TIMEOUT)
        outcome = self._answer(lambda reply: e.RequestReceived(request, reply), timeout)
        if outcome is None:
            self.withdraw(request.id)
        if outcome is None or isinstance(outcome, EventpubError):
            return {"answers": None, "error": outcome and outcome.to_dict()}
        answers = {str(shard): answer for shard, answer in outcome.items()}
        return {"answers": answers, "error": None}

    def withdraw(self, id: str) -> None:
        self._events.put(e.Withdrawn(id))

    def _answer(self, event: Callable[[Callable[[Any], None]], e.Event], timeout: float) -> Any:
        """What the coordinator replies to an event; None: nothing in time."""
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._events.put(event(replies.put))
        with suppress(queue.Empty):
            return replies.get(timeout=timeout)
        return None
