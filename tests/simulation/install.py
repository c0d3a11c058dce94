"""Puts the modelled store, broker, disk and time under the real code, and takes them away again."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from eventpub.admission import buckets
from eventpub.channel import messages
from eventpub.coordinator import boundary, recount
from eventpub.index import database
from eventpub.index import reading as index_reading
from eventpub.private_apis import bulk
from eventpub.publisher import prepare, recovery, workers
from eventpub.shard import (
    assignment,
    context,
    folding,
    key_prefetch,
    own_index,
    pace,
    publishing,
    reading,
    runner,
)
from eventpub.sink import (
    client,
    fencing,
    finding,
    owned_producer,
    producing,
    shard,
    stable_ends,
    topics,
    transaction,
)
from eventpub.sink import reading as sink_reading
from eventpub.sources.mysql import watermark as real_watermark
from tests.simulation import broker, disk, store, watermark
from tests.simulation.world import world


def _sleep(seconds: float) -> None:
    world().process.waited += max(seconds, 2.0)  # whoever waits, waits in few steps
    world().broker.settle()


_time = SimpleNamespace(
    monotonic=lambda: world().monotonic + world().process.waited,
    perf_counter=lambda: 0.0,
    time_ns=lambda: int(world().monotonic * 1e9) + world().moment,
    sleep=_sleep,
)


class _Thread:
    """threading.Thread without a thread: its work is done when it starts, or when it is joined."""

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        del name, daemon
        self._target: Callable[[], None] | None = target

    def start(self) -> None:
        if not world().setup.slow_start:
            self.join()

    def join(self, timeout: float | None = None) -> None:
        del timeout
        target, self._target = self._target, None
        if target is not None:
            target()

    def is_alive(self) -> bool:
        return self._target is not None


class _Pool:
    """A pool that does one thing after the other."""

    def __init__(self, size: int, thread_name_prefix: str) -> None:
        del size, thread_name_prefix

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [work(item) for item in items]


_FAR = 3
"""Items that are read ahead."""


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
    make: Callable[[], Iterator[Any]], wake: Callable[[], None] | None = None
) -> Iterator[_Ahead]:
    """Work comes from a link, and each window's rows behind it; keys are there at once."""
    if wake is None:
        yield _Ahead(make(), lambda _: True)
        return
    link = make.__self__._context.link  # type: ignore[attr-defined]
    ahead = _Ahead(make(), lambda last: isinstance(last, reading.Rows) or link.has_work)
    try:
        yield ahead
    finally:
        ahead.leave(wake)


def _producer(_sink: object, name: str, log: Any, *, careful: bool = False) -> broker.Producer:
    return broker.Producer(name, log, careful)


@contextmanager
def installed() -> Iterator[None]:
    """The real code runs in the current `World` inside of this."""
    admin = (broker.Admin(), client.ClientLog())
    quiet = logging.getLogger("eventpub.sink")
    level, quiet.disabled = quiet.disabled, True
    with ExitStack() as stack:

        def put(module: Any, **names: Any) -> None:
            stack.enter_context(patch.multiple(module, **names))

        put(
            client,
            producer=_producer,
            consumer=lambda *_, committed=True, few=False: broker.Consumer(committed),
            admin=lambda _: admin,
            asking_consumer=lambda _, committed: (broker.AskingConsumer(committed), admin[1]),
            renew=lambda _: None,
            admin_of=lambda _, servers: (broker.Admin(int(servers[-1])), client.ClientLog()),
        )
        put(owned_producer, threading=SimpleNamespace(Thread=_Thread))
        for module in producing, shard, transaction:
            put(module, time=_time)
        put(bulk, bulk_of=broker.Bulk, WORTHWHILE=3)
        put(fencing, time=_time, ThreadPoolExecutor=_Pool)
        put(sink_reading, time=_time)
        put(stable_ends, time=_time)
        put(finding, time=_time)
        put(topics, time=_time)
        put(
            database,
            time=_time,
            Rdict=disk.Rdict,
            _writable=nullcontext,
            WriteBatch=disk.WriteBatch,
            Options=_NoOptions,
            AccessType=SimpleNamespace(read_only=lambda: True),
        )
        put(index_reading, time=_time)
        failpoint = _failpoint
        put(
            runner,
            time=_time,
            failpoint=failpoint,
            log=SimpleNamespace(warning=_unexpected),
        )
        put(context, time=_time, EventStore=store.EventStore)
        put(own_index, set_aside=disk.set_aside)
        put(folding, time=_time, failpoint=failpoint, index_folder=disk.index_folder)
        put(folding.Fold, _count_as_published=_count_as_published)
        put(
            publishing,
            time=_time,
            failpoint=failpoint,
            _HOLDS_TURN=math.inf,  # no schedule depends on how fast the machine is
        )
        put(assignment, index_folder=disk.index_folder)
        put(reading, read_ahead=_read_ahead)
        put(key_prefetch, read_ahead=_read_ahead)
        put(
            pace,
            CHUNK_ROWS=pace.CHUNK_ROWS,  # each schedule has its own
            CHUNK_BYTES=4_000,
            FIRST_BYTES=2_000,
            _LEAST_BYTES=100,
        )
        put(boundary, time=_time, EventStore=store.EventStore, Watermark=watermark.Watermark)
        put(real_watermark, time=_time)
        put(prepare, EventStore=store.EventStore, log=_log)
        put(workers, EventStore=store.EventStore)
        put(recovery, log=_log)
        for module in buckets, recount:
            put(module, KEPT=300)  # not a day: no schedule takes so long
        put(recount, _MOST_HIDDEN=30 * 300)
        put(messages, _fits=lambda value, hint: True)
        try:
            yield
        finally:
            quiet.disabled = level


def _nothing(*_: object, **__: object) -> None:
    return None


def _failpoint(name: str) -> None:
    world().point(name)


_really_count = folding.Fold._count_as_published


def _count_as_published(fold: folding.Fold, after: int, cut: Mapping[int, int]) -> None:
    """What the table has when the last keys are read may count; what commits then, may not."""
    _really_count(fold, after, cut)
    world().forgotten.counts(world())


def _unexpected(*_: object, **__: object) -> None:
    """A runner has met what it does not know."""
    world().unexpected = sys.exc_info()[1]


_log = SimpleNamespace(warning=_nothing, debug=_nothing, info=_nothing)


class _NoOptions:
    def __init__(self, raw_mode: bool) -> None:
        del raw_mode

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing
