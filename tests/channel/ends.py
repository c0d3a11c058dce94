"""Both ends of a channel, in one process or over the network, and what has come of it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from eventpub.channel import Hello
from eventpub.channel.flight import FlightLink, Server
from eventpub.channel.lane import ChannelEvent, Joined, Lane, Link
from eventpub.channel.local import LocalLink
from eventpub.errors import StateError

T = TypeVar("T", bound=ChannelEvent)

TOKEN = "the token of the run"
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


@contextmanager
def serving(coordinator: Coordinator, **server: Any) -> Iterator[Server]:
    """A server on loopback."""
    served = Server(
        "127.0.0.1",
        TOKEN,
        coordinator.events.put,
        coordinator.is_current,
        **server,
    )
    try:
        yield served
    finally:
        served.end()


Connect = Callable[[int], Link]


@contextmanager
def channel(kind: str, coordinator: Coordinator) -> Iterator[Connect]:
    """Connects runners of shards, by a channel of a kind."""
    if kind == "local":
        yield lambda shard: LocalLink(
            Hello(shard, 7, "here"), coordinator.events.put, coordinator.is_current
        )
        return
    links: list[FlightLink] = []

    def connect(shard: int) -> Link:
        links.append(FlightLink(address, Hello(shard, 7, "here")))
        return links[-1]

    with serving(coordinator) as server:
        address = server.address("127.0.0.1", TOKEN)
        try:
            yield connect
        finally:
            for link in links:
                link.close()


def failure(does: Callable[[], object]) -> StateError:
    """What it raises, at last."""
    while True:
        try:
            does()
        except StateError as error:
            return error


def until(happens: Callable[[], bool], seconds: float = SOON) -> bool:
    """Waits until something is so; whether it is."""
    deadline = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
