"""Users' requests on their way to shards, and the shards' answers.

A request goes to a runner that has begun, and to the next one if that ends before answering. After
two failures it is answered with the error, so that it cannot stop the publisher. While paused,
nothing is published on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eventpub.admission.model import topic_partition
from eventpub.channel import Lane, Request
from eventpub.coordinator.events import Do, Log, Reply, warning
from eventpub.coordinator.shards import Shard
from eventpub.errors import EventpubError, StateError

_MOST_FAILURES = 2
"""Runners of a shard that may fail with a request in flight."""


@dataclass
class _Pending:
    """A request not yet answered by all its shards; a runner may execute it even if withdrawn."""

    request: Request
    reply: Reply
    shards: list[Shard]
    is_kept: bool = False
    lanes: dict[int, Lane] = field(default_factory=dict)
    answers: dict[int, str] = field(default_factory=dict)
    failures: int = 0
    error: EventpubError | None = None
    is_withdrawn: bool = False

    @property
    def command(self) -> str:
        action = self.request.action
        return action if action == "publish" else f"gaps {action}"

    @property
    def publishes(self) -> bool:
        return self.request.action != "list"

    def is_at(self, shard: Shard) -> bool:
        lane = self.lanes.get(shard.number)
        return lane is not None and lane is shard.lane and shard.number not in self.answers


class Requests:
    def __init__(self, shards: Sequence[Shard], partitions: int, do: Do) -> None:
        self._shards = shards
        self._partitions = partitions
        self._do = do
        self._pending: dict[str, _Pending] = {}

    # -- requests come and go ---------------------------------------------------------------------

    def receive(self, request: Request, reply: Reply, *, is_kept: bool = False) -> None:
        """A request left for this publisher (`is_kept`) waits while paused; others are refused."""
        self._pending[request.id] = _Pending(request, reply, self._of(request), is_kept)

    def withdraw(self, request_id: str) -> None:
        if (pending := self._pending.get(request_id)) is not None:
            pending.is_withdrawn = True

    def take_back(self) -> list[Request]:
        """Have no runner do what was withdrawn; returns all that runners are to do."""
        for pending in self._pending.values():
            if pending.is_withdrawn:
                pending.lanes.clear()
        return [p.request for p in self._pending.values() if any(map(p.is_at, p.shards))]

    def get(self, request_id: str) -> Request | None:
        pending = self._pending.get(request_id)
        return None if pending is None else pending.request

    def _of(self, request: Request) -> list[Shard]:
        if request.action == "list":
            return list(self._shards)
        partition = topic_partition(request.aggregate_id, self._partitions)
        return [self._shards[partition % len(self._shards)]]

    # -- on their way -----------------------------------------------------------------------------

    def send(self, *, is_paused: bool) -> None:
        for pending in list(self._pending.values()):
            is_under_way = any(map(pending.is_at, pending.shards))
            if pending.is_withdrawn:
                if not is_under_way:
                    del self._pending[pending.request.id]
            elif not (is_paused and pending.publishes):
                self._send(pending)
            elif not (is_under_way or pending.is_kept):
                error = pending.error
                self._end(pending, paused() if error is None else _failed(pending, error))

    def _send(self, pending: _Pending) -> None:
        for shard in pending.shards:
            is_open = shard.number not in pending.answers and not pending.is_at(shard)
            if is_open and shard.has_begun and shard.lane is not None:
                pending.lanes[shard.number] = shard.lane
                shard.lane.send(pending.request)

    def under_way(self, shard: Shard) -> int:
        return sum(each.publishes and each.is_at(shard) for each in self._pending.values())

    # -- what comes of them -----------------------------------------------------------------------

    def answered(self, request_id: str, shard: int, answer: str) -> None:
        pending = self._pending.get(request_id)
        if pending is None:
            return
        pending.answers[shard] = answer
        if len(pending.answers) < len(pending.shards):
            return
        del self._pending[request_id]
        if not pending.is_withdrawn:
            pending.reply(pending.answers)
        if pending.publishes:
            facts = {"aggregate_id": pending.request.aggregate_id, "outcome": answer}
            self._do(Log("info", f"{pending.command} was requested", facts))

    def runner_failed(self, shard: Shard, error: EventpubError) -> None:
        for pending in list(self._pending.values()):
            if not pending.is_at(shard):
                continue
            pending.failures, pending.error = pending.failures + 1, error
            if pending.failures >= _MOST_FAILURES and not pending.is_withdrawn:
                self._end(pending, _failed(pending, error))

    def _end(self, pending: _Pending, error: EventpubError) -> None:
        del self._pending[pending.request.id]
        pending.reply(error)
        facts = {"aggregate_id": pending.request.aggregate_id, "error": error.message}
        self._do(warning(f"{pending.command} was requested, and not done", **facts))


def paused() -> StateError:
    return StateError(
        "run.paused",
        "the publisher is paused: it publishes nothing, not even on request, until eventpub resume",
        suggestion="eventpub resume, then repeat the request",
    )


def _failed(pending: _Pending, error: EventpubError) -> StateError:
    [shard, *_] = pending.shards
    return StateError(
        "run.request_failed",
        f"gave up on {pending.command}: {pending.failures} runners of its shard failed"
        f" before answering, the last with {error.code}: {error.message}",
        where=f"shard {shard.number}" if pending.publishes else None,
        suggestion="fix that error and try again; the request may have succeeded anyway:"
        " check eventpub gaps list and eventpub trace",
    )
