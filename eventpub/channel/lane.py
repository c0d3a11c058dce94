"""The two ends of one runner's connection: a `Lane` at the coordinator, a `Link` at the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from eventpub.channel.messages import FromRunner, Hello, Lease, Stop, Work
from eventpub.errors import StateError


class Lane(ABC):
    """The coordinator's end. Its methods neither wait nor raise.

    Args:
        hello: who has connected.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = hello

    @property
    def shard(self) -> int:
        """The shard that it is about."""
        return self.hello.shard

    @abstractmethod
    def send(self, message: Lease | Work) -> None:
        """Have it delivered, after what was sent before; lost with the connection."""


class Link(ABC):
    """A runner's end."""

    _lease = 0

    @abstractmethod
    def _next(self) -> Lease | Work | None:
        """Wait for what comes next; None: `wake` was called, or nothing has come for a while."""

    def lease(self) -> Lease | None:
        """Wait for the lease of the shard; None: there is none to be had any more."""
        while not isinstance(found := self._next(), Lease):
            if isinstance(found, Stop):
                return None
        self._lease = found.number
        return found

    def receive(self) -> Work | None:
        """Wait for the next work; None: `wake` was called, or nothing has come for a while."""
        found = self._next()
        assert not isinstance(found, Lease)
        return found

    @abstractmethod
    def wake(self) -> None:
        """Have the `receive` that waits, or the next one, return None."""

    @abstractmethod
    def send(self, message: FromRunner) -> None:
        """Send a report."""

    @abstractmethod
    def confirm(self) -> None:
        """Ask whether the lease is still this runner's.

        Raises:
            StateError: run.superseded
        """

    @property
    @abstractmethod
    def is_stopping(self) -> bool:
        """Whether the work is to end: asked wherever something may take long."""


@dataclass(frozen=True)
class Joined:
    """A runner has connected and wants the lease of its shard."""

    lane: Lane


@dataclass(frozen=True)
class Received:
    """A runner has said something."""

    lane: Lane
    message: FromRunner


@dataclass(frozen=True)
class Lost:
    """A runner has ended without a farewell."""

    lane: Lane


ChannelEvent: TypeAlias = Joined | Received | Lost
Post: TypeAlias = Callable[[ChannelEvent], None]
"""Takes what happens on the channel; called from any thread."""

IsCurrent: TypeAlias = Callable[[int, int], bool]
"""Whether a shard's lease, by its number, is the one in force; called from any thread."""


def disconnected(why: str) -> StateError:
    """The coordinator hears nothing more of a runner."""
    return StateError(
        "run.disconnected",
        f"a shard's connection to the publisher's coordinator was lost: {why}",
        suggestion="nothing to do: the shard is started again",
        retriable=True,
    )


def superseded(shard: int) -> StateError:
    """Somebody else has the shard by now."""
    return StateError(
        "run.superseded",
        f"shard {shard} was given to another runner while this one stalled",
        suggestion="nothing to do: this one publishes nothing more, the other goes on",
        retriable=True,
    )
