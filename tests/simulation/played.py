"""Schedules for what random ones come to too rarely: played through with each moment of waking up.

Each is for a mutant, which has to be caught by one of them at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from tests.simulation.schedule import Schedule
from tests.simulation.world import Order, Setup


def stalled_before_kafka_knew_of_it() -> Iterator[Schedule]:
    """A publisher is frozen before its runner takes its shard, another one starts with another
    number of shards, and the runner goes on for a while at one point of that start, and to its end
    at another: neither fences the other.
    """
    wakes = [("kafka.init", 1), ("kafka.taken", 2), ("task", 1), ("store.window", 1)]
    ends = ["kafka.flush", "kafka.commit", "before_index"]
    for turn, (wake, hit), points, end in product((0, 1), wakes, range(0, 12, 2), ends):
        goes_on = [[wake, hit, ["resume", 0, points]], [end, 1, ["resume", 0, None]]]
        yield Schedule(
            Setup(partitions=2, executors=2),
            [
                ["batch", 0, 0, []],
                ["time", 1],
                ["write", 9, 0, 0, 1],
                ["write", 9, 1, 0, 1],
                ["commit", 9],
                ["batch", 1, 0, [["kafka.init", 1, ["stall"]], ["tasks done", 1, ["crash"]]]],
                ["restart", 2],
                ["batch", 0, turn, goes_on],
            ],
        )


def never_reports() -> Iterator[Schedule]:
    """One of two shards has never reported when the publisher stops, and the indexes are lost."""
    orders: list[Order] = ["", "prompt", "late"]
    for stall, turn, order in product(range(1, 5), (0, 1), orders):
        yield Schedule(
            Setup(partitions=2, shards=2, horizon=8_000_000, executors=2, order=order),
            [
                *(["write", 9, aggregate, 0, 1] for aggregate in range(3)),
                ["commit", 9],
                ["time", 30_000_000],
                ["batch", 0, turn, [["kafka.init", stall, ["stall"]]]],
                ["look"],
                ["restart", 0],
                ["lose", 0],
                ["lose", 1],
                ["batch", 0, 0, []],
            ],
        )


PLAYED: dict[str, tuple[Callable[[], Iterator[Schedule]], str]] = {
    "any_end": (stalled_before_kafka_knew_of_it, "repeated"),
    "some_reports": (never_reports, "lost"),
}
"""By mutant: the schedules, and what it makes of some of them."""
