"""`eventpub run` with the engine Spark, and without Spark: a stand-in does what micro-batches do.

One process, a thread for each task, no JVM: a start takes a second. Checkpoint, tasks that are
tried four times, batches that are repeated after a restart, availableNow and what the driver's
processes may log are as with Spark. What is Spark's own (its workers, its recovery, how rows get
from source to sink) is tested with Spark.
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pyspark.sql.streaming.datasource import ReadAllAvailable

from eventpub.spark.sink import EventpubSink
from eventpub.spark.source import EventStoreDataSource
from eventpub.state_files import replace_file

_ATTEMPTS = 4


class _Context:
    """What a task knows of itself."""

    def __init__(self, batch: int, part: int, attempt: int) -> None:
        self._part, self._attempt = part, attempt
        self._properties = {"streaming.sql.batchId": str(batch), "sql.streaming.queryId": "here"}

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 (Spark's name)
        return self._properties.get(name)

    def partitionId(self) -> int:  # noqa: N802 (Spark's name)
        return self._part

    def attemptNumber(self) -> int:  # noqa: N802 (Spark's name)
        return self._attempt


_task = threading.local()


class StandIn:
    """A streaming query."""

    def __init__(self, options: dict[str, str], checkpoint: Path, every: float | None) -> None:
        self._offsets, self._commits = checkpoint / "offsets", checkpoint / "commits"
        for folder in (self._offsets, self._commits):
            folder.mkdir(parents=True, exist_ok=True)
        self._options, self._every = options, every
        self._stopping = False
        self._error: Exception | None = None
        self.lastProgress: Any = None
        self.status = {"message": "Waiting for data to arrive"}
        self._thread = threading.Thread(target=self._run, name="spark-driver", daemon=True)
        self._thread.start()

    @property
    def isActive(self) -> bool:  # noqa: N802 (Spark's name)
        return self._thread.is_alive()

    def exception(self) -> Exception | None:
        return self._error

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(2)

    def _run(self) -> None:
        source = EventStoreDataSource(self._options)
        self._schema = source.schema()
        reader: Any = source.streamReader(self._schema)
        try:
            self._batches(reader)
        except Exception as error:
            self._error = error
        finally:
            reader.stop()

    def _batches(self, reader: Any) -> None:
        number, done = _last(self._offsets), _last(self._commits)
        if self._every is None:
            reader.prepareForTriggerAvailableNow()
        if number < 0:
            end = reader.initialOffset()
        else:
            end = json.loads((self._offsets / str(number)).read_text())
        if number > done:
            before = json.loads((self._offsets / str(done)).read_text()) if done >= 0 else end
            self._batch(reader, number, before, end)
        while not self._stopping:
            start, end = end, reader.latestOffset(end, ReadAllAvailable())
            if end != start or number < 0:
                number += 1
                replace_file(self._offsets / str(number), json.dumps(end))
                self._batch(reader, number, start, end)
            elif self._every is None:
                return
            time.sleep(self._every or 0)

    def _batch(self, reader: Any, number: int, start: Any, end: Any) -> None:
        self.status = {"message": "Processing new data"}
        sink: Any = EventpubSink(self._options)
        writer = sink.streamWriter(SimpleNamespace(names=[self._schema.split()[0]]), False)
        parts = list(enumerate(reader.partitions(start, end)))

        def task(at: int, part: Any) -> Any:
            for attempt in range(_ATTEMPTS):
                _task.context = _Context(number, at, attempt)
                try:
                    copy, into = pickle.loads(pickle.dumps((reader, writer)))
                    return into.write(copy.read(pickle.loads(pickle.dumps(part))))
                except Exception:
                    if attempt + 1 == _ATTEMPTS:
                        raise
            raise AssertionError

        with ThreadPoolExecutor(len(parts), thread_name_prefix="spark-task") as pool:
            found = list(pool.map(lambda each: task(*each), parts))
        if self._stopping:
            return
        writer.commit(found, number)
        replace_file(self._commits / str(number), "{}")
        self.lastProgress = SimpleNamespace(sources=[SimpleNamespace(endOffset=json.dumps(end))])
        self.status = {"message": "Waiting for data to arrive"}
        reader.commit(end)


def _last(folder: Path) -> int:
    return max((int(f.name) for f in folder.iterdir() if f.name.isdigit()), default=-1)


class Session:
    """What `eventpub run` uses of a session, from `readStream` to `start`."""

    sparkContext = SimpleNamespace(uiWebUrl="", master="local[2]")  # noqa: N815 (Spark's name)

    def __init__(self) -> None:
        self._options: dict[str, str] = {}
        self._every: float | None = None

    readStream = writeStream = property(lambda self: self)  # noqa: N815 (Spark's names)

    def format(self, _: str) -> Session:
        return self

    load = queryName = lambda self, *_: self  # noqa: N815

    def option(self, name: str, value: str) -> Session:
        self._options[name] = value
        return self

    def trigger(self, **given: Any) -> Session:
        text = given.get("processingTime")
        self._every = None if text is None else float(text.split()[0])
        return self

    def start(self) -> StandIn:
        folder = Path(self._options.pop("checkpointLocation"))
        return StandIn(dict(self._options), folder, self._every)


def new_session(*_: Any) -> Session:
    """In place of Spark; what its processes log is not the publisher's log."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not str(record.threadName).startswith("spark-"))
    return Session()


def main() -> int:
    """As the installed command."""
    from eventpub.__main__ import main as command

    context = SimpleNamespace(get=lambda: _task.context)
    with (
        patch("eventpub.spark.session.new_session", new_session),
        patch("eventpub.spark.session.make_active", lambda _: None),
        patch("eventpub.spark.session.is_alive", lambda session: session is not None),
        patch("eventpub.spark.session.end_session", lambda *, kills: None),
        patch("eventpub.spark.sink_task.TaskContext", context),
        patch("eventpub.spark.rows.require_whole_input", lambda: None),
        patch("eventpub.spark.source.collect_no_imports", lambda: None),
        patch("eventpub.spark.sink.collect_no_imports", lambda: None),
    ):
        return command()


if __name__ == "__main__":
    sys.exit(main())
