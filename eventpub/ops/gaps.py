"""Open holds and recorded skips (`<topic>.gaps`): listing them, and acting on one.

If no publisher runs, holds are read from its indexes, and only `later` keeps a request.
"""

from __future__ import annotations

import heapq
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from eventpub.admission.model import Hold, SkippedGap, VersionRange
from eventpub.channel import Request
from eventpub.config import Config
from eventpub.errors import SinkError, StateError
from eventpub.index import Pending, glance
from eventpub.ops.asking import ask_running, ask_shards
from eventpub.ops.lookup import OwnTopics, with_times
from eventpub.ops.status import kind_without_answer
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir

_LIST_TIMEOUT = 5.0
"""Seconds. Shards that do not answer in time, as during a broker outage, are read from the disk."""


DONE = {"found", "nothing is missing", "skipped", "kept"}
"""Outcomes of a request that was done, will be done, or was not needed."""


def find(config: Config, limit: int) -> tuple[dict[str, Any], SinkError | None]:
    """Missing versions, as far as the publisher knows: `eventpub gaps list --json`.

    Returns:
        Up to `limit` holds, longest first, and recorded skips, latest first; and why the skips
        could not be read.
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

    holds = sorted(found.holds, key=lambda hold: hold.first_seen)[:limit]
    return {
        "running": is_running,
        "kind": "running" if is_running else kind_without_answer(state),
        "open": [with_times(hold) for hold in holds],
        "open_count": found.count,
        "skipped": [with_times(gap) | {"still_missing": is_missing(gap)} for gap in recorded],
        "skipped_count": skipped_count,
        "requests": [shown_request(request) for request in state.kept()],
    }, unread


def shown_request(request: Request) -> dict[str, Any]:
    shown = {name: getattr(request, name) for name in ("id", "action", "aggregate_id")}
    return shown | {"from_version": request.version, "to_version": request.to_version}


def _recorded(config: Config, limit: int) -> tuple[list[SkippedGap], int]:
    count = 0

    def skips() -> Iterator[SkippedGap]:
        nonlocal count
        for gap in OwnTopics(config).skips():
            yield gap
            count += 1

    latest = heapq.nlargest(limit, skips(), lambda gap: gap.skipped_at)
    return latest, count


def indexes(config: Config, state: StateDir) -> list[Path]:
    """The folders of the shards' indexes, with the engine `threads`."""
    count = (state.read_progress() or {}).get("shards", config.run.shards)
    return [state.shard_index(count, number) for number in range(count)]


def pending(
    config: Config, state: StateDir, most: int, about: tuple[str, ...]
) -> tuple[Pending, bool]:
    """Pending work (`index.glance`) of all shards, and whether the publisher reported it.

    Raises:
        StateError: state.holds_unknown, state.unreachable: its executors have the indexes.
    """
    request = Request(secrets.token_hex(8), "list", most=most, about=about)
    try:
        answers = ask_shards(state, request, _LIST_TIMEOUT)
    except StateError as error:
        if error.code != "run.request_failed":
            raise
        answers = None
    if answers is not None:
        found = [json.loads(answer) for answer in answers.values()]
        shards = [
            Pending([Hold(**hold) for hold in one["holds"]], one["count"], one["skipped"])
            for one in found
        ]
    elif state.is_of_spark():
        from eventpub.spark.checkpoint import pending_at

        shards = pending_at(config, state, request)
    else:
        shards = [glance(folder, most, about) for folder in indexes(config, state)]
    skipped: dict[str, list[tuple[int, int]]] = {}
    for shard in shards:
        skipped |= {a: [(f, t) for f, t in ranges] for a, ranges in shard.skipped.items() if ranges}
    holds = [hold for shard in shards for hold in shard.holds]
    together = Pending(holds, sum(shard.count for shard in shards), skipped)
    return together, answers is not None


def given_up(config: Config, aggregate_id: str) -> tuple[int, int] | None:
    """The versions that a skip of an aggregate's open gap would give up; None: none is missing."""
    state = StateDir(config.app.state_dir)
    found, _ = pending(config, state, 0, (aggregate_id,))
    if not found.holds:
        return None
    with EventStore(config.store, EventStore.discover(config.store)) as store:
        return missing_versions(store, found.holds[0])


def missing_versions(store: EventStore, hold: Hold) -> tuple[int, int] | None:
    if hold.catching_up:
        return None
    above = VersionRange(hold.aggregate_id, hold.first_missing + 1, hold.seen)
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
) -> tuple[str, Request | None]:
    """Have the publisher look up an aggregate's missing versions, or skip them, now.

    Args:
        versions: the first and last that may be skipped; None for a retry.
        later: leave the request to the next publisher if none runs.
        timeout: seconds to wait for the publisher; then the request is withdrawn.

    Returns:
        The outcome: "found", "skipped", "still missing", "nothing is held", "nothing is missing",
        "changed" (more is missing than `versions`), "kept" for the next publisher, "not running",
        or "no answer"; and the request, if one was made.
    """
    state = StateDir(config.app.state_dir)
    request = Request(secrets.token_hex(8), action, aggregate_id, *(versions or ()))
    if aggregate_id != aggregate_id.encode(errors="replace").decode():  # a shell passes any bytes
        return "nothing is held", request
    if state.is_running():
        answers = ask_shards(state, request, timeout)
        if answers is not None:
            [outcome] = answers.values()
            return outcome, request
    if later and not state.is_running():
        state.keep(request)
        return "kept", request
    return "no answer" if state.is_running() else "not running", None


def cancel(config: Config, name: str) -> list[Request]:
    """Withdraw an aggregate's unanswered requests, or the one with an id."""
    state = StateDir(config.app.state_dir)
    meant = [r for r in state.kept() if name in {r.id, r.aggregate_id}]
    for request in meant:  # a running publisher has taken them over
        ask_running(state, "withdraw", {"id": request.id})
    return [request for request in meant if state.withdraw(request)]
