"""A job of Spark's whose batch fails, and is repeated with its rows divided in other ways.

python -m tests.spark.redivided FOLDER TOPIC SERVERS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from tests.sink.helpers import read_topic
from tests.spark.job import session, why_failed

ROWS = 12


class Divided(DataSource):
    """One batch of `ROWS` rows, in as many tasks as the option says."""

    @classmethod
    def name(cls) -> str:
        """`divided`"""
        return "divided"

    def schema(self) -> str:
        """Of Kafka's columns."""
        return "key string, value string"

    def streamReader(self, schema: Any) -> DividedReader:  # noqa: N802 (Spark's name)
        """Reads it."""
        return DividedReader(int(self.options["tasks"]), self.options["way"], self.options["topic"])


class DividedReader(DataSourceStreamReader):
    """Where the way is `fails`, its last task does when another has published; `swapped`: the
    tasks have other numbers, and their rows another order."""

    def __init__(self, tasks: int, way: str, topic: str) -> None:
        self._tasks, self._way, self._topic = tasks, way, topic

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Before the batch."""
        return {"at": 0}

    def latestOffset(self, *_: Any) -> dict[str, int]:  # noqa: N802
        """Behind it."""
        return {"at": 1}

    def partitions(self, *_: Any) -> list[InputPartition]:
        """One for each task."""
        return [InputPartition(task) for task in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        if self._way == "fails" and partition.value == self._tasks - 1:
            servers, _, topic = self._topic.rpartition("/")
            has_published = False
            while not has_published:
                with suppress(Exception):  # as there is no topic yet
                    has_published = bool(read_topic(servers, topic))
                time.sleep(0.5)
            raise RuntimeError("the source fails")
        size, is_swapped = ROWS // self._tasks, self._way == "swapped"
        task = self._tasks - 1 - partition.value if is_swapped else partition.value
        numbers = range(task * size, (task + 1) * size)
        in_order = reversed(numbers) if is_swapped else numbers
        keys = pa.array([str(number) for number in in_order])
        yield pa.RecordBatch.from_arrays([keys, keys], ["key", "value"])


def run(spark: SparkSession, sink: dict[str, str], tasks: int, way: str) -> str:
    """Start the query; why it has failed."""
    place = f"{sink['kafka.bootstrap.servers']}/{sink['topic']}"
    options = {"tasks": str(tasks), "way": way, "topic": place}
    rows = spark.readStream.format("divided").options(**options).load()
    return why_failed(rows, sink)


def main(folder: Path, topic: str, servers: str) -> None:
    """Runs the batch until it is done."""
    spark = session({"master": "local[4]"})
    spark.dataSource.register(Divided)
    sink = {"id": topic, "topic": topic, "kafka.bootstrap.servers": servers, "partitions": "2"}
    sink["checkpointLocation"] = str(folder / "checkpoint")
    failed = run(spark, sink, 2, "fails")
    assert "the source fails" in failed, failed
    assert run(spark, sink, 2, "swapped") == ""
    assert run(spark, sink, 4, "as it was") == "", "there is no other batch"
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
