"""A user's own job on the source `eventstore`, or another, in a process of its own.

    python -m tests.spark.job '{"source": {…}, "sink": "parquet", "out": …, "checkpoint": …}'

Other keys: `master`, `trigger` ("once" for availableNow, or seconds), `conf`, `format` of the
source, `select` of its rows, `sink_options`, and `beside`: another query's sink and checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

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


def why_failed(rows: DataFrame, sink: dict[str, str]) -> str:
    """Publish all rows; why it has failed, "" if it has not."""
    query = rows.writeStream.format("eventpub").options(**sink).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        return str(error)
    return ""


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


def start(rows: DataFrame, job: dict[str, Any]) -> StreamingQuery:
    """Start a query."""
    writer = rows.writeStream.option("checkpointLocation", job["checkpoint"])
    if job["sink"] == "parquet":
        writer = writer.format("parquet").option("path", job["out"])
    elif job["sink"] == "sql":
        writer = writer.foreachBatch(into_sql(job["out"]))
    elif job["sink"] == "delta":
        writer = writer.foreachBatch(into_delta(job["out"]))
    else:
        writer = writer.format(job["sink"]).options(**job["sink_options"])
    if job["trigger"] == "once":
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=job["trigger"]).start()


def main(job: dict[str, Any]) -> None:
    """Start the queries, and run until they, or the first one, end."""
    spark = session(job)
    rows = spark.readStream.format(job.get("format", "eventstore")).options(**job["source"]).load()
    if "select" in job:
        rows = rows.selectExpr(*job["select"])
    queries = [start(rows, job)]
    if "beside" in job:
        queries.append(start(rows, job | job["beside"]))
    if job["trigger"] != "once":
        spark.streams.awaitAnyTermination()
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
