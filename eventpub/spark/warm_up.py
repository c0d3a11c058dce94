"""A stream like the publisher's, without a store and a sink: what it loads is worth archiving."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from eventpub.config import App, Config, Sink, Spark, Store
from eventpub.spark.session import Session


class Ticks(DataSource):
    """One row a batch."""

    @classmethod
    def name(cls) -> str:
        """`ticks`"""
        return "ticks"

    def schema(self) -> str:
        """Like a window's."""
        return "shard int"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        """The reader."""
        return _Ticking()


class _Ticking(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"tick": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        del limit
        return {"tick": start["tick"] + 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        del start, end
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"shard": pa.array([partition.value], pa.int32())})


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"report": [str(row) for row in batch.to_pylist()]})


def stream_a_little(archive: Path) -> None:
    """Five micro-batches, then the JVM ends and writes the archive."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            app=App(id="warm-up", state_dir=Path(folder)),
            store=Store.model_validate({"url": "mysql+pymysql://nobody@localhost/none"}),
            sink=Sink(topic="none"),
            spark=Spark(shards=1),
        )
        seen: list[int] = []

        def batch(rows: DataFrame, number: int) -> None:
            rows.mapInArrow(_same, "report string").collect()
            seen.append(number)

        with Session(config, Path(folder) / "spark.log", archive=archive) as spark:
            spark.dataSource.register(Ticks)
            query = (
                spark.readStream.format("ticks")
                .load()
                .writeStream.foreachBatch(batch)
                .option("checkpointLocation", f"{folder}/checkpoint")
                .start()
            )
            while len(seen) < 5 and not query.awaitTermination(1):
                continue
            query.stop()
