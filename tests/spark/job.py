"""A user's own job on the source `eventstore`, in a process of its own.

    python -m tests.spark.job '{"source": {…}, "sink": "parquet", "out": …, "checkpoint": …}'

Other keys: `master`, `trigger` ("once" for availableNow, or seconds), `conf`. Writes `ready` into
`out` + ".ready" when the query has started.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import eventpub.spark

os.environ["PYSPARK_PYTHON"] = sys.executable


def session(job: dict[str, Any]) -> SparkSession:
    """A small Spark with what the documentation recommends."""
    builder = (
        SparkSession.builder.master(job.get("master", "local[2,4]"))
        .appName("job")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.memory", "700m")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.pollingDelay", "10ms")
    )
    for name, value in job.get("conf", {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    eventpub.spark.register(spark)
    return spark


def into_sql(url: str) -> Any:
    """foreachBatch: the rows of a batch and its number in one transaction."""
    import sqlalchemy as sa

    def write(batch: DataFrame, number: int) -> None:
        rows = batch.select("aggregate_id", "version", "late").collect()
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            known = connection.execute(
                sa.text("SELECT COUNT(*) FROM batches WHERE id = :n"), {"n": number}
            )
            if not known.scalar_one():
                connection.execute(sa.text("INSERT INTO batches VALUES (:n)"), {"n": number})
                for at, row in enumerate(rows):
                    connection.execute(
                        sa.text("INSERT INTO out_events VALUES (:b, :n, :a, :v)"),
                        {"b": number, "n": at, "a": row["aggregate_id"], "v": row["version"]},
                    )
        engine.dispose()

    return write


def into_delta(folder: str) -> Any:
    """foreachBatch: appended by deltalake, with the batch's number as the writer's transaction."""
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    def write(batch: DataFrame, number: int) -> None:
        rows = batch.toArrow()
        if DeltaTable.is_deltatable(folder):
            last = DeltaTable(folder).transaction_version("job")
            if last is not None and last >= number:
                return
        properties = CommitProperties(app_transactions=[Transaction("job", number)])
        write_deltalake(folder, rows, mode="append", commit_properties=properties)

    return write


def main(job: dict[str, Any]) -> None:
    """Start the query, and run until it ends."""
    spark = session(job)
    rows = spark.readStream.format("eventstore").options(**job["source"]).load()
    writer = rows.writeStream.option("checkpointLocation", job["checkpoint"])
    out = job["out"]
    if job["sink"] == "parquet":
        writer = writer.format("parquet").option("path", out)
    elif job["sink"] == "sql":
        writer = writer.foreachBatch(into_sql(out))
    elif job["sink"] == "delta":
        writer = writer.foreachBatch(into_delta(out))
    else:
        writer = writer.format(job["sink"]).options(**job.get("sink_options", {}))
    trigger = job.get("trigger", "once")
    if trigger == "once":
        query = writer.trigger(availableNow=True).start()
    else:
        query = writer.trigger(processingTime=trigger).start()
    Path(job["ready"]).write_text("ready") if "ready" in job else None
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
