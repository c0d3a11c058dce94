"""Spark: the data sources `eventstore` and `eventpub`, and the sessions of the publisher's tasks.

What it exports is imported when it is asked for: Spark's workers start in this package and need
none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make the data sources `eventstore` and `eventpub` known to a session.

    Raises:
        ConfigError: spark.speculation: Spark would run two attempts of a task at once.
    """
    from eventpub.errors import ConfigError
    from eventpub.spark.sink import EventpubSink
    from eventpub.spark.source import EventStoreDataSource

    conf: Any = spark.conf
    if str(conf.get("spark.speculation", "false")).lower() == "true":
        raise ConfigError(
            "spark.speculation",
            "spark.speculation is on: two attempts of a task would publish side by side, and one of"
            " them would fail",
            where="spark.speculation",
            suggestion="set spark.speculation to false",
        )
    spark.dataSource.register(EventStoreDataSource)
    spark.dataSource.register(EventpubSink)
