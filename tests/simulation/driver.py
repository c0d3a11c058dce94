"""Spark's part, as far as it decides anything: offset log, replay, tasks, and what a crash leaves.

The publisher, its micro-batch, the source and the tasks are the real ones. Spark writes a batch's
end to its offset log before the batch and its number to the commit log after it; a batch without
that is run again with the same bounds, by a driver that may know no more than the disk does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from pyspark.sql.streaming.datasource import ReadMaxRows

from eventpub.config import App, Config, Gaps, Read, Recount, Sink, Spark, Store
from eventpub.errors import EventpubError
from eventpub.spark.boundary import BatchOver, Bounds
from eventpub.spark.publisher import _Publisher
from eventpub.spark.source import EventStoreStreamReader, SourceError, Window
from tests.simulation.store import EventStore
from tests.simulation.world import Crash, Process, Setup, Worker, World

TOPIC = "events"


class Stopped(Exception):  # noqa: N818 (what a schedule meets, not what went wrong in the test)
    """The publisher has given up for good."""


class ExecutorLost(RuntimeError):  # noqa: N818 (it is what happens)
    """What Spark raises in the driver when a task's process is gone."""


@cache
def config_of(setup: Setup, shards: int) -> Config:
    """The publisher's configuration in this world."""
    return Config(
        app=App(id="sim"),
        store=Store.model_validate({"url": "mysql+pymysql://u@h:1/d"}),
        read=Read.model_validate(
            {
                "start": setup.start,
                "delay": f"{setup.delay}us",
                "page_rows": setup.page_rows,
                "watermark": "off" if setup.watermark == "off" else "auto",
                "max_wait": f"{setup.max_wait}us",
            }
        ),
        gaps=Gaps.model_validate(
            {
                "max_backoff": setup.max_backoff,
                "backoff_base": f"{setup.backoff_base}us",
                "late": setup.late,
                "policy": setup.policy,
            }
        ),
        recount=Recount.model_validate({"horizon": f"{setup.horizon}us"}),
        sink=Sink(topic=TOPIC),
        spark=Spark(shards=shards),
    )


class _Reader(EventStoreStreamReader):
    """The real source, asked by this module instead of Spark."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._store: Any = EventStore(None, None)
        self._boundary: Any = SimpleNamespace(rest=lambda: None, go=self._went, rests=False)
        self.last = Bounds(0)

    def _went(self, end: int) -> None:
        self.last = Bounds(end)

    def next_bounds(self) -> dict[str, Any] | None:
        """What the boundary's file has now."""
        try:
            found = self._next_window(self.last.upto)
        except (BatchOver, SourceError, EventpubError):
            return None
        if found is not None:
            self.last = replace(found, tick=self.last.tick + (found.upto == self.last.upto))
        return asdict(self.last)


class _Rows:
    """A record batch of windows."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def to_pylist(self) -> list[dict[str, Any]]:
        return [vars(self._window)]


class _Frame:
    """The DataFrame of a micro-batch: each window is a task on an executor."""

    def __init__(self, driver: Driver, windows: list[Window]) -> None:
        self._driver = driver
        self._windows = windows
        self._task: Callable[..., Any]

    def mapInArrow(self, task: Callable[..., Any], schema: str) -> _Frame:  # noqa: N802
        del schema
        self._task = task
        return self

    def collect(self) -> list[dict[str, Any]]:
        this = self._driver.world
        driver = this.process
        results: list[dict[str, Any]] = []
        turn = self._driver.turn % max(1, len(self._windows))
        for window in self._windows[turn:] + self._windows[:turn]:
            this.point("task")
            process = Process((window.shard + self._driver.shift) % this.setup.executors)
            this.process = process
            try:
                results += self._run(this, process, window)
            except Crash as crash:
                process.dead = True
                if crash.whole:
                    driver.dead = True
                    raise
                raise ExecutorLost from None
            finally:
                this.process = driver
        this.lost.clear()  # a first fold that is interrupted leaves an index as lost as before
        this.point("tasks done")
        return sorted(results, key=lambda r: str(r["report"]))

    def _run(self, this: World, process: Process, window: Window) -> list[dict[str, Any]]:
        def work() -> list[dict[str, Any]]:
            return [row for batch in self._task(iter([_Rows(window)])) for row in batch.to_pylist()]

        if not self._driver.threads:
            return work()
        worker = Worker(this, process, work)
        worker.go_on()
        if not worker.done:
            this.stalled.append(worker)
            raise ExecutorLost
        if worker.error is not None:
            raise worker.error
        result: list[dict[str, Any]] = worker.result
        return result


class Driver:
    """The driver, again and again: what survives it is `offsets` and `done`, and the disk."""

    def __init__(self, this: World) -> None:
        self.world = this
        self.shards = this.setup.shards
        self.page_rows = this.setup.page_rows
        self.offsets: dict[int, dict[str, int]] = {}
        self.done = -1
        self.shift = 0
        self.turn = 0
        self.threads = False
        self.errors: list[str] = []
        self._publisher: Any = None
        self._reader: _Reader | None = None

    def stop(self) -> None:
        """It ends, one way or the other."""
        self.world.stopped()
        self._publisher = self._reader = None

    def lose_checkpoint(self) -> None:
        """Spark's directory is deleted."""
        self.offsets, self.done = {}, -1

    def batch(self) -> bool:
        """Start what does not run, then one micro-batch; False where none was due.

        Raises:
            Stopped: an error that the publisher does not wait out.
        """
        this = self.world
        this.process = Process()
        try:
            if self._publisher is None:
                this.started()
                self._start()
            if self._reader is None:
                self._query()
            return self._micro_batch()
        except Crash:
            this.counts["crashes"] += 1
            self.stop()
        except ExecutorLost:
            self._reader = None
        except (EventpubError, SourceError) as error:
            self._met(error)
            if self._publisher is not None and not hasattr(self._publisher, "_job"):
                self.stop()  # it never came to run
        finally:
            this.process = Process()
        return True

    def _met(self, error: EventpubError | SourceError) -> None:
        """The query has ended: it is started again, or the publisher gives up."""
        self._reader = None
        cause = error.__cause__ if isinstance(error, SourceError) else error
        assert isinstance(cause, EventpubError)
        self.world.counts[f"error {cause.code}"] += 1
        waits = cause.retriable or (
            cause.code == "sink.fenced" and not self._publisher._another_publisher_seen()
        )
        if not waits:
            self.stop()
            raise Stopped(f"{cause.code}: {cause}") from error

    def look(self) -> None:
        """What the driver's main thread does every second: the recount.

        Raises:
            Stopped: as `batch`.
        """
        if self._publisher is None or not hasattr(self._publisher, "_job"):
            return
        process = self.world.process
        self.world.process = Process()
        self.world.monotonic += 11.0  # it looks for open transactions less often than for rows
        try:
            self.world.counts["looks"] += 1
            self._publisher._see_to(EventStore(None, None), *self._publisher._live())
        except EventpubError as error:
            self._met(error)
        finally:
            self.world.process = process

    def next_bounds(self) -> dict[str, Any] | None:
        """As the source says while a task asks, which moves the boundary meanwhile."""
        this = self.world
        if self._reader is None:
            return None
        process, this.process = this.process, Process()
        try:
            found = self._reader.next_bounds()
        finally:
            this.process = process
        this.reached = max(this.reached, found["upto"] if found else 0)
        return found

    def _start(self) -> None:
        self.lose_checkpoint()  # as each start does
        config = config_of(self.world.setup, self.shards)
        self._publisher = _Publisher(config, False, lambda _: None)
        self._publisher._prepare()

    def _query(self) -> None:
        config = config_of(self.world.setup, self.shards)
        self.world.parsed = config.store, config.read
        self._reader = _Reader(self._publisher._options())

    def _micro_batch(self) -> bool:
        this = self.world
        reader = self._reader
        assert reader is not None
        last = max(self.offsets, default=-1)
        if last > self.done:
            number = last
            this.counts["replays"] += 1
        else:
            number = last + 1
            start = self._end_of(last)
            end = reader.latestOffset(start, ReadMaxRows(self.page_rows))
            if end == start:
                return False
            this.point("offsets")
            self.offsets[number] = end
        this.forget()
        this.reached = max(this.reached, self.offsets[number]["position"])
        this.point("planned")
        windows: Any = reader.partitions(self._end_of(number - 1), self.offsets[number])
        self._publisher._micro_batch(_Frame(self, list(windows)), number)
        this.point("remembered")
        self.done = number
        this.lost.clear()
        this.counts["batches"] += 1
        return True

    def _end_of(self, number: int) -> dict[str, int]:
        """Where the next batch starts; Spark asks the source again as long as there was none."""
        assert self._reader is not None
        found = self.offsets.get(number)
        return self._reader.initialOffset() if found is None else found
