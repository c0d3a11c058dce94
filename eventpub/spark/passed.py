"""Where rows have become visible behind the windows: transactions that ended after the boundary
had stopped waiting for them.

The source sees which transactions are open, and the driver counts; a file goes between them. What
the driver has not read yet, the source keeps and reports again at each poll; how old it is counts
like something open (`Bounds.hidden_since`), so that the next start would count it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from eventpub.spark.recount import WIDTH, bucket_of


class Passed:
    """The source's side: adds to the file; what a full disk refuses is tried again.

    Args:
        file: a list of ``[first bucket, last, number]``; numbers grow. It stays when the publisher
            ends: what was reported just before counts after the next start.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._told = told(file)
        self._is_written = True

    @property
    def since(self) -> int | None:
        """Nothing of what the driver has not heard yet was created at or before, µs."""
        return min((first * WIDTH for first, _ in self._told), default=None)

    def add(self, ranges: Iterable[tuple[int, int]], heard: int = 0) -> None:
        """Report the buckets of ranges ``(after, upto]``, µs.

        Args:
            heard: the highest number that the driver has heard.
        """
        number = max(time.time_ns(), heard + 1, *(n + 1 for n in self._told.values()))
        kept = {buckets: n for buckets, n in self._told.items() if n > heard}
        kept |= {(bucket_of(after + 1), bucket_of(upto)): number for after, upto in ranges}
        if kept == self._told and self._is_written:
            return
        self._told, self._is_written = kept, False
        partial = self._file.with_suffix(".passing")
        with suppress(OSError):
            partial.write_text(json.dumps([[*b, n] for b, n in kept.items()]))
            partial.rename(self._file)
            self._is_written = True


def told(file: Path) -> dict[tuple[int, int], int]:
    """What the file says, by first and last bucket: where the number has changed since, rows may
    have come."""
    try:
        return {(first, last): number for first, last, number in json.loads(file.read_text())}
    except (OSError, ValueError):  # ValueError: what a disk that went away has left of it
        return {}
