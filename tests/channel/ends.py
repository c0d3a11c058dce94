"""A coordinator that keeps what happens on the channel."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TypeVar

from eventpub.channel.lane import ChannelEvent, Joined, Lane

T = TypeVar("T", bound=ChannelEvent)

SOON = 20.0
"""Seconds, at most, for what takes a moment."""


class Coordinator:
    """Keeps what happens on the channel; a lease is in force where a test says so."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[ChannelEvent] = queue.SimpleQueue()
        self.leases: set[tuple[int, int]] = set()

    def is_current(self, shard: int, lease: int) -> bool:
        return (shard, lease) in self.leases

    def next(self, kind: type[T], timeout: float = SOON) -> T:
        """The next event, which is of this kind."""
        event = self.events.get(timeout=timeout)
        assert isinstance(event, kind), event
        return event

    def joined(self) -> Lane:
        """The lane of the runner that connects next."""
        return self.next(Joined).lane

    def nothing_happens(self, seconds: float = 0.2) -> bool:
        try:
            self.events.get(timeout=seconds)
        except queue.Empty:
            return True
        return False


def until(happens: Callable[[], bool], seconds: float = SOON) -> bool:
    """Waits until something is so; whether it is."""
    deadline = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
