"""Requests of users on their way to shards: who is asked, and what each has answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eventpub.admission import topic_partition
from eventpub.channel import Request
from eventpub.coordinator.events import Log
from eventpub.coordinator.shards import Shard

_COMMANDS = {"retry": "gaps retry", "skip": "gaps skip", "publish": "dead retry"}


@dataclass
class _Pending:
    """A request that not all of its shards have answered."""

    request: Request
    reply: Callable[[dict[int, str]], None]
    shards: set[int]
    answers: dict[int, str] = field(default_factory=dict)


class Requests:
    """Those that wait for an answer.

    Args:
        shards: of the publisher.
        partitions: of the topic, which say whose an aggregate is.
    """

    def __init__(self, shards: Sequence[Shard], partitions: int) -> None:
        self._shards = shards
        self._partitions = partitions
        self._pending: dict[str, _Pending] = {}

    def send(self, request: Request, reply: Callable[[dict[int, str]], None]) -> None:
        """Have it answered by the shard of its aggregate, a list of all of them by each."""
        shards = self._shards
        if request.action != "list" or request.aggregate_id:
            partition = topic_partition(request.aggregate_id, self._partitions)
            shards = [self._shards[partition % len(self._shards)]]
        self._pending[request.id] = _Pending(request, reply, {shard.number for shard in shards})
        for shard in shards:
            shard.ask(request)

    def answered(self, request_id: str, shard: int, answer: str) -> Log | None:
        """A shard has answered; what is to be said when it was the last."""
        pending = self._pending.get(request_id)
        if pending is None:
            return None
        pending.answers[shard] = answer
        if pending.answers.keys() < pending.shards:
            return None
        del self._pending[request_id]
        pending.reply(pending.answers)
        if pending.request.action == "list":
            return None
        facts = {"aggregate_id": pending.request.aggregate_id, "outcome": answer}
        return Log("info", f"{_COMMANDS[pending.request.action]} was requested", facts)

    def withdraw(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        self._pending.pop(request_id, None)
        for shard in self._shards:
            shard.requests.pop(request_id, None)
