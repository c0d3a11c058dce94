"""Puts the modelled store, broker, disk and time under the real code, and takes them away again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from eventpub.index import rocks
from eventpub.sink import bulk, client, fold, owning, shard, topics, unmarked
from eventpub.sink.records import parse_times
from eventpub.spark import (
    boundary,
    compare,
    pace,
    passed,
    publisher,
    recount,
    recounting,
    recovery,
    source,
)
from eventpub.spark import shard as task
from eventpub.store import watermark as real_watermark
from tests.simulation import broker, disk, store, watermark
from tests.simulation.world import world


def _sleep(seconds: float) -> None:
    world().monotonic += max(seconds, 2.0)  # whoever waits, waits in few steps
    world().broker.settle()


_time = SimpleNamespace(
    monotonic=lambda: world().monotonic,
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


class _Ahead:
    """As far ahead as it may get, and no further; asked whether it is ready, it has just read."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._waiting: list[Any] = []

    def _read(self) -> None:
        self._waiting += islice(self._items, 3 - len(self._waiting))

    @property
    def is_ready(self) -> bool:
        was_ready = bool(self._waiting)
        self._read()
        return was_ready

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        self._read()
        if not self._waiting:
            raise StopIteration
        return self._waiting.pop(0)


@contextmanager
def _read_ahead(make: Callable[[], Iterator[Any]]) -> Iterator[_Ahead]:
    yield _Ahead(make())


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
            admin=lambda _, anew=False: admin,
            admin_of=lambda _, servers: (broker.Admin(int(servers[-1])), client.ClientLog()),
        )
        put(shard, time=_time, threading=SimpleNamespace(Thread=_Thread))
        put(bulk, bulk_of=broker.Bulk, WORTHWHILE=3)
        put(owning, time=_time, ThreadPoolExecutor=_Pool)
        put(fold, time=_time)
        put(unmarked, time=_time)
        put(topics, time=_time)
        put(
            rocks,
            time=_time,
            Rdict=disk.Rdict,
            WriteBatch=disk.WriteBatch,
            Options=_NoOptions,
            AccessType=SimpleNamespace(read_only=lambda: True),
        )
        put(
            task,
            time=_time,
            EventStore=store.EventStore,
            StateDir=disk.StateDir,
            read_ahead=_read_ahead,
            failpoint=lambda name: world().point(name),
            _HOLDS_TURN=math.inf,  # no schedule depends on how fast the machine is
        )
        put(
            pace,
            CHUNK_ROWS=pace.CHUNK_ROWS,  # each schedule has its own
            CHUNK_BYTES=4_000,
            FIRST_BYTES=2_000,
            _LEAST_BYTES=100,
        )
        put(compare, read_ahead=_read_ahead)
        put(
            source,
            time=_time,
            Path=disk.File,
            Watermark=watermark.Watermark,
            _parse=lambda options: world().parsed,
        )
        put(real_watermark, time=_time)
        put(passed, time=_time)
        put(boundary, time=_time)
        put(
            publisher,
            time=_time,
            EventStore=store.EventStore,
            StateDir=disk.StateDir,
            log=SimpleNamespace(warning=_warned, debug=_nothing, info=_nothing),
            options_of=lambda *_: {},
        )
        put(recounting, time=_time, log=_log)
        put(recount, _KEPT=300)  # not a day: no schedule takes so long
        put(recovery, log=_log)
        try:
            yield
        finally:
            quiet.disabled = level


def _nothing(*_: object, **__: object) -> None:
    return None


def _warned(text: str, **values: Any) -> None:
    """The driver logs a warning."""
    if "are published again" in text:
        after, before = parse_times([values["after"]]).tolist()[0], world().repeats_after
        world().repeats_after = after if before is None else min(after, before)


_log = SimpleNamespace(warning=_nothing, debug=_nothing, info=_nothing)


class _NoOptions:
    def __init__(self, raw_mode: bool) -> None:
        del raw_mode

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing
