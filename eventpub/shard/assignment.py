"""What a runner gets before it connects: the same for every shard of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventpub import admission
from eventpub.admission.model import Shard
from eventpub.config import Config
from eventpub.failpoint import failpoint
from eventpub.index.database import ROCKSDB, Storage
from eventpub.shard.pace import ReadAhead, Sizes, read_ahead
from eventpub.sink.client import Clients
from eventpub.sink.records import contents_of
from eventpub.sources.mysql import EventStore, Layout, Watermark
from eventpub.times import SYSTEM_CLOCK, Clock


@dataclass(frozen=True)
class Parts:
    """What tests replace."""

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


@dataclass(frozen=True)
class Assignment:
    """Made by the publisher, the same for all shards.

    Attributes:
        start: events created up to here are not published, µs; None: all are.
        run: number of the publisher's start; increases.
        accepts_topic: whether the topic is the one of `sink.accept_topic_id`.
        start_id: of the publisher's first start; an executor may have an index from before it.
    """

    config: Config
    layout: Layout
    partitions: int
    start: int | None
    run: int
    parts: Parts
    accepts_topic: bool = False
    start_id: str = ""

    def adopts(self, identity: Mapping[str, Any]) -> bool:
        is_of_start = identity.get("start", "") == self.start_id
        return is_of_start and adopts(self.config, identity, accepts_topic=self.accepts_topic)

    def shard(self, number: int) -> Shard:
        return Shard(number, self.config.run.shards, self.partitions)

    def index(self, number: int) -> Path:
        return index_folder(self.config, self.config.run.shards, number)

    def rules(self) -> admission.Rules:
        gaps = self.config.gaps
        return admission.Rules(
            first_version=self.config.store.first_version,
            max_backoff=gaps.max_backoff,
            backoff_base=gaps.backoff_base,
            late=gaps.late,
            contents_of=None if self.layout.key_is_unique else contents_of,
            times_last=self.layout.times_last,
            repeated=self.layout.clock.repeated,
        )


def identity_of(config: Config) -> dict[str, str]:
    """Excludes servers, as databases and brokers move; topic ids tell clusters apart."""
    app, store, sink = config.app, config.store, config.sink
    own = {"app": app.id, "topic": sink.topic}
    return own | {"table": store.full_table, "key": store.key}


def adopts(config: Config, identity: Mapping[str, Any], *, accepts_topic: bool) -> bool:
    """Whether a state is this publisher's, even from before another topic was accepted."""
    own = identity_of(config)
    return (
        identity.get("app") == own["app"]
        and (accepts_topic or identity.get("topic") == own["topic"])
        and all(identity.get(name) == own[name] for name in ("table", "key"))
    )


def index_folder(config: Config, shards: int, number: int) -> Path:
    return config.app.state_dir.absolute() / "index" / f"{shards}-shards" / str(number)


def threads_of(run: int) -> str:
    """The owner name of a run of the engine `threads`."""
    return f"threads-{run}"
