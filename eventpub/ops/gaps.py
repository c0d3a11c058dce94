"""Open holds and recorded skips: see them, and act on one.

Open holds are read from the indexes, which a running publisher may have open at the same time;
recorded skips from `<topic>.gaps`. What is to be done is left as a request in the state directory,
since a skip must be published together with the events that follow it: the running publisher does
it with its next batch, or the next one that is started.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from eventpub.admission import Hold, Shard, SkippedGap, in_ranges
from eventpub.config import Config
from eventpub.index import Index
from eventpub.sink import Fold
from eventpub.sink.topics import partition_counts
from eventpub.spark.state import StateDir


@dataclass(frozen=True)
class Gaps:
    """What is missing, as far as the publisher knows.

    Attributes:
        open: aggregates that wait, the longest first.
        skipped: recorded skips, the latest first, each with whether all of its versions are still
            missing from the topic.
    """

    open: list[Hold]
    skipped: list[tuple[SkippedGap, bool]]


def find(config: Config) -> Gaps:
    """All of them.

    Raises:
        StateError, SinkError: the state or the topic of skips cannot be read.
    """
    holds, missing = _pending(config)
    partitions = partition_counts(config.sink).get(config.sink.gaps_topic)
    recorded: list[SkippedGap] = []
    if partitions:
        fold = Fold(config.sink, Shard(0, 1, partitions), {}, only="gaps")
        recorded = [gap for part in fold for gap in part.gaps]
    recorded.sort(key=lambda gap: -gap.skipped_at)
    return Gaps(
        open=sorted(holds, key=lambda hold: hold.first_seen),
        skipped=[
            (
                gap,
                all(
                    in_ranges(version, missing.get(gap.aggregate_id, ()))
                    for version in (gap.from_version, gap.to_version)
                ),
            )
            for gap in recorded
        ],
    )


def _pending(config: Config) -> tuple[list[Hold], dict[str, list[tuple[int, int]]]]:
    """The open holds, and per aggregate the skipped versions that are still missing."""
    state = StateDir(config.app.state_dir)
    progress = state.read(state.progress_file) or {}
    shards = progress.get("shards", config.spark.shards)
    holds: list[Hold] = []
    missing: dict[str, list[tuple[int, int]]] = {}
    for number in range(shards):
        of_shard, skipped = Index.glance(state.shard_index(shards, number))
        holds += of_shard
        missing |= skipped
    return holds, missing


def act(
    config: Config, action: Literal["retry", "skip"], aggregate_id: str, timeout: float = 60.0
) -> str | None:
    """Have the publisher look for what an aggregate misses, or give its open gap up, now.

    Args:
        config: the whole configuration.
        action: what to do.
        aggregate_id: with which.
        timeout: seconds to wait for a running publisher.

    Returns:
        What came of it: "found", "skipped", "still missing", "nothing is held" or "nothing is
        missing"; None: no publisher is running (or it did not answer in time), and the next one
        that does will do it.
    """
    state = StateDir(config.app.state_dir)
    version = None
    if action == "skip":
        holds, _ = _pending(config)
        version = next((h.first_missing for h in holds if h.aggregate_id == aggregate_id), None)
    request = state.ask(action, aggregate_id, version)
    deadline = time.monotonic() + timeout
    while state.is_running() and time.monotonic() < deadline:
        outcome = state.answer_of(request)
        if outcome is not None:
            return outcome
        time.sleep(0.05)
    return state.answer_of(request)
