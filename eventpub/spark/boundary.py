"""The boundary moves on while a micro-batch runs, and the shards' tasks follow it.

A micro-batch costs Spark 50 to 120 ms beyond its work, and its tasks as much again: two logs, two
jobs' planning, workers that are woken, an index and a producer to open. So a task that has read its
window goes on with the next one, as soon as the source has found it; the latency of an event is
then that of the publishing, and a backlog drains without a pause. It ends when nothing new has come
for a moment, when another shard's task has ended (whose rows wait for the next batch), when the
driver wants another batch (a user asks, a shard has something to say, it shall stop), and after the
time that it was given. The bounds come from one place, the source, since only one process may ask
for open transactions; they go by a file in the state directory, as does what the shards have done
so far. A task on a machine that does not see the files publishes one window per batch.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eventpub.errors import EventpubError
from eventpub.spark.state import StateDir

_EVERY = 0.05
_IN_VAIN = 1.0
_MORE_IN_VAIN = 2.0
_LOOKS_EVERY = 0.005
_ASKS_EVERY = 0.02


@dataclass(frozen=True)
class Bounds:
    """The end of a window, which begins where the one before ended.

    Attributes:
        upto: events created at or before belong to it, µs.
        open_since: when the oldest open transaction began, µs; None: there is none, or nobody can
            tell. A gap that was seen after it is not skipped.
        more: whether the window is a full page, so that another one is about to come.
    """

    upto: int
    open_since: int | None = None
    more: bool = False


def following(
    state: StateDir,
    last: Bounds,
    seconds: float,
    wanted: int,
    is_over: Callable[[], bool] = lambda: False,
    *,
    only_more: bool = False,
) -> Iterator[Bounds]:
    """The windows behind one, each as soon as it is found; not long, and not in vain.

    What another shard has seen before the end, this one sees, too: what is visible of one shard
    when the publisher is told to stop, and its like of the others, comes out together.

    Args:
        seconds: for so long.
        wanted: how many batches the driver has wanted so far; at one more, this ends.
        is_over: whether another shard's task has ended.
        only_more: end behind the first window that is no full page.
    """
    began = waiting = asks = time.monotonic()
    ends = False
    while not ends and (last.more or not only_more):
        now = time.monotonic()
        if now >= asks:  # two thirds of what a look costs, and less urgent than a window
            asks = now + _ASKS_EVERY
            known = state.read(state.progress_file) or {}
            ends = known.get("wanted", 0) > wanted or is_over()
        ends = ends or now - began >= seconds
        boundary = state.read(state.boundary_file)
        if boundary is None:
            return
        if boundary["upto"] > last.upto:
            last = Bounds(**boundary)
            yield last
            waiting = time.monotonic()
        elif now - waiting < (_MORE_IN_VAIN if last.more else _IN_VAIN):
            time.sleep(_LOOKS_EVERY)
        else:
            return


class MovingBoundary:
    """Looks for the next window's end in a thread, from `go` to `rest`, and writes it to a file.

    Args:
        file: takes what `look` found last; replaced as a whole.
        look: the `Bounds` of the next window that begins behind a position, or None where there is
            nothing to announce. Called by the thread, never while `rest` is in force.
        pause: seconds until looking again is of use, where that is known to be sooner than usual.
    """

    def __init__(
        self,
        file: Path,
        look: Callable[[int], Bounds | None],
        pause: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._file = file
        self._look = look
        self._pause = pause
        self._end = 0
        self._going = threading.Event()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None

    def go(self, end: int) -> None:
        """A micro-batch begins, whose window ends there."""
        self._end = end
        self._going.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="eventpub-boundary", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """It has ended; returns when nothing is looked for any more."""
        self._going.clear()
        with self._busy:
            pass

    @property
    def rests(self) -> bool:
        """Whether nothing that is looked for now is wanted any more."""
        return not self._going.is_set()

    def _run(self) -> None:
        more = False
        while self._going.wait():
            if not more:
                time.sleep(min(_EVERY, self._pause() or _EVERY))
            with self._busy:
                more = self._going.is_set() and self._move()

    def _move(self) -> bool:
        """Whether there is known to be more."""
        try:
            found = self._look(self._end)
        except EventpubError:  # who asks for the next window meets it, too
            self._going.clear()
            return False
        if found is None or found.upto <= self._end:
            return False
        partial = self._file.with_suffix(".moving")
        try:
            partial.write_text(json.dumps(asdict(found)))
            partial.rename(self._file)
        except OSError:  # a full disk: the batch's own window is published all the same
            self._going.clear()
            return False
        self._end = found.upto
        return found.more
