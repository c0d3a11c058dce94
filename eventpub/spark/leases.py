"""Spark's part: it places the shards' runners on its executors, one job of one task for each.

A task is the runner and lives as long as the shard's lease, as Spark's own receivers do. When it is
lost, with its executor or by itself, its job ends and the coordinator has another one started. Jobs
rather than the micro-batches of a streaming query: see docs/explanation/architecture.md.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from eventpub.channel import Hello
from eventpub.channel.flight import Address, FlightLink
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.errors import EventpubError, StateError, from_dict, words_of
from eventpub.publisher.placement import Placement, place_name, tune_garbage_collector
from eventpub.shard.assignment import Assignment
from eventpub.shard.runner import serve

if TYPE_CHECKING:
    from pyspark import SparkContext

_ALIVE_EVERY = 0.5
"""Seconds between two checks whether Spark still answers."""

_FIRST_WAIT = 2.0
_LONGEST_WAIT = 300.0
"""Seconds until Spark is started again after it was lost or has not come up, twice as many each
time, until it has lived that long: the start of a JVM costs some 10 s of CPU time."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Spark(Placement):
    """A Spark that comes up in a thread, is watched, and is started again when it is lost.

    Args:
        config: the whole configuration.
        log_file: takes what Spark and its workers print.
        address: of the coordinator, as executors reach it.
        post: takes what happens.
        changed: called with this placement when it can be used, and with None when it is lost.
    """

    def __init__(
        self,
        config: Config,
        log_file: Path,
        address: Address,
        post: Callable[[e.Event], None],
        changed: Callable[[Placement | None], None],
    ) -> None:
        self._config = config
        self._log_file = log_file
        self._address = address
        self._post = post
        self._changed = changed
        self._ended = threading.Event()
        self._context: SparkContext | None = None
        self._after = 0.0
        self._was_up = False
        self._thread = threading.Thread(target=self._run, name="eventpub-spark", daemon=True)

    def begin(self, after: float = 0.0) -> None:
        """Start Spark, after so many seconds."""
        self._after = after
        self._thread.start()

    def end(self, timeout: float) -> None:
        """Stop it; the tasks have ended. Waits so many seconds at most."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def start(self, assignment: Assignment, shard: int, attempt: int) -> None:
        threading.Thread(
            target=self._job,
            args=(assignment, shard, attempt),
            name=f"eventpub-job-{shard}",
            daemon=True,
        ).start()

    def end_runner(self, shard: int, attempt: int) -> None:
        """As there: Spark kills the worker of a task that does not end within 2 s."""
        context = self._context
        if context is None:
            return

        def cancel() -> None:  # the JVM may be gone, or answer nothing
            with suppress(Exception):
                context.cancelJobGroup(_job_group(shard, attempt))

        threading.Thread(target=cancel, name=f"eventpub-cancel-{shard}", daemon=True).start()

    def _job(self, assignment: Assignment, shard: int, attempt: int) -> None:
        context, error = self._context, None
        try:
            if context is None:
                raise StateError("spark.task_lost", "Spark is not up", retriable=True)
            context.setJobGroup(_job_group(shard, attempt), f"eventpub shard {shard}", True)
            task = partial(run_task, assignment, self._address, attempt)
            context.parallelize([shard], 1).mapPartitions(task).collect()
        except EventpubError as found:
            error = found
        except Exception as found:
            error = StateError(
                "spark.task_lost",
                f"the task of shard {shard} was lost: {_reason(found)}",
                suggestion=f"nothing to do: another one is started; more is in {self._log_file}",
                retriable=True,
            )
        self._post(e.RunnerEnded(shard, attempt, None if self._ended.is_set() else error))

    def _run(self) -> None:
        wait = _FIRST_WAIT
        if self._ended.wait(self._after):
            return
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                self._session()
            except Exception as found:
                if self._ended.is_set():
                    return
                error = self._of(found)
                self._post(e.Failed(e.StartSpark(), error))
                if error.retriable:
                    log.warning(
                        "Spark cannot be started; threads of the publisher's process publish"
                        " meanwhile",
                        error=str(error),
                        tried_again_in=f"{wait:g} s",
                    )
            if time.monotonic() - began >= _LONGEST_WAIT:
                wait = _FIRST_WAIT
            if self._ended.wait(wait):
                return
            wait = min(2 * wait, _LONGEST_WAIT)

    def _of(self, found: Exception) -> EventpubError:
        """Why Spark does not start: threads publish, so it is tried again, whatever it is.

        But for what no start will get over; where one has, that is there again after an upgrade.
        """
        if not isinstance(found, EventpubError):
            return StateError(
                "spark.start_failed",
                f"Spark does not start: {_reason(found)}",
                suggestion="check memory, disk space (TMPDIR, too) and the limit of open files;"
                f" Spark's own words are in {self._log_file}",
                retriable=True,
            )
        return from_dict(found.to_dict() | {"retriable": True}) if self._was_up else found

    def _session(self) -> None:
        """One life of Spark, until it is lost or nobody wants it any more."""
        from eventpub.spark.session import Session

        with Session(self._config, self._log_file, stops=self._ended.is_set) as session:
            self._context, self._was_up = session.context, True
            self._changed(self)
            try:
                while not self._ended.wait(_ALIVE_EVERY) and session.is_alive():
                    continue
            finally:
                self._context = None
                if not self._ended.is_set():
                    self._changed(None)


def _job_group(shard: int, attempt: int) -> str:
    return f"eventpub shard {shard}, attempt {attempt}"


def _reason(error: Exception) -> str:
    lines = words_of(error).strip().splitlines()
    errors = [line for line in lines if "Exception: " in line or "Error: " in line]
    return (errors or lines or [type(error).__name__])[0].strip()


def run_task(
    assignment: Assignment, address: Address, attempt: int, shards: Iterable[int]
) -> Iterator[Any]:
    """What a task of Spark does: it is the runner of one shard, to the end of its lease."""
    tune_garbage_collector()
    for shard in shards:
        link = FlightLink(address, Hello(shard, assignment.run, place_name(), attempt))
        try:
            serve(assignment, shard, link)
        finally:
            with suppress(Exception):
                link.close()
            sys.stderr.flush()
        yield shard
