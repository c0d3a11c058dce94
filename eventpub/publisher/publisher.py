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
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType

import structlog

from eventpub.channel import Request
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator.coordinator import Coordinator
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.status import lag_seconds
from eventpub.errors import EventpubError
from eventpub.masking import mask_all
from eventpub.parts import real_parts
from eventpub.publisher.commands import CommandRunner
from eventpub.publisher.prepare import Prepared, prepare
from eventpub.state import StateDir

_STOP_SEEN_WITHIN = 0.2
"""Seconds until a signal is seen while the start still checks its servers."""


log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


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
        restore = self._catch_signals()
        mask = os.umask(0o077)  # of all that this process and its children make
        try:
            self._state.clear()
            if self._state.protect():
                log.warning(
                    "other users had access to state files; their access was removed",
                    state_dir=str(self._state.root),
                )
            prepared = self._prepare()
            if prepared is None:
                return Progress(stopped_by=self._stopped_by)
            _tune_garbage_collector()
            return self._publish(prepared)
        except EventpubError as error:
            self._keep_error(error)
            raise
        finally:
            restore()
            self._state.unlock()
            os.umask(mask)

    def _prepare(self) -> Prepared | None:
        """Prepare the start; None: a stop was requested meanwhile.

        In a thread: a server that does not answer is waited for some 10 s. Nothing is open before
        it is prepared, so who is asked to stop leaves at once, as if killed.
        """
        outcomes: queue.SimpleQueue[Prepared | BaseException] = queue.SimpleQueue()

        def work() -> None:
            try:
                parts, now = real_parts(self._config), self._available_now
                outcomes.put(prepare(self._config, self._state, parts, available_now=now))
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

    def _keep_error(self, error: EventpubError) -> None:
        """Write down why it has ended, or did not start, beside how it or the last one stood."""
        if error.code == "run.paused":
            return  # nothing is wrong, and how the last one ended is of more use
        found = self._state.read(self._state.status_file) or {}
        found |= {"state": "stopped", "stopped_by": str(error), "stopped_at": time.time()}
        with suppress(EventpubError):
            self._state.write(self._state.status_file, mask_all(found))

    def _publish(self, prepared: Prepared) -> Progress:
        requests = tuple((r, self._forget(r)) for r in self._state.kept())
        start_state = replace(prepared.start_state, requests=requests)
        coordinator = Coordinator(self._config, start_state)
        with CommandRunner(
            self._config, self._state, prepared, coordinator, self._events
        ) as runner:
            runner.begin()
            event: e.Event = e.Tick()
            while True:
                now = time.monotonic()
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

    def _next(self, coordinator: Coordinator) -> e.Event:
        """What has happened; a tick where its time has come, however much happens."""
        wait = coordinator.next_tick(time.monotonic())
        if wait <= 0:
            return e.Tick()
        try:
            return self._events.get(timeout=wait)
        except queue.Empty:
            return e.Tick()

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
    events = coordinator.lag.events(now)
    return replace(
        coordinator.progress,
        lag_seconds=lag_seconds(coordinator, now),
        lag_events=-1 if events is None else events,
    )


def _tune_garbage_collector() -> None:
    """Let Python's search for cycles look at less, less often: rows make none, and a drain is a
    tenth slower with it."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
