"""A job of Spark's whose source dies in the middle of its first task.

python -m tests.spark.cut_off FOLDER TOPIC SERVERS raises|killed
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

ROWS, PART = 150_000, 30_000


class Dying(DataSource):
    """One batch of `ROWS` rows."""

    @classmethod
    def name(cls) -> str:
        """`dying`"""
        return "dying"

    def schema(self) -> str:
        """Of Kafka's columns."""
        return "key string, value string"

    def streamReader(self, schema: Any) -> DyingReader:  # noqa: N802 (Spark's name)
        """Reads it."""
        return DyingReader(Path(self.options["marker"]), self.options["how"])


class DyingReader(DataSourceStreamReader):
    """Its first attempt ends before the last part."""

    def __init__(self, marker: Path, how: str) -> None:
        self._marker, self._how = marker, how

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Before the batch."""
        return {"at": 0}

    def latestOffset(self, *_: Any) -> dict[str, int]:  # noqa: N802
        """Behind it."""
        return {"at": 1}

    def partitions(self, *_: Any) -> list[InputPartition]:
        """One."""
        return [InputPartition(0)]

    def read(self, _: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows, but for the last part at the first time."""
        is_first = not self._marker.exists()
        self._marker.touch()
        for begin in range(0, ROWS, PART):
            if is_first and begin + PART == ROWS:
                if self._how == "raises":
                    raise RuntimeError("the source fails")
                os.kill(os.getpid(), 9)
            keys = pa.array([str(n) for n in range(begin, begin + PART)])
            yield pa.RecordBatch.from_arrays([keys, keys], ["key", "value"])


def main(folder: Path, topic: str, servers: str, how: str) -> None:
    """Runs the batch."""
    import eventpub.spark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    eventpub.spark.register(spark)
    spark.dataSource.register(Dying)
    rows = spark.readStream.format("dying").option("marker", str(folder / "tried"))
    query = (
        rows.option("how", how)
        .load()
        .writeStream.format("eventpub")
        .option("id", topic)
        .option("topic", topic)
        .option("kafka.bootstrap.servers", servers)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
