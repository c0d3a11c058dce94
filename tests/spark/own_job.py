"""A user's own job on the `eventstore` source: prints what it reads as JSON lines."""

import json
import os
import sys

from pyspark.sql import DataFrame, SparkSession

from eventpub.spark import EventStoreDataSource

os.environ["PYSPARK_PYTHON"] = sys.executable


def main(url: str, checkpoint: str) -> None:
    """Read everything up to the boundary, in pages of 10 rows and two partitions."""
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    spark.dataSource.register(EventStoreDataSource)
    events = (
        spark.readStream.format("eventstore")
        .option("url", url)
        .option("delay", "100ms")
        .option("page_rows", "10")
        .option("shards", "2")
        .load()
    )
    print(json.dumps({"schema": events.schema.simpleString()}))

    def show(batch: DataFrame, number: int) -> None:
        for row in batch.filter("version > 1").collect():
            event = row.asDict() | {"batch": number, "payload": bytes(row["payload"]).decode()}
            print(json.dumps(event, default=str), flush=True)

    query = (
        events.writeStream.foreachBatch(show)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
