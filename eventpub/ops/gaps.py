"""Open holds and recorded skips: see them, and act on one.

Open holds are read from the indexes, which a running publisher may have open at the same time;
recorded skips from `<topic>.gaps`. What is to be done is left as a request in the state directory,
since a skip must be published together with the events that follow it: the running publisher does
it with its next batch. A request that nobody can answer now is kept only where that was asked for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from eventpub.admission import Hold, Shard, SkippedGap, VersionRange, in_ranges, values
from eventpub.config import Config
from eventpub.index import Index
from eventpub.sink import Fold
from eventpub.sink.topics import partition_counts
from eventpub.spark.state import Request, StateDir
from eventpub.store import EventStore


@dataclass(frozen=True)
class Gaps:
    """What is missing, as far as the publisher knows.

    Attributes:
        open: aggregates that wait, the longest first.
        skipped: recorded skips, the latest first, each with whether all of its versions are still
            missing from the topic.
        requests: what publishers were asked to do and have not answered, oldest first.
    """

    open: list[Hold]
    skipped: list[tuple[SkippedGap, bool]]
    requests: list[Request]


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        outcome: "found", "skipped", "still missing", "nothing is held", "nothing is missing",
            "changed" (more is missing by now than was to be given up), "kept" for the next
            publisher, "not running", or "no answer".
        request: as it was left; None: nothing was asked.
    """

    outcome: str
    request: Request | None = None

    @property
    def is_done(self) -> bool:
        """Whether it was done, or will be."""
        return self.outcome in {"found", "skipped", "kept"}


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
        requests=StateDir(config.app.state_dir).asked(),
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


def given_up(config: Config, aggregate_id: str) -> tuple[int, int] | tuple[None, None] | None:
    """The first and last version that a skip of an aggregate's open gap would give up.

    None where it holds nothing; both are None where the indexes are on other machines.

    Raises:
        StateError, StoreError: the index or the event store cannot be read.
    """
    state = StateDir(config.app.state_dir)
    if not state.indexed() and state.is_running():
        return None, None
    holds, _ = _pending(config)
    hold = next((h for h in holds if h.aggregate_id == aggregate_id), None)
    if hold is None:
        return None
    above = VersionRange(aggregate_id, hold.first_missing + 1, hold.seen)
    with EventStore(config.store, EventStore.discover(config.store)) as store:
        there = values(store.backtrack([above], 1), "version")
    return hold.first_missing, min(there, default=hold.seen) - 1


def act(
    config: Config,
    action: Literal["retry", "skip"],
    aggregate_id: str,
    versions: tuple[int, int] | None = None,
    *,
    later: bool = False,
    timeout: float = 60.0,
) -> Answer:
    """Have the publisher look for what an aggregate misses, or give its open gap up, now.

    Args:
        config: the whole configuration.
        action: what to do.
        aggregate_id: with which.
        versions: the first and the last that may be given up; None: of a retry, or not known here.
        later: where no publisher is running, leave it to the next one.
        timeout: seconds to wait for a running publisher; then the request is taken back.
    """
    state = StateDir(config.app.state_dir)
    if not (later or state.is_running()):
        return Answer("not running")
    request = state.ask(action, aggregate_id, *(versions or ()))
    deadline = time.monotonic() + timeout
    while state.is_running() and time.monotonic() < deadline:
        outcome = state.answer_of(request)
        if outcome is not None:
            return Answer(outcome, request)
        time.sleep(0.05)
    if not state.is_running() and later:
        return Answer(state.answer_of(request) or "kept", request)
    outcome = "no answer" if state.is_running() else "not running"
    state.withdraw(request)
    return Answer(state.answer_of(request) or outcome, request)


def cancel(config: Config, name: str) -> list[Request]:
    """Take back the requests of an aggregate, or the one of an id, that nobody has answered."""
    state = StateDir(config.app.state_dir)
    meant = [r for r in state.asked() if name in {r.id, r.aggregate_id}]
    return [request for request in meant if state.withdraw(request)]
