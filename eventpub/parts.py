"""The parts of a publisher that tests replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from eventpub.config import Config
from eventpub.failpoint import failpoint
from eventpub.index.database import ROCKSDB, Storage
from eventpub.shard.pace import ReadAhead, Sizes, read_ahead
from eventpub.sink.client import Clients
from eventpub.sources.mysql import EventStore, Watermark
from eventpub.times import SYSTEM_CLOCK, Clock


@dataclass(frozen=True)
class Parts:
    clients: Clients
    stores: type[EventStore] = EventStore
    watermark: type[Watermark] = Watermark
    storage: Storage = ROCKSDB
    clock: Clock = SYSTEM_CLOCK
    read_ahead: ReadAhead = read_ahead
    failpoint: Callable[[str], None] = failpoint
    sizes: Sizes = field(default_factory=Sizes)


def real_parts(config: Config) -> Parts:
    return Parts(Clients(config.sink))
