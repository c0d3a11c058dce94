"""The queue of one runner's work.

The coordinator makes one for each start of a runner. So work that was left in it when the runner
ended is gone with it, and reaches no other one.
"""

from __future__ import annotations

import queue

from eventpub.channel.messages import Stop, Work

_IDLE_AFTER = 60.0
"""Seconds without a message after which a runner may do what is due now and then."""


class Lane:
    """See the module.

    Attributes:
        is_stopping: whether the work is to end: asked wherever something may take long, since a
            `Stop` may have much before it.
    """

    def __init__(self) -> None:
        self.is_stopping = False
        self._sent: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

    def send(self, message: Work) -> None:
        """Have it done, after what was sent before; neither waits nor raises."""
        if isinstance(message, Stop):
            self.is_stopping = True
        self._sent.put(message)

    def receive(self) -> Work | None:
        """Wait for the next work; None: `wake` was called, or nothing has come for a while."""
        try:
            return self._sent.get(timeout=_IDLE_AFTER)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Have the `receive` that waits, or the next one, return None."""
        self._sent.put(None)
