"""Where rows have become visible behind the windows: what ended that the boundary had passed by.

The source sees which transactions are open, and the driver counts; a file goes between them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from eventpub.spark.recount import bucket_of

_KEPT = 600
"""Seconds for which a time bucket is told: the driver may wait for the database meanwhile."""


class Passed:
    """The source's side: adds to the file; a full disk is none of its business.

    Args:
        file: a list of ``[first bucket, last, ns]``, the latter when it was told last. It stays
            when the publisher ends: what was told just before counts after the next start.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._told = told(file)

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Tell of the buckets of ranges ``(after, upto]``, µs."""
        now = time.time_ns()
        self._told = {b: at for b, at in self._told.items() if abs(now - at) < _KEPT * 1e9}
        for after, upto in ranges:
            self._told[bucket_of(after + 1), bucket_of(upto)] = now
        partial = self._file.with_suffix(".passing")
        with suppress(OSError):
            partial.write_text(json.dumps([[*b, at] for b, at in self._told.items()]))
            partial.rename(self._file)


def told(file: Path) -> dict[tuple[int, int], int]:
    """What the file says, by first and last bucket: where the number has changed since, rows may
    have come."""
    try:
        return {(first, last): at for first, last, at in json.loads(file.read_text())}
    except (OSError, ValueError):  # ValueError: what a disk that went away has left of it
        return {}
