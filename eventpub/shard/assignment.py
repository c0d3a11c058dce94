"""What a runner gets before it connects: the same for every shard of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventpub import admission
from eventpub.admission import Shard
from eventpub.config import Config
from eventpub.parts import Parts
from eventpub.sink.records import contents_of
from eventpub.sources.mysql import Layout


@dataclass(frozen=True)
class Assignment:
    """Made by the publisher, the same for all shards.

    Attributes:
        config: the whole configuration.
        layout: what the event table looks like.
        partitions: of the topic.
        start: events created at or before are not published, µs; None: all are.
        run: which start of the publisher this is of; it grows.
        parts: what it is put together from.
        accepts_topic: whether the topic is the one of `sink.accept_topic_id`.
    """

    config: Config
    layout: Layout
    partitions: int
    start: int | None
    run: int
    parts: Parts
    accepts_topic: bool = False

    def adopts(self, identity: Mapping[str, Any]) -> bool:
        return adopts(self.config, identity, accepts_topic=self.accepts_topic)

    def shard(self, number: int) -> Shard:
        """One of the shards."""
        return Shard(number, self.config.run.shards, self.partitions)

    def index(self, number: int) -> Path:
        """The folder of a shard's index."""
        return index_folder(self.config, self.config.run.shards, number)

    def rules(self) -> admission.Rules:
        """What admission needs of the configuration."""
        gaps = self.config.gaps
        return admission.Rules(
            first_version=self.config.store.first_version,
            max_backoff=gaps.max_backoff,
            backoff_base=gaps.backoff_base,
            late=gaps.late,
            contents_of=None if self.layout.key_is_unique else contents_of,
            times_last=self.layout.times_last,
            repeated=self.layout.repeated,
        )


def identity_of(config: Config) -> dict[str, str]:
    """Whose a state is. Servers are not a part of it: databases and brokers move to others.

    Kafka's ids of the topics, which are kept beside it, tell two clusters apart.
    """
    app, store, sink = config.app, config.store, config.sink
    return {"app": app.id, "topic": sink.topic, "table": store.full_table}


def adopts(config: Config, identity: Mapping[str, Any], *, accepts_topic: bool) -> bool:
    """Whether a state is this publisher's, before application or topic were renamed, too."""
    own = identity_of(config)
    return (
        identity.get("app") in {own["app"], *config.app.former_ids}
        and (accepts_topic or identity.get("topic") == own["topic"])
        and identity.get("table") == own["table"]
    )


def index_folder(config: Config, shards: int, number: int) -> Path:
    """The folder of a shard's index, for any number of shards."""
    return config.app.state_dir.absolute() / "index" / f"{shards}-shards" / str(number)


def threads_of(run: int) -> str:
    """What a run of the engine `threads` calls itself among the owners of an id."""
    return f"threads-{run}"
