"""Publishing while Spark starts: by the driver itself, until Spark's first micro-batch.

A Spark that runs on this machine needs 8 s from the start of the process to its first window, and
twice that beside a full load: a JVM, eight Python processes to find the source, another one to fork
workers from. None of it is needed to publish. So the driver plans windows with the same source and
runs the same tasks in threads, one window after the other, and stops before Spark's first batch
begins, which fences it like any other task before.

Only where less than a page of rows waits. Of a long backlog the first seconds are not missed, and
Spark starts faster with the machine to itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from eventpub.spark import failpoint
from eventpub.spark.source import EventStoreStreamReader, Window

FIRST = -1_000_000
"""Number of its first batch; Spark's begin with 0."""

_PAUSE = 0.2
"""Seconds between two windows: each opens index, connections and producer anew."""

Tasks: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What Spark's tasks do with the windows of one partition; see `publisher`."""


class HeadStart:
    """A thread that publishes until `end`, or until anything goes wrong: then Spark meets it, too.

    Args:
        options: of the source.
        publish: does one batch, of a number, by a function that runs its tasks and returns what
            they report; raises what they met.
        look: what the driver else does once a second, meanwhile.
        failed: called with the error that ended it too early.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        publish: Callable[[int, Callable[[Tasks], list[Any]]], None],
        look: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._reader = EventStoreStreamReader(options)
        self._publish = publish
        self._look = look
        self._failed = failed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eventpub-head-start", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it may still publish."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Let the window in work be finished, and wait for it."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._publish_windows()
        except Exception as error:
            self._failed(error)
        finally:
            self._reader.stop()

    def _publish_windows(self) -> None:
        reader, number = self._reader, FIRST
        position = reader.initialOffset()
        looked = 0.0
        while not self._ended.is_set():
            end = reader.latestOffset(position, reader.getDefaultReadLimit())
            if end != position:
                windows = reader.partitions(position, end)
                if number == FIRST and any(w.more for w in windows if isinstance(w, Window)):
                    return
                self._publish(number, partial(self._in_threads, windows))
                position = end
                number += 1
            if time.monotonic() - looked >= 1.0:
                looked = time.monotonic()
                self._look()
            self._ended.wait(_PAUSE)

    def _in_threads(self, windows: Sequence[InputPartition], tasks: Tasks) -> list[Any]:
        def run(window: InputPartition) -> list[Any]:
            reports = list(tasks(self._reader.read(window)))
            return [json.loads(str(text)) for b in reports for text in b["report"].to_pylist()]

        names = failpoint.named, ("head_start",)
        with ThreadPoolExecutor(len(windows), "eventpub-shard", *names) as pool:
            return [outcome for found in pool.map(run, windows) for outcome in found]
