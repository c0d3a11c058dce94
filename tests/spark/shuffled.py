"""Jobs of Spark's that shuffle the source's rows.

python -m tests.spark.shuffled FOLDER URL TOPIC SERVERS
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame

from tests.spark.job import session, why_failed


def run(rows: DataFrame, folder: Path, topic: str, servers: str) -> str:
    """Publish all; why it has failed."""
    sink = {"id": topic, "topic": topic, "kafka.bootstrap.servers": servers}
    sink |= {"checkpointLocation": str(folder / "checkpoint"), "partitions": "4"}
    return why_failed(rows, sink)


def main(folder: Path, url: str, topic: str, servers: str) -> None:
    """Publish a table in three ways."""
    spark = session({"master": "local[4]", "conf": {"spark.sql.adaptive.enabled": "false"}})

    def source(way: str) -> DataFrame:
        options = {"url": url, "state": str(folder / way / "state"), "shards": "2", "delay": "0s"}
        options["state_dir"] = str(folder / way / "local")
        return spark.readStream.format("eventstore").options(**options).load()

    failed = run(source("round").repartition(4), folder / "round", f"{topic}-round", servers)
    assert "config.invalid_value" in failed, failed
    assert "of 'a-" in failed, failed
    for way, rows in (
        ("by_aggregate", source("by_aggregate").repartition(4, "aggregate_id")),
        ("coalesce", source("coalesce").coalesce(1)),
    ):
        failed = run(rows, folder / way, f"{topic}-{way}", servers)
        assert not failed, failed
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
