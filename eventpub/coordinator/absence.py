"""Shards of a cluster that threads of this process publish, since no runner comes there: said.

Spark itself may wait without end and without a word, for its jars, its master or a free executor.
Pure: times are the machine's, s, and arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eventpub.config import Config
from eventpub.coordinator import wording
from eventpub.coordinator.events import Log
from eventpub.coordinator.health import Check
from eventpub.coordinator.shards import Shard

AFTER = 60.0
"""Seconds after which it is said."""

AGAIN = 600.0
"""Seconds after which it is said again."""


class Absence:
    """See the module.

    Args:
        shards: of the publisher.
    """

    def __init__(self, config: Config, shards: Sequence[Shard]) -> None:
        master = config.spark.master
        self._shards = shards if master != "none" and not master.startswith("local") else ()
        self._since: dict[int, float] = {}
        self._said_at: float | None = None

    def line(self, now: float) -> Log | None:
        """What the log says now; called once a second."""
        for shard in self._shards:
            if shard.lane is None:
                continue
            if shard.is_elsewhere(shard.lane):
                self._since.pop(shard.number, None)
            else:
                self._since.setdefault(shard.number, now)
        absent = [shard for shard in self._shards if self._is_absent(shard.number, now)]
        if not absent:
            if self._said_at is None or self._since:
                return None
            self._said_at = None
            return Log("info", "Spark's executors publish all shards now", {})
        if self._said_at is not None and now - self._said_at < AGAIN:
            return None
        self._said_at = now
        seconds = round(max(now - self._since[shard.number] for shard in absent))
        text = "threads of the publisher's process publish in place of Spark's executors"
        numbers = [shard.number for shard in absent]
        return wording.warning(text, shards=numbers, seconds=seconds, why=_why(absent[0]))

    def mark(self, check: Check, now: float) -> Check:
        """A check with what is to be said of its shard."""
        for shard in self._shards:
            if check.name != f"shard {shard.number}" or check.state != "ok":
                continue
            since = self._since.get(shard.number)  # the loop may take it away meanwhile
            if since is not None and now - since >= AFTER:
                text = f"{_why(shard)}; a thread of the publisher's process publishes it"
                return replace(check, state="warn", message=text, since=since)
        return check

    def _is_absent(self, number: int, now: float) -> bool:
        return now - self._since.get(number, now) >= AFTER


def _why(shard: Shard) -> str:
    if shard.elsewhere.is_failing:
        return "the shard's runners on executors fail, or do not connect"
    if shard.elsewhere.attempt:
        return "Spark's cluster gives the shard no executor"
    return "Spark has not come up"
