"""Which partitions a fold reads, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from eventpub import config
from eventpub.admission.model import Shard
from eventpub.sink.missing_markers import PartitionId
from eventpub.sink.origin import Sources

Kind = Literal["events", "gaps", "dead", "late"]
"""What a topic holds."""


@dataclass(frozen=True)
class Scope:
    """What of the topics is read back.

    Args:
        sink: the configuration.
        shard: whose partitions are read.
        sources: whose records count.
        everywhere: read all partitions, for what belongs to this shard's aggregates: where the
            number of partitions may have been another one when it was written.
        with_contents: say of each event what tells it from another one of its version.
    """

    sink: config.Sink
    shard: Shard
    sources: Sources
    everywhere: bool = False
    with_contents: bool = False

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """By topic that is read."""
        return {
            self.sink.topic: "events",
            self.sink.gaps_topic: "gaps",
            self.sink.dead_topic: "dead",
            self.sink.late_topic: "late",
        }

    def kind(self, place: PartitionId) -> Kind:
        """Of the records of a partition."""
        return self.kinds[place[0]]

    @cached_property
    def places(self) -> list[PartitionId]:
        """All partitions that are read."""
        shard = self.shard
        numbers = range(shard.partitions) if self.everywhere else sorted(shard.topic_partitions())
        return [(topic, number) for topic in self.kinds for number in numbers]

    @cached_property
    def of_others(self) -> set[PartitionId]:
        """Those of them that other shards write."""
        own = set(self.shard.topic_partitions())
        return {(topic, number) for topic, number in self.places if number not in own}
