"""Open holds and recorded skips: see them, and act on one.

A running publisher is asked, wherever its shards are: it knows the open holds, and a skip must be
published together with the events that follow it. When none runs, open holds are read from the
indexes of this machine; a request is kept only where that was asked for. Recorded skips are on
`<topic>.gaps`.
"""

from __future__ import annotations

import heapq
import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eventpub.admission import Hold, SkippedGap, VersionRange
from eventpub.channel import Request
from eventpub.config import Config
from eventpub.errors import SinkError, StateError
from eventpub.index import Pending, glance
from eventpub.ops.asking import ask_running, ask_shards
from eventpub.ops.status import kind_without_answer
from eventpub.sink import records
from eventpub.sink.reading import own_records, read_committed
from eventpub.sink.topics import partition_counts
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir
from eventpub.times import format_time

_LIST_TIMEOUT = 5.0
"""Seconds; shards that do not answer by then, as where the broker is away, are read on the disk."""


@dataclass(frozen=True)
class Gaps:
    """What is missing, as far as the publisher knows.

    Attributes:
        open: aggregates that wait, the longest first; `open_count`: of all.
        skipped: recorded skips, the latest first, each with whether any of its versions is still
            missing from the topic; none where the topic cannot be read. `skipped_count`: of all.
        requests: what publishers were asked to do and have not answered, oldest first.
        unread: why the topic of skips cannot be read; None: it was.
        kind: who says so, as of `ops.status.Standing`: "running"; otherwise what was kept of it, by
            one that does not answer ("silent"), or the last one ("stopped", "never").
    """

    open: list[Hold]
    open_count: int
    skipped: list[tuple[SkippedGap, bool]]
    skipped_count: int
    requests: list[Request]
    unread: SinkError | None = None
    kind: str = "running"

    def skips(self) -> list[dict[str, Any]]:
        """`skipped` as `gaps list` and the dashboard show it; JSON-serializable."""
        return [with_times(gap) | {"still_missing": still} for gap, still in self.skipped]


def with_times(of: Hold | SkippedGap) -> dict[str, Any]:
    """Its fields; times are RFC 3339."""
    times = {"first_seen", "next_attempt", "since", "skipped_at"}
    return {k: format_time(v) if k in times else v for k, v in asdict(of).items()}


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
        """Whether it was done, will be, or is needless."""
        return self.outcome in {"found", "nothing is missing", "skipped", "kept"}


def find(config: Config, limit: int) -> Gaps:
    """Those that wait for longest, and those that were skipped last.

    Args:
        limit: so many of each.

    Raises:
        StateError: the state cannot be read.
    """
    state = StateDir(config.app.state_dir)
    unread: SinkError | None = None
    recorded: list[SkippedGap] = []
    skipped_count = 0
    try:
        recorded, skipped_count = _recorded(config, limit)
    except SinkError as error:
        unread = error
    about = tuple({gap.aggregate_id for gap in recorded})
    found, is_running = pending(config, state, limit, about)

    def is_missing(gap: SkippedGap) -> bool:
        ranges = found.skipped.get(gap.aggregate_id, ())
        return any(first <= gap.to_version and gap.from_version <= last for first, last in ranges)

    return Gaps(
        open=sorted(found.holds, key=lambda hold: hold.first_seen)[:limit],
        open_count=found.count,
        skipped=[(gap, is_missing(gap)) for gap in recorded],
        skipped_count=skipped_count,
        requests=state.kept(),
        unread=unread,
        kind="running" if is_running else kind_without_answer(state),
    )


def _recorded(config: Config, limit: int) -> tuple[list[SkippedGap], int]:
    """Skips on their topic, the latest first; and how many there are."""
    partitions = partition_counts(config.sink).get(config.sink.gaps_topic)
    if not partitions:
        return [], 0
    starts = {(config.sink.gaps_topic, number): 0 for number in range(partitions)}
    latest: list[tuple[int, int, SkippedGap]] = []
    count = 0
    ids = {config.app.id, *config.app.former_ids}
    for message, _ in own_records(read_committed(config.sink, starts), ids):
        with suppress(ValueError):
            gap = records.read_gap(message.value() or b"")
            count += 1
            heapq.heappush(latest, (gap.skipped_at, count, gap))
            if len(latest) > limit:
                heapq.heappop(latest)
    return [gap for *_, gap in sorted(latest, reverse=True)], count


def pending(
    config: Config, state: StateDir, most: int, about: tuple[str, ...]
) -> tuple[Pending, bool]:
    """What waits, as of `index.glance` of all shards; and whether the running publisher says so.

    Raises:
        StateError: the state cannot be read.
    """
    asked = _asked(state, most, about)
    return (_kept(config, state, most, about), False) if asked is None else (asked, True)


def _asked(state: StateDir, most: int, about: tuple[str, ...]) -> Pending | None:
    """As the running publisher says; None: none runs, or it does not answer."""
    request = Request(secrets.token_hex(8), "list", most=most, about=about)
    try:
        answers = ask_shards(state, request, _LIST_TIMEOUT)
    except StateError as error:
        if error.code != "run.request_failed":
            raise
        return None
    if answers is None:
        return None
    found = [json.loads(answer) for answer in answers.values()]
    return _together(
        Pending([Hold(**hold) for hold in one["holds"]], one["count"], one["skipped"])
        for one in found
    )


def _kept(config: Config, state: StateDir, most: int, about: tuple[str, ...]) -> Pending:
    """As the indexes of this machine have it."""
    progress = state.read_progress() or {}
    shards = range(progress.get("shards", config.run.shards))
    folders = [state.index_of(progress, number, len(shards)) for number in shards]
    return _together(glance(folder, most, about) for folder in folders)


def _together(shards: Iterable[Pending]) -> Pending:
    holds: list[Hold] = []
    skipped: dict[str, list[tuple[int, int]]] = {}
    count = 0
    for shard in shards:
        holds += shard.holds
        count += shard.count
        skipped |= {a: [(f, t) for f, t in ranges] for a, ranges in shard.skipped.items() if ranges}
    return Pending(holds, count, skipped)


def given_up(config: Config, aggregate_id: str) -> tuple[int, int] | None:
    """The first and last version that a skip of an aggregate's open gap would give up.

    None where it holds nothing.

    Raises:
        StateError, StoreError: the index or the store cannot be read.
    """
    state = StateDir(config.app.state_dir)
    found, _ = pending(config, state, 0, (aggregate_id,))
    hold = next(iter(found.holds), None)
    if hold is None:
        return None
    above = VersionRange(aggregate_id, hold.first_missing + 1, hold.seen)
    with EventStore(config.store, EventStore.discover(config.store)) as store:
        there = store.versions(above, 1)
    return hold.first_missing, min(there, default=hold.seen) - 1


def act(  # noqa: PLR0913 (options, by keyword)
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
        versions: the first and the last that may be given up; None: of a retry.
        later: where no publisher is running, leave it to the next one.
        timeout: seconds to wait for a running publisher; then the request is taken back.
    """
    state = StateDir(config.app.state_dir)
    request = Request(secrets.token_hex(8), action, aggregate_id, *(versions or ()))
    if aggregate_id != aggregate_id.encode(errors="replace").decode():  # a shell passes any bytes
        return Answer("nothing is held", request)
    if state.is_running():
        answers = ask_shards(state, request, timeout)
        if answers is not None:
            [outcome] = answers.values()
            return Answer(outcome, request)
    if later and not state.is_running():
        state.keep(request)
        return Answer("kept", request)
    return Answer("no answer" if state.is_running() else "not running")


def cancel(config: Config, name: str) -> list[Request]:
    """Take back the requests of an aggregate, or the one of an id, that nobody has answered."""
    state = StateDir(config.app.state_dir)
    meant = [r for r in state.kept() if name in {r.id, r.aggregate_id}]
    for request in meant:  # a publisher that runs has taken them over
        ask_running(state, "withdraw", {"id": request.id})
    return [request for request in meant if state.withdraw(request)]
