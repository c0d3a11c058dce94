"""A streaming query without Spark: calls the reader as Spark's micro-batch execution does."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadMaxRows

from eventpub.spark.source import EventStoreDataSource
from tests.conftest import FreshDatabase

Row = dict[str, Any]


class Query:
    """One query with a checkpoint: `run` does batches, and each is kept with its rows.

    Attributes:
        offsets: the checkpoint's offset log, one a batch.
        batches: the rows of each batch, by shard.
    """

    def __init__(self, database: FreshDatabase, folder: Path, **options: str) -> None:
        self.options = {
            "url": database.url,
            "state": str(folder / "state"),
            "state_dir": str(folder / "local"),
            "delay": "0s",
            "backoff_base": "50ms",
            "max_backoff": "3",
            **options,
        }
        self.offsets: list[Any] = []
        self.batches: list[list[list[Row]]] = []
        self.reader = self._new_reader()

    def _new_reader(self) -> Any:
        source = EventStoreDataSource(self.options)
        return source.streamReader(source.schema())

    def restart(self) -> None:
        """As a driver that starts again: nothing is remembered but the checkpoint."""
        self.reader.stop()
        self.reader = self._new_reader()

    def plan(self) -> bool:
        """Write the next batch to the offset log, if there is one."""
        last = self.offsets[-1] if self.offsets else self.reader.initialOffset()
        offset = self.reader.latestOffset(last, ReadMaxRows(1))
        if offset == last and self.offsets:  # Spark always has a first batch
            return False
        self.offsets.append(offset)
        return True

    def parts(self, batch: int = -1) -> list[Any]:
        """The tasks of a batch."""
        return list(self.reader.partitions(self.reader.initialOffset(), self.offsets[batch]))

    def read(self, part: Any) -> list[Row]:
        """Run a task, in a copy of the reader as in a worker of Spark's."""
        task = pickle.loads(pickle.dumps(self.reader))
        return [
            row
            for batch in task.read(pickle.loads(pickle.dumps(part)))
            for row in batch.to_pylist()
        ]

    def do(self, batch: int = -1) -> list[list[Row]]:
        """Run all tasks of a batch."""
        return [self.read(part) for part in self.parts(batch)]

    def run(self, rows: int = 0, seconds: float = 0.6) -> list[Row]:
        """Batches until there are so many rows and then nothing for so many seconds; their rows."""
        found: list[Row] = []
        patience = time.monotonic() + seconds
        while time.monotonic() < patience + 30.0 * (len(found) < rows):
            if self.plan():
                self.batches.append(self.do())
                self.reader.commit(self.offsets[-1])
                found += [row for part in self.batches[-1] for row in part]
                patience = time.monotonic() + seconds
        return found

    def run_to_the_end(self) -> list[Row]:
        """As the trigger availableNow."""
        self.reader.prepareForTriggerAvailableNow()
        found: list[Row] = []
        while self.plan():
            found += [row for part in self.do() for row in part]
        return found


def events(rows: list[Row]) -> list[tuple[str, int]]:
    """Aggregate and version of rows."""
    return [(row["aggregate_id"], row["version"]) for row in rows]
