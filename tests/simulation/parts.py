"""What a simulation gives the real code: a modelled store, broker, disk, time and threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import structlog

from eventpub.admission import model
from eventpub.channel import Window
from eventpub.config import Config
from eventpub.coordinator import recount
from eventpub.shard import runner
from eventpub.shard.assignment import Parts
from eventpub.shard.pace import Sizes
from eventpub.shard.runner import Reading
from tests.simulation.broker import Clients
from tests.simulation.disk import Storage
from tests.simulation.store import EventStore
from tests.simulation.watermark import Watermark
from tests.simulation.world import Clock, world

_FAR = 3
"""Items that are read ahead."""


def parts_of(config: Config) -> Parts:
    """Those of the current world."""
    stores: Any = EventStore
    return Parts(
        clients=Clients(config.sink),
        stores=stores,
        watermark=Watermark,
        storage=Storage(),
        clock=Clock(),
        read_ahead=_read_ahead,
        failpoint=_failpoint,
        sizes=Sizes(rows=world().setup.chunk_rows, most=4_000, first=2_000, least=100),
    )


def _failpoint(name: str) -> None:
    if name == "after_baseline":
        # what the table has when the last keys are read may count; what commits then, may not
        world().forgotten.counts(world())
    else:
        world().point(name)


class _Ahead:
    """As far ahead as it may get, and no further; asked whether it is ready, it has just read.

    Args:
        items: what is read.
        may_go_on: whether the next of them comes at once, given the last.
    """

    def __init__(self, items: Iterator[Any], may_go_on: Callable[[Any], bool]) -> None:
        self._items = items
        self._may_go_on = may_go_on
        self._waiting: list[Any] = []
        self._last: Any = None
        self._has_ended = False

    def _read(self) -> None:
        while len(self._waiting) < _FAR and not self._has_ended and self._may_go_on(self._last):
            self._read_one()

    def _read_one(self) -> None:
        try:
            self._last = next(self._items)
            self._waiting.append(self._last)
        except StopIteration:
            self._has_ended = True

    @property
    def is_ready(self) -> bool:
        was_ready = bool(self._waiting)
        self._read()
        return was_ready or self._has_ended

    def wait(self, timeout: float) -> bool:
        self._read()
        while timeout >= runner._SERVES_EVERY and not (self._waiting or self._has_ended):
            self._read_one()  # who has nothing else to do waits for what comes
        return bool(self._waiting) or self._has_ended

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        self._read()
        while not (self._waiting or self._has_ended):
            self._read_one()
        self._read()
        if not self._waiting:
            raise StopIteration
        return self._waiting.pop(0)

    def leave(self, wake: Callable[[], None]) -> None:
        """Who reads ahead sees that nobody wants more: where it waits, else at its next item."""
        waits = len(self._waiting) < _FAR and not self._may_go_on(self._last)
        wake()
        if waits and not self._has_ended:
            self._read_one()
        self._items.close()  # type: ignore[attr-defined]


@contextmanager
def _read_ahead(
    make: Callable[[], Iterator[Any]], wake: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """Work comes from a link, and each window's rows behind it; keys are there at once."""
    of = getattr(make, "__self__", None)
    if not isinstance(of, Reading):
        yield _Ahead(make(), lambda _: True)
        return
    link: Any = of._context.lane
    ahead = _Ahead(make(), lambda last: _has_rows(last) or link.has_work)
    try:
        yield ahead
    finally:
        ahead.leave(wake)


def _has_rows(item: Any) -> bool:
    return isinstance(item, Window) and item.rows is not None


class _Unexpected(logging.Handler):
    """A runner has met what it does not know."""

    def emit(self, record: logging.LogRecord) -> None:
        """Kept for the driver."""
        if record.exc_info is not None:
            world().unexpected = record.exc_info[1]


_DAY = 300
"""Time buckets of what the real code takes for a day: no schedule takes so long."""


@contextmanager
def scaled() -> Iterator[None]:
    """A day is short, and nothing is logged; but what a runner does not know is noticed."""
    sink, shard = logging.getLogger("eventpub.sink"), logging.getLogger("eventpub.shard")
    config, handler = structlog.get_config(), _Unexpected()
    was_disabled, sink.disabled = sink.disabled, True
    propagates, shard.propagate = shard.propagate, False
    shard.addHandler(handler)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    days = (model, "KEPT", 1), (recount, "KEPT", 1), (recount, "_MOST_HIDDEN", 30)
    try:
        with ExitStack() as stack:
            for module, name, count in days:
                stack.enter_context(patch.object(module, name, count * _DAY))
            yield
    finally:
        structlog.configure(**config)
        shard.removeHandler(handler)
        sink.disabled, shard.propagate = was_disabled, propagates
