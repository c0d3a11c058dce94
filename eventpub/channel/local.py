"""Both ends of the channel, for runners in threads of the coordinator's process."""

from __future__ import annotations

import queue

from eventpub.channel.lane import (
    IsCurrent,
    Joined,
    Lane,
    Link,
    Lost,
    Post,
    Received,
    superseded,
)
from eventpub.channel.messages import FromRunner, Hello, Lease, Stop, Work

_IDLE_AFTER = 60.0
"""Seconds without a message after which a runner may do what is due now and then."""

_Item = Lease | Work


class _Wake:
    """Ends a wait."""


_WAKE = _Wake()


class LocalLane(Lane):
    """See `Lane`."""

    def __init__(self, hello: Hello) -> None:
        super().__init__(hello)
        self.sent: queue.SimpleQueue[_Item | _Wake] = queue.SimpleQueue()
        self.is_stopping = False

    def send(self, message: Lease | Work) -> None:
        if isinstance(message, Stop):
            self.is_stopping = True
        self.sent.put(message)


class LocalLink(Link):
    """A runner's end in the coordinator's process.

    Args:
        hello: who connects.
        post: takes what is reported.
        is_current: see `IsCurrent`.
    """

    def __init__(self, hello: Hello, post: Post, is_current: IsCurrent) -> None:
        self._lane = LocalLane(hello)
        self._post = post
        self._is_current = is_current
        self._lease = 0
        post(Joined(self._lane))

    def _next(self) -> _Item | None:
        try:
            found = self._lane.sent.get(timeout=_IDLE_AFTER)
        except queue.Empty:
            return None
        return None if isinstance(found, _Wake) else found

    def wake(self) -> None:
        self._lane.sent.put(_WAKE)

    def send(self, message: FromRunner) -> None:
        self._post(Received(self._lane, message))

    def confirm(self) -> None:
        if not self._is_current(self._lane.shard, self._lease):
            raise superseded(self._lane.shard)

    @property
    def is_stopping(self) -> bool:
        return self._lane.is_stopping

    def lose(self) -> None:
        """Its thread has ended without a farewell."""
        self._post(Lost(self._lane))
