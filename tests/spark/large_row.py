"""A job of Spark's, set up as for `eventpub run`, with one very large row.

python -m tests.spark.large_row FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from eventpub.spark.rows import DECIDED, grouped, ungrouped
from eventpub.spark.session import new_session
from eventpub.spark.source import GROUP

SIZE = 200 << 20


class Large(DataSource):
    """One row, which the writer compares."""

    @classmethod
    def name(cls) -> str:
        """`large`"""
        return "large"

    def schema(self) -> str:
        """Of groups."""
        return f"{GROUP} binary"

    def reader(self, schema: Any) -> LargeReader:
        """Reads it."""
        return LargeReader()

    def writer(self, schema: Any, overwrite: bool) -> LargeWriter:
        """Compares it."""
        return LargeWriter()


class LargeReader(DataSourceReader):
    """One task."""

    def partitions(self) -> list[InputPartition]:
        """One."""
        return [InputPartition(0)]

    def read(self, _: InputPartition) -> Iterator[pa.RecordBatch]:
        """The row."""
        row = {"aggregate_id": "a", "version": 1, "event_type": "t", "create_time": 1}
        row |= {"late": False, "kind": "event", "payload": bytes(SIZE)}
        yield from grouped([pa.Table.from_pylist([row], schema=DECIDED)], 0)


@dataclass
class Found(WriterCommitMessage):
    """Sizes of payloads."""

    sizes: list[int]


class LargeWriter(DataSourceArrowWriter):
    """Fails unless it gets the row."""

    def __init__(self) -> None:
        pass

    def write(self, iterator: Any) -> Found:
        """Measures the payloads."""
        rows = ungrouped(iterator)
        return Found([len(one.as_buffer()) for batch in rows for one in batch.column("payload")])

    def commit(self, messages: Any) -> None:
        """Compares them."""
        assert [found.sizes for found in messages] == [[SIZE]], messages


def main(folder: Path) -> None:
    """Passes the row."""
    config: Any = SimpleNamespace(
        app=SimpleNamespace(id="large"),
        run=SimpleNamespace(shards=2),
        spark=SimpleNamespace(master="local[2]", properties={"spark.ui.enabled": "false"}),
    )
    state: Any = SimpleNamespace(spark_scratch=folder / "scratch", spark_log=folder / "spark.log")
    spark = new_session(config, state)
    spark.dataSource.register(Large)
    spark.read.format("large").load().write.format("large").mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
