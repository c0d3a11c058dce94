"""Tells the end of a Spark task's rows from a source that failed."""

from __future__ import annotations

import sys
from typing import Any

from pyspark.serializers import SpecialLengths

from eventpub.errors import SinkError

_END = int(SpecialLengths.END_OF_STREAM).to_bytes(4, "big", signed=True)


def require_whole_input() -> None:
    """Check in a sink's `write` that its iterator ended with the last row.

    If the source fails, Spark closes the stream to the sink's Python worker, a second before
    killing it, and Arrow's reader takes end of file for the end of the rows (pyspark 4.3). After
    the last row of a completed task, Spark writes a number.

    Raises:
        SinkError: sink.rows_cut_off; or sink.spark_unknown, if it cannot be determined.
    """
    stream = _stream()
    if stream is None:
        raise SinkError(
            "sink.spark_unknown",
            "with this version of Spark, the sink cannot tell whether it has received all rows of a"
            " task",
            suggestion="install pyspark 4.3, with which this version of eventpub is tested",
        )
    found = stream.peek(len(_END))[: len(_END)]
    if not found or not _END.startswith(found):
        raise SinkError(
            "sink.rows_cut_off",
            "the input of a task ended early because its source failed; none of its rows were"
            " published",
            suggestion="nothing to do: Spark retries the task. The source's own error says why",
            retriable=True,
        )


def _stream() -> Any:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and "infile" in frame.f_locals:
            return frame.f_locals["infile"]
        frame = frame.f_back
    return None
