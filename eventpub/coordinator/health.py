"""Whether the publisher works, as named checks: each with since when, and when it was well last.

    database     it answers
    boundary     it is polled, so that new events are seen
    publishing   what is due is published
    shard N      its runner does what it is sent
    index        the state directory can be written, and no index is being rebuilt
    recount      late commits are looked for
    times        no row is of the future, and none that has come lately of the past
    broker       it answers, and the topic is the one that was there at the start

Made of the coordinator's events alone (`observe`). A check that nothing is heard of turns bad by
itself (`checks`): a query that hangs raises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from eventpub.channel import Farewell, Folding, Report
from eventpub.channel.lane import Received
from eventpub.coordinator import events as e
from eventpub.coordinator.shards import Shard, has_got_on
from eventpub.errors import EventpubError
from eventpub.terminal import counted

SILENT_AFTER = 15.0
"""Seconds without an answer after which the database, or the boundary, counts as not reached."""

_BROKER_SILENT_AFTER = 60.0
"""It is asked every 5 s."""

STALLED_AFTER = 60.0
"""Seconds in which a shard with work does nothing after which it counts as stalled."""

_DATABASE = (e.Polled, e.Counted, e.Sampled, e.LagMeasured, e.TableChecked)
_BROKER = (e.TopicChecked, e.OpenChecked)

_FEW_FAILURES = 3
"""Runners of a shard that are gone one after the other, and have done nothing."""

_NOT_YET = "not seen to work yet"
_NO_RUNNER = "no runner at the moment; one is being started"
_NOT_POLLED = "not polling: no shard has a runner"

State = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Check:
    """One check, as it stands. Times are the machine's, s.

    Attributes:
        name: as in the module.
        state: "warn" works, but somebody should look.
        message: what is wrong, with its code; "" where nothing is.
        since: when the state began.
        last_ok: when it was ok last; None: never.
    """

    name: str
    state: State
    message: str
    since: float
    last_ok: float | None = None


@dataclass(frozen=True)
class ShardError:
    """The last error that a shard's runner has met.

    Attributes:
        code, message: of the error.
        where: the machine and process.
        at: the machine's time, s.
    """

    code: str
    message: str
    where: str
    at: float


class Health:
    """See the module. Pure: times are the machine's, s, and arguments.

    Args:
        shards: of the publisher.

    Attributes:
        errors: the last error of each shard that has met one.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._checks: dict[str, Check] = {}
        names = ["database", "boundary", "publishing", *map(_of, shards), "index", "broker"]
        for name in names:
            self._checks[name] = Check(name, "error", _NOT_YET, 0.0)
        for name in ("recount", "times"):
            self._checks[name] = Check(name, "ok", "", 0.0)
        self._got_on_at: float | None = None
        self._folding: dict[int, tuple[str, float]] = {}
        """Of shards that read their topics back: how far, and when that was said."""
        self.errors: dict[int, ShardError] = {}
        self._recovered: list[tuple[str, float]] = []

    # -- what happens -----------------------------------------------------------------------------

    def observe(self, event: e.Event, now: float) -> None:
        """Take over what an event says; before it is handled."""
        if self._got_on_at is None:
            self._got_on_at = now
            self._checks = {name: replace(c, since=now) for name, c in self._checks.items()}
        if isinstance(event, _DATABASE):
            self._set("database", "ok", "", now)
            if isinstance(event, e.Polled):
                self._set("boundary", "ok", "", now)
            if isinstance(event, e.Counted):
                self._set("recount", "ok", "", now)
        elif isinstance(event, _BROKER):
            self._set("broker", "ok", "", now)
        elif isinstance(event, e.Failed):
            self._failed(event.command, event.error, now)
        elif isinstance(event, Received):
            self._received(event, now)

    def is_away(self, name: str) -> bool:
        """Whether what a check is about has failed last."""
        return self._checks[name].state == "error"

    def mark(self, name: str, message: str, now: float) -> None:
        """A check warns of this; of nothing where the message is empty."""
        self._set(name, "warn" if message else "ok", message, now)

    def written(self, now: float) -> None:
        """The position was written down."""
        if self._checks["index"].message.startswith(("state.", _NOT_YET)):
            self._set("index", "ok", "", now)

    def _failed(self, command: e.Command, error: EventpubError, now: float) -> None:
        text = _text_of(error)
        if isinstance(command, e.Count):  # counts may be too slow where all else is well
            size = counted(len(command.buckets), "bucket")
            self.mark("recount", f"{size} could not be counted, trying fewer; {text}", now)
        elif error.code.startswith("store."):
            self._set("database", "error", text, now)
        if isinstance(command, e.Poll):
            self._set("boundary", "error", text, now)
        elif isinstance(command, (e.CheckTopic, e.CheckOpen)):
            self._set("broker", "error", text, now)
        elif isinstance(command, e.Remember):
            self._set("index", "error", text, now)

    def _received(self, event: Received, now: float) -> None:
        number, message = event.lane.shard, event.message
        if event.lane is not self._shards[number].lane:
            return
        if isinstance(message, Farewell):
            if message.error is not None:
                self._shard_failed(number, message.error, event.lane.hello.where, now)
        elif isinstance(message, Folding):
            read, left = message.read, message.left
            text = f"it reads its topic back: {counted(read, 'record')} so far,"
            text += f" {counted(left, 'offset')} left"
            self._folding[number] = text, now
        elif isinstance(message, Report):
            self._folding.pop(number, None)
            name = _of(self._shards[number])
            # who has failed, and begins anew, may fail at the same again
            if has_got_on(message) or self._checks[name].message == _NOT_YET:
                self._set(name, "ok", "", now)
                self._got_on_at = now

    def _shard_failed(self, number: int, error: EventpubError, where: str, now: float) -> None:
        self.errors[number] = ShardError(error.code, error.message, where, now)
        self._set(f"shard {number}", "error", _text_of(error), now)

    def take_recovered(self) -> list[tuple[str, float]]:
        """The checks that were wrong and are ok now, each with how long they were, s; once."""
        found, self._recovered = self._recovered, []
        return found

    def _set(self, name: str, state: State, message: str, now: float) -> None:
        before = self._checks[name]
        if state == "ok" and before.state == "error" and before.last_ok is not None:
            self._recovered.append((name, now - before.last_ok))
        since = before.since if before.state == state else now
        last_ok = now if state == "ok" else before.last_ok
        self._checks[name] = Check(name, state, message, since, last_ok)

    # -- how it stands ----------------------------------------------------------------------------

    def checks(
        self, now: float, unread_seconds: float, *, paused_by: str | None = None
    ) -> list[Check]:
        """All of them, as they stand now; for the loop, which alone reads what it changes.

        Args:
            unread_seconds: the lag, without what is held, which waits for its time.
            paused_by: who has paused it; "": not known; None: it is not paused.
        """
        found = dict(self._checks)
        limits = {
            "database": SILENT_AFTER,
            "boundary": SILENT_AFTER,
            "broker": _BROKER_SILENT_AFTER,
        }
        for name, limit in limits.items():
            check = found[name]
            if check.state == "ok" and check.last_ok is not None and now - check.last_ok > limit:
                silent = f"no answer for {now - check.last_ok:.0f} s"
                found[name] = replace(check, state="error", message=silent, since=check.last_ok)
        found["boundary"] = self._of_boundary(found["boundary"])
        for shard in self._shards:
            found[_of(shard)] = self._of_shard(shard, found[_of(shard)], now)
        found["index"] = self._of_index(found["index"], now)
        found["publishing"] = self._publishing(found, now, unread_seconds, paused_by)
        self._checks["publishing"] = found["publishing"]
        return list(found.values())

    def _of_boundary(self, check: Check) -> Check:
        """Nobody polls it while nobody could read, which says nothing of the database."""
        if check.state == "ok" or any(shard.lane is not None for shard in self._shards):
            return check
        return replace(check, message=_NOT_POLLED)

    def _of_shard(self, shard: Shard, check: Check, now: float) -> Check:
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
        text, at = self._folding.get(number, ("", -STALLED_AFTER))
        return text if text and now - at <= STALLED_AFTER else None

    def _of_index(self, check: Check, now: float) -> Check:
        rebuilt = [s.number for s in self._shards if self._of_fold(s.number, now)]
        if check.state != "ok" or not rebuilt:
            return check
        text = f"the topic is read back for shards {', '.join(map(str, rebuilt))}"
        return replace(check, state="warn", message=text)

    def _publishing(
        self, found: dict[str, Check], now: float, unread_seconds: float, paused_by: str | None
    ) -> Check:
        before = self._checks["publishing"]
        got_on_at = now if self._got_on_at is None else self._got_on_at
        state: State = "ok"
        message = ""
        shards = [found[_of(shard)] for shard in self._shards]
        if paused_by is not None:
            by = f" by {paused_by}" if paused_by else ""
            state, message = "warn", f"paused{by}; run `eventpub resume` to publish again"
        elif not all(check.last_ok for check in shards):
            state, message = "error", "not every shard is ready to publish yet"
        elif unread_seconds > STALLED_AFTER and now - got_on_at > STALLED_AFTER:
            state = "error"
            message = f"events are due, and none was published for {now - got_on_at:.0f} s"
        since = before.since if before.state == state else now
        return Check("publishing", state, message, since, now if state == "ok" else before.last_ok)


def _text_of(error: EventpubError) -> str:
    """Code, message, and which file, table or topic it is about."""
    return f"{error.code}: {error.message}" + (f" [{error.where}]" if error.where else "")


def _of(shard: Shard) -> str:
    return f"shard {shard.number}"
