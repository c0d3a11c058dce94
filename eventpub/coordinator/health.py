"""Periodic checks (`Schedule`), and whether the publisher works, as named checks.

    database     it answers
    boundary     it is polled, so that new events are seen
    publishing   what is due is published
    shard N      its runner makes progress
    index        the state directory is writable, and no index is being rebuilt
    recount      late commits are looked for
    times        no rows in the future, and none of the past lately
    broker       it answers, and the topic is the same as at the start

Derived from events alone. A check without events turns bad by itself: a query that hangs raises
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from eventpub.channel import Ended, Folding, PartitionId, Report
from eventpub.coordinator import events as e
from eventpub.coordinator.shards import Shard, has_got_on
from eventpub.errors import EventpubError, counted

SILENT_AFTER = 15.0

_LIMITS = {"database": SILENT_AFTER, "boundary": SILENT_AFTER, "broker": 60.0}

STALLED_AFTER = 60.0
"""Seconds without progress before a shard with work counts as stalled."""

_ANSWERS: dict[type[e.Command], tuple[str, ...]] = {
    e.Poll: ("database", "boundary"),
    e.Count: ("database", "recount"),
    **dict.fromkeys((e.Sample, e.MeasureLag, e.CheckTable), ("database",)),
    **dict.fromkeys((e.CheckTopic, e.CheckOpen), ("broker",)),
}
"""Checks that a command sets to ok when it is done."""

_FAILURES: dict[type[e.Command], str] = {
    e.Poll: "boundary",
    e.CheckTopic: "broker",
    e.CheckOpen: "broker",
    e.Remember: "index",
}
"""The check that fails with a command, beside the database's."""

_FEW_FAILURES = 3
"""A shard's consecutive runners without progress before it is an error."""

HERE = "this process"

NOT_YET = "not seen to work yet"
_NO_RUNNER = "no runner at the moment; one is being started"

State = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class NamedCheck:
    """The state of one check; times are monotonic s. "warn": it works, but needs attention."""

    name: str
    state: State
    message: str
    since: float
    last_ok: float | None = None


def paused(by: str) -> str:
    return f"paused{f' by {by}' if by else ''}; run `eventpub resume` to publish again"


class Health:
    """Pure: times are arguments, monotonic s."""

    def __init__(self, shards: Sequence[Shard], do: e.Do) -> None:
        self._shards = shards
        self._do = do
        names = ["database", "boundary", "publishing", *map(_of, shards), "index", "broker"]
        self._checks = {name: NamedCheck(name, "error", NOT_YET, 0.0) for name in names}
        self._checks |= {name: NamedCheck(name, "ok", "", 0.0) for name in ("recount", "times")}
        self._got_on_at: float | None = None
        self._folding: dict[int, tuple[Folding, float]] = {}
        """By shard that reads its topic back: its progress, and when that was reported."""
        self.errors: dict[int, dict[str, Any]] = {}
        """By shard: the last; without its exception, whose frames have the shard's producer."""
        self.lacking = ""
        """What publishing waits for."""

    def set(self, name: str, state: State, message: str, now: float) -> None:
        before = self._checks[name]
        if state == "ok" and before.state == "error" and before.last_ok is not None:
            text = f"{name}: ok again after {now - before.last_ok:.0f} s"
            self._do(e.Log("info", text, {}))
        since = before.since if before.state == state else now
        last_ok = now if state == "ok" else before.last_ok
        self._checks[name] = NamedCheck(name, state, message, since, last_ok)

    def mark(self, name: str, message: str, now: float) -> None:
        """Set a check to "warn" with this message, or to ok if it is empty."""
        self.set(name, "warn" if message else "ok", message, now)

    # -- what happens -----------------------------------------------------------------------------

    def observe(self, event: e.Event, now: float) -> None:
        if self._got_on_at is None:
            self._got_on_at = now
            self._checks = {name: replace(c, since=now) for name, c in self._checks.items()}
        if isinstance(event, e.Done):
            for name in _ANSWERS.get(type(event.command), ()):
                self.set(name, "ok", "", now)
        elif isinstance(event, e.Failed):
            self._failed(event.command, event.error, now)
        elif isinstance(event, (Report, Folding, Ended)):
            self._heard(event, now)

    def foldings(self) -> list[Folding]:
        return [folding for folding, _ in self._folding.values()]

    def is_away(self, name: str) -> bool:
        return self._checks[name].state == "error"

    def written(self, now: float) -> None:
        if self._checks["index"].message.startswith(("state.", NOT_YET)):
            self.set("index", "ok", "", now)

    def _failed(self, command: e.Command, error: EventpubError, now: float) -> None:
        text = _text_of(error)
        if isinstance(command, e.Count):  # counts alone may be too slow
            size = counted(len(command.buckets), "bucket")
            self.mark("recount", f"{size} could not be counted, trying fewer; {text}", now)
        elif error.code.startswith("store."):
            self.set("database", "error", text, now)
        if (name := _FAILURES.get(type(command))) is not None:
            self.set(name, "error", text, now)

    def _heard(self, message: Report | Folding | Ended, now: float) -> None:
        number = message.shard
        if isinstance(message, Folding):
            self._folding[number] = message, now
            return
        self._folding.pop(number, None)
        if isinstance(message, Ended):
            if (error := message.error) is not None:
                found = {"code": error.code, "message": error.message}
                self.errors[number] = {**found, "where": HERE, "at": now}
                self.set(f"shard {number}", "error", _text_of(error), now)
        else:
            name = _of(self._shards[number])
            # a runner restarted after a failure may fail at the same point again
            if has_got_on(message) or self._checks[name].message == NOT_YET:
                self.set(name, "ok", "", now)
                self._got_on_at = now

    # -- the current state -----------------------------------------------------------------------

    def checks(
        self, now: float, unread_seconds: float, *, paused_by: str | None = None
    ) -> list[NamedCheck]:
        """All checks; call in the loop's thread. `paused_by`: "": unknown; None: not paused."""
        found = dict(self._checks)
        for name, limit in _LIMITS.items():
            check = found[name]
            if check.state == "ok" and check.last_ok is not None and now - check.last_ok > limit:
                silent = f"no answer for {now - check.last_ok:.0f} s"
                found[name] = replace(check, state="error", message=silent, since=check.last_ok)
        for shard in self._shards:
            check = self._of_shard(shard, found[_of(shard)], now)
            is_waiting = paused_by is not None and check.message == NOT_YET
            found[_of(shard)] = replace(check, state="warn") if is_waiting else check
        found["index"] = self._of_index(found["index"], now)
        state, message = self._publishing(found, now, unread_seconds, paused_by)
        self.set("publishing", state, message, now)
        found["publishing"] = self._checks["publishing"]
        return list(found.values())

    def _of_shard(self, shard: Shard, check: NamedCheck, now: float) -> NamedCheck:
        folding = self._of_fold(shard.number, now)
        if folding is not None:
            return replace(check, state="warn", message=folding)
        works_since = shard.works_since
        since = now if works_since is None else max(works_since, check.last_ok or 0.0)
        if now - since > STALLED_AFTER:
            text = f"no progress for {now - since:.0f} s with work pending"
            return replace(check, state="error", message=text, since=since)
        if check.state == "ok" and shard.lane is None:
            state: State = "error" if shard.failures > _FEW_FAILURES else "warn"
            return replace(check, state=state, message=_NO_RUNNER)
        return check

    def _of_fold(self, number: int, now: float) -> str | None:
        folding, at = self._folding.get(number, (None, now))
        if folding is None or now - at > STALLED_AFTER:
            return None
        read, left = counted(folding.read, "record"), counted(folding.left, "offset")
        return f"reading the topic back: {read} so far, {left} left"

    def _of_index(self, check: NamedCheck, now: float) -> NamedCheck:
        rebuilt = [s.number for s in self._shards if self._of_fold(s.number, now)]
        if check.state != "ok" or not rebuilt:
            return check
        text = f"reading the topic back for shards {', '.join(map(str, rebuilt))}"
        return replace(check, state="warn", message=text)

    def _publishing(
        self, found: dict[str, NamedCheck], now: float, unread_seconds: float, paused_by: str | None
    ) -> tuple[State, str]:
        got_on_at = now if self._got_on_at is None else self._got_on_at
        if paused_by is not None:
            return "warn", paused(paused_by)
        if self.lacking:
            return "error", self.lacking
        if not all(found[_of(shard)].last_ok for shard in self._shards):
            return "error", "not every shard is ready to publish yet"
        if unread_seconds > STALLED_AFTER and now - got_on_at > STALLED_AFTER:
            return "error", f"events are due, and none was published for {now - got_on_at:.0f} s"
        return "ok", ""


def _text_of(error: EventpubError) -> str:
    return f"{error.code}: {error.message}" + (f" [{error.where}]" if error.where else "")


def _of(shard: Shard) -> str:
    return f"shard {shard.number}"


# -- what is checked -----------------------------------------------------------------------------

_SECOND = 1.0
_EVERY: dict[type[e.Command], float] = {
    e.MeasureLag: _SECOND,
    e.Sample: _SECOND,
    e.CheckTopic: 5.0,
    e.CheckTable: 60.0,
}

_IN_DOUBT_AFTER = 0.5
_OF_ANOTHER_TABLE = {
    *("store.table_altered", "store.index_missing", "store.column_missing", "store.moved"),
}

_OPEN_EVERY = 10.0
"""Seconds without a window between checks that consumers see everything."""

_IDLE_AFTER = 2.0
"""Seconds without a report of rows after which a publisher is idle."""


class Schedule:
    """Periodic checks, one of each kind in flight. Times are monotonic s."""

    def __init__(self, is_exact: bool) -> None:
        self._is_exact = is_exact
        self.second_at = self._open_at = 0.0
        self._next: dict[type[e.Command], float] = {}
        self._busy_at = float("-inf")
        self._stood: dict[PartitionId, int] = {}
        self._under_way: set[type[e.Command]] = set()

    def is_second(self, now: float) -> bool:
        if now < self.second_at:
            return False
        self.second_at = now + _SECOND
        return True

    def had_rows(self, now: float) -> None:
        self._busy_at = now

    def due(
        self,
        now: float,
        time: int,
        position: int,
        ends: Mapping[PartitionId, int],
        shards: Sequence[Shard],
    ) -> Iterator[e.Command]:
        """The checks due now.

        Args:
            time: the database's, µs; 0: not known yet.
            position: everything created up to here is read, µs.
            ends: known ends of the topics.
        """
        if self._begins(e.MeasureLag, now):
            yield e.MeasureLag(position)
        if time and self._begins(e.Sample, now):
            yield e.Sample()
        if self._begins(e.CheckTopic, now):
            stood, self._stood = self._stood, dict(ends)
            yield e.CheckTopic({at: end for at, end in ends.items() if stood.get(at) == end})
        if self._begins(e.CheckTable, now):
            yield e.CheckTable()
        if now - self._busy_at < _IDLE_AFTER or not ends:
            self._open_at = now + _OPEN_EVERY
        elif now >= self._open_at and self._is_exact and all(s.is_idle() for s in shards):
            self._open_at = now + _OPEN_EVERY
            yield e.CheckOpen(ends)

    def _begins(self, kind: type[e.Command], now: float) -> bool:
        if kind in self._under_way or now < self._next.get(kind, 0.0):
            return False
        self._next[kind] = now + _EVERY[kind]
        self._under_way.add(kind)
        return True

    def met(self, error: EventpubError, now: float) -> None:
        """Check the table soon if a statement met another table, or server, than is known."""
        if error.code in _OF_ANOTHER_TABLE:
            self.hasten(e.CheckTable, now + _IN_DOUBT_AFTER)

    def hasten(self, kind: type[e.Command], at: float) -> None:
        self._next[kind] = min(self._next.get(kind, at), at)

    def is_done(self, kind: type[e.Command]) -> None:
        self._under_way.discard(kind)
