"""What every Python process of Spark's needs: few imports, since there are eight of them."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from eventpub.errors import EventpubError

_frozen: list[bool] = []


class SourceError(RuntimeError):
    """Carries an `EventpubError` through Spark, which keeps only the text of an exception."""


@contextmanager
def errors_through_spark(given: Collection[str] = ()) -> Iterator[None]:
    """Raise errors of ours as Spark can pass them on.

    Args:
        given: the options of the source or the sink. Those of a user's own query are named in place
            of the configuration's keys.
    """
    try:
        yield
    except EventpubError as error:
        if "publisher_secret" not in given:
            from eventpub.spark.options import with_options

            error = with_options(error)
        raise SourceError(error.marked()) from error


def collect_no_imports() -> None:
    """For a process of Spark's, which collects garbage after each task: what is alive now, modules
    above all, is not looked at again. That was 80% of what a small batch cost its workers.
    """
    if not _frozen:
        _frozen.append(True)
        gc.collect()
        gc.freeze()
