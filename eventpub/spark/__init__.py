"""Spark's data sources and sessions; imports are local, since eight Python processes load this."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from eventpub.errors import ConfigError, EventpubError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register the data sources `eventstore` and `eventpub` with a session.

    Raises:
        ConfigError: spark.speculation: Spark would run two attempts of a task at once.
    """
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


class SourceError(RuntimeError):
    """Carries an `EventpubError` through Spark, which keeps only an exception's text."""


@contextmanager
def errors_through_spark() -> Iterator[None]:
    try:
        yield
    except EventpubError as error:
        raise SourceError(error.marked()) from error


@cache
def collect_no_imports() -> None:
    """Exempt live objects, mostly modules, from garbage collection, which Spark's processes run
    after each task: it was 80% of a small batch's cost."""
    gc.collect()
    gc.freeze()
