"""Where runners run. Threads of this process are the first, and the last resort."""

from __future__ import annotations

import gc
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from eventpub import failpoint
from eventpub.channel import Hello
from eventpub.channel.lane import IsCurrent
from eventpub.channel.local import LocalLink
from eventpub.coordinator import events as e
from eventpub.shard.assignment import Assignment
from eventpub.shard.runner import serve


class Placement(ABC):
    """Starts runners, which connect to the coordinator by themselves."""

    @abstractmethod
    def start(self, assignment: Assignment, shard: int, attempt: int) -> None:
        """Start a runner of a shard. When it is over, `RunnerEnded` is posted. Does not wait."""

    def end_runner(self, shard: int, attempt: int) -> None:
        """End a runner that says nothing any more, by force; a thread cannot be ended."""
        del shard, attempt


class Threads(Placement):
    """Runners in threads of this process.

    Args:
        post: takes what happens.
        is_current: see `IsCurrent`.
    """

    def __init__(self, post: Callable[[e.Event], None], is_current: IsCurrent) -> None:
        self._post = post
        self._is_current = is_current

    def start(self, assignment: Assignment, shard: int, attempt: int) -> None:
        threading.Thread(
            target=self._run,
            args=(assignment, shard, attempt),
            name=f"eventpub-shard-{shard}",
            daemon=True,
        ).start()

    def _run(self, assignment: Assignment, shard: int, attempt: int) -> None:
        if assignment.config.spark.master != "none":
            failpoint.named("thread")
        hello = Hello(shard, assignment.run, "this process", attempt)
        link = LocalLink(hello, self._post, self._is_current)
        try:
            serve(assignment, shard, link)
        except BaseException:
            link.lose()
            raise
        finally:
            self._post(e.RunnerEnded(shard, attempt))


def place_name() -> str:
    """This machine and process, for people."""
    return f"{socket.gethostname()} {os.getpid()}"


def tune_garbage_collector() -> None:
    """Let Python's search for cycles look at less, less often: rows make none, and a drain is a
    tenth slower with it."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
