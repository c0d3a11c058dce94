"""What every Python process of Spark's needs: few imports, since there are eight of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from eventpub.errors import EventpubError

_frozen: list[bool] = []


class SourceError(RuntimeError):
    """Carries an `EventpubError` through Spark, which keeps only the text of an exception."""


@contextmanager
def errors_through_spark() -> Iterator[None]:
    """Raise errors of ours as Spark can pass them on."""
    try:
        yield
    except EventpubError as error:
        raise SourceError(error.marked()) from error


def collect_no_imports() -> None:
    """For a process of Spark's, which collects garbage after each task: what is alive now, modules
    above all, is not looked at again. That was 80% of what a small batch cost its workers.
    """
    if not _frozen:
        _frozen.append(True)
        gc.collect()
        gc.freeze()
