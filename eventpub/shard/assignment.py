"""What a runner gets before it connects: the same for every shard of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eventpub import admission
from eventpub.admission import Shard
from eventpub.config import Config
from eventpub.sink.records import contents_of
from eventpub.store import Layout


@dataclass(frozen=True)
class Assignment:
    """Made by the publisher, pickled with every task.

    Attributes:
        config: the whole configuration.
        layout: what the event table looks like.
        partitions: of the topic.
        start: events created at or before are not published, µs; None: all are.
        run: which start of the publisher this is of; it grows.
        accepts_topic: whether the topic is the one of `sink.accept_topic_id`.
    """

    config: Config
    layout: Layout
    partitions: int
    start: int | None
    run: int
    accepts_topic: bool = False

    def shard(self, number: int) -> Shard:
        """One of the shards."""
        return Shard(number, self.config.spark.shards, self.partitions)

    def index(self, number: int) -> Path:
        """The folder of a shard's index."""
        return index_folder(self.config, self.config.spark.shards, number)

    def rules(self) -> admission.Rules:
        """What admission needs of the configuration."""
        gaps = self.config.gaps
        return admission.Rules(
            first_version=self.config.store.first_version,
            max_backoff=gaps.max_backoff,
            backoff_base=gaps.backoff_base,
            late=gaps.late,
            backtrack=gaps.backtrack,
            contents_of=None if self.layout.key_is_unique else contents_of,
            times_last=self.layout.times_last,
            repeated=self.layout.repeated,
        )


def index_folder(config: Config, shards: int, number: int) -> Path:
    """The folder of a shard's index, for any number of shards."""
    return config.app.state_dir.absolute() / "index" / f"{shards}-shards" / str(number)
