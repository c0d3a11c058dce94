"""What is said of an error that Spark has met."""

from __future__ import annotations

from eventpub.errors import SinkError
from eventpub.spark.session import error_of

CALL = "An error occurred while calling o225.start.\n: "


def test_the_cause_of_a_start_that_has_failed_is_said() -> None:
    cause = "java.lang.IllegalArgumentException: Cannot start query with name orders"
    found = error_of(RuntimeError(f"{CALL}{cause}\n\tat org.apache.spark.sql"))
    assert (found.code, found.message) == ("shard.failed", f"the query failed: {cause}")


def test_a_full_disk_that_spark_has_met_is_named() -> None:
    found = error_of(RuntimeError(f"{CALL}java.io.IOException: No space left on device"))
    assert (found.code, found.retriable) == ("state.disk_full", True)


def test_an_error_of_a_task_is_the_one_that_it_has_met() -> None:
    error = SinkError("sink.unreachable", "no answer", retriable=True)
    assert error_of(RuntimeError(f"{CALL}{error.marked()}")).code == "sink.unreachable"
