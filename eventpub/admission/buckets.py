"""Buckets, seconds of `create_time`: rows are counted, and counted again, by bucket."""

from __future__ import annotations

WIDTH = 1_000_000
"""µs of a bucket: bucket b has the rows of ``b * WIDTH < create_time <= (b + 1) * WIDTH``."""

KEPT = 86_400
"""Buckets, at most, whose numbers of rows are kept below the horizon: a day. What is older and is
counted all the same is compared key by key."""


def bucket_of(create_time: int) -> int:
    """The number of a row's bucket."""
    return (create_time - 1) // WIDTH


def window_of(bucket: int, position: int) -> tuple[int, int]:
    """What of a bucket lies up to a position: ``(after, upto]``, µs."""
    after = bucket * WIDTH
    return after, max(after, min(after + WIDTH, position))


def oldest_needed(now: int, horizon: int, *since: int | None) -> int:
    """The first bucket whose number of accounted rows may still be wanted; µs.

    Args:
        now: the database's time.
        horizon: of the recount.
        since: other times from which on rows may be counted: what open transactions hide; None:
            there is none.
    """
    oldest = bucket_of(min([now - horizon, *(at for at in since if at is not None)]))
    return max(oldest, bucket_of(now - horizon) - KEPT)
