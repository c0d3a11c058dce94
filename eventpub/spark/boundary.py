"""The boundary moves on while a micro-batch runs, and the shards' tasks follow it.

A micro-batch costs Spark 50 to 120 ms beyond its work, and its tasks as much again: two logs, two
jobs' planning, workers that are woken, an index and a producer to open. So a task that has read its
window goes on with the next one, as soon as the source has found it; the latency of an event is
then that of the publishing, a backlog drains without a pause, and what comes after a rest waits for
no batch. It ends when another shard's task has ended (whose rows wait for the next batch), when the
driver wants another batch (a user asks, a shard has something to say, it shall stop), when the
source cannot go on or shows no sign of life, and after the time that it was given. The bounds come
from one place, the source, since only one process may ask for open transactions; they go by a file
in the state directory, as does what the shards have done so far. A task on a machine that does not
see the files publishes one window per batch.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eventpub.spark.state import StateDir, replace_file

_EVERY = 0.05
"""Seconds between two looks of the source."""
_LOOKS_EVERY = 0.005
_ASKS_EVERY = 0.02
"""Seconds between two looks of a task: for a window, and for a reason to end."""

_RESTS_AFTER = 1.0
"""Seconds without a window after which all of them look less often."""
_RESTING_EVERY = 0.1
_LOOKS_RESTING_EVERY = 0.05
_ASKS_RESTING_EVERY = 0.2

_MORE_IN_VAIN = 2.0
"""Seconds without a window where the one before was full."""
_TOUCHED_EVERY = 1.0
_NO_SIGN_OF_LIFE = 5.0
"""Seconds between two signs of life of the source where it finds nothing, at least and at most."""


@dataclass(frozen=True)
class Bounds:
    """The end of a window, which begins where the one before ended.

    Attributes:
        upto: events created at or before belong to it, µs.
        open_since: when the oldest open transaction began, µs; None: there is none, or nobody can
            tell. A gap that was seen after it is not skipped.
        more: whether the window is a full page, so that another one is about to come.
        hidden_since: nothing that open transactions hide, or that was hidden and is not counted
            since, was created at or before, µs; None: nothing is hidden, or nobody can tell.
        tick: how many windows of the batch ended where the one before did, since tasks had to do
            something without rows: look after a hold, compare.
    """

    upto: int
    open_since: int | None = None
    more: bool = False
    tick: int = 0
    hidden_since: int | None = None


class BatchOver(Exception):  # noqa: N818 (nothing is wrong)
    """What the source has to report is reported by the next batch."""


def following(
    state: StateDir,
    last: Bounds,
    seconds: float,
    wanted: int,
    is_over: Callable[[], bool] = lambda: False,
    *,
    only_more: bool = False,
) -> Iterator[Bounds]:
    """The windows behind one, each as soon as it is found.

    What another shard has seen before the end, this one sees, too: what is visible of one shard
    when the publisher is asked to stop, and its like of the others, comes out together.

    Args:
        seconds: for so long.
        wanted: how many batches the driver has wanted so far; at one more, this ends.
        is_over: whether another shard's task has ended.
        only_more: end behind the first window that is no full page.
    """
    began = waiting = asks = lived = time.monotonic()
    ends = False
    sign = (0, 0)
    while not ends and (last.more or not only_more):
        now = time.monotonic()
        rests = now - waiting > _RESTS_AFTER
        if rests and now < asks:
            seen = edition_of(state.boundary_file)
            if seen == sign:
                time.sleep(_LOOKS_RESTING_EVERY)
                continue
            sign, lived = seen, now
        if now >= asks:  # two thirds of what a look costs, and less urgent than a window
            asks = now + (_ASKS_RESTING_EVERY if rests else _ASKS_EVERY)
            known = state.read(state.progress_file) or {}
            ends = known.get("wanted", 0) > wanted or is_over()
        ends = ends or now - began >= seconds
        boundary = state.read(state.boundary_file)
        if boundary is None:
            return
        found = Bounds(**boundary)
        if (found.upto, found.tick) > (last.upto, last.tick):
            last = found
            yield last
            waiting = lived = time.monotonic()
            continue
        if now - lived > _NO_SIGN_OF_LIFE or (last.more and now - waiting > _MORE_IN_VAIN):
            return
        time.sleep(_LOOKS_RESTING_EVERY if rests else _LOOKS_EVERY)


def edition_of(file: Path) -> tuple[int, int]:
    """What changes with a file that is replaced or touched: to ask costs a tenth of reading it."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


class MovingBoundary:
    """Looks for the next window's end in a thread, from `go` to `rest`, and writes it to a file.

    Args:
        file: takes what `look` found last; replaced as a whole, touched by looks in vain, and
            removed where the tasks shall end.
        look: the `Bounds` of the next window that begins behind a position, or None where there is
            nothing to announce. Called by the thread, never while `rest` is in force. Whatever it
            raises ends the tasks: who asks for the next window meets it, too.
        pause: seconds until looking again is of use, where that is known to be sooner than usual.
        seldom: seconds between two looks where nothing has come for a moment.
    """

    def __init__(
        self,
        file: Path,
        look: Callable[[int], Bounds | None],
        pause: Callable[[], float | None] = lambda: None,
        seldom: float = _RESTING_EVERY,
    ) -> None:
        self._file = file
        self._look = look
        self._pause = pause
        self._seldom = max(seldom, _EVERY)
        self._last = Bounds(0)
        self._found = self._touched = 0.0
        self._going = threading.Event()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None

    def go(self, end: int) -> None:
        """A micro-batch begins, whose window ends there."""
        self._last, self._found = Bounds(end), time.monotonic()
        self._announce()
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
                rests = time.monotonic() - self._found > _RESTS_AFTER
                every = self._seldom if rests else _EVERY
                time.sleep(min(every, self._pause() or every))
            with self._busy:
                more = self._going.is_set() and self._move()

    def _move(self) -> bool:
        """Whether there is known to be more."""
        last = self._last
        try:
            found = self._look(last.upto)
            if found is None:
                self._touch()
                return False
        except Exception:
            self._give_up()
            return False
        self._last = replace(found, tick=last.tick + (found.upto == last.upto))
        self._found = time.monotonic()
        return self._announce() and found.more

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._touched > _TOUCHED_EVERY:
            self._touched = now
            os.utime(self._file)

    def _announce(self) -> bool:
        try:
            replace_file(self._file, json.dumps(asdict(self._last)))
        except OSError:  # a full disk: the batch's own window is published all the same
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        self._going.clear()
        with suppress(OSError):
            self._file.unlink()
