"""Where a publisher is: as a start finds it, as it is known now, and as it is written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eventpub.channel import Beginning, PartitionId, Report, Request
from eventpub.coordinator.events import Do, ForgetFormer, Remember, Reply
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.recounting import Recounting
from eventpub.coordinator.shards import Shard
from eventpub.sources.mysql import Layout
from eventpub.sources.mysql.open_transactions import DAY


@dataclass(frozen=True)
class StartState:
    """What a start has found out; times are µs.

    Attributes:
        run: which start of the publisher this is; it grows.
        now: the database's time.
        start: events created at or before are not published.
        position: up to where a former run has accounted for everything; None: there was none.
        low: as of `channel.Beginning`.
        hidden_since: as of `channel.Window`, as the former run has left it.
        acknowledged: next offsets up to which shards have ever reported to be.
        is_placed: as of `channel.Beginning`.
        former_shards, former_indexes: as of `channel.Beginning`.
        newest: as of `NewestRows.last`.
        server: identity of the database server that was read last; "": not known.
        until: nothing created after it is published, and then it is over; None: there is no end.
        is_paused, paused_by: whether the former run was, and by whom.
        kept: what else is written down with the position, and does not change.
        requests: that were left for the next publisher.
    """

    run: int
    now: int
    layout: Layout
    partitions: int
    start: int
    low: int
    position: int | None = None
    hidden_since: int | None = None
    acknowledged: Mapping[PartitionId, int] = field(default_factory=dict)
    is_placed: bool = False
    former_shards: int | None = None
    former_indexes: tuple[str, ...] = ()
    newest: tuple[int, int] | None = None
    server: str = ""
    until: int | None = None
    is_paused: bool = False
    paused_by: str = ""
    kept: Mapping[str, Any] = field(default_factory=dict)
    requests: tuple[tuple[Request, Reply], ...] = ()


class DurableState:
    """Where the publisher is, as it is written down. All times are µs."""

    def __init__(self, begin: StartState) -> None:
        self._begin = begin
        self.position = begin.start if begin.position is None else begin.position
        self.low = begin.low
        self.shards_hidden_since = begin.hidden_since
        self.open_hidden_since: int | None = None
        """Of what was open at the last poll: while the clock is behind, no window says it."""
        self._hidden_since: dict[int, int | None] = {}
        self.acknowledged: dict[PartitionId, int] = dict(begin.acknowledged)
        self.is_placed = begin.is_placed
        self.former_shards = begin.former_shards
        self.former_indexes = begin.former_indexes
        self.newest = begin.newest
        self.layout = begin.layout
        self.has_read = begin.position is not None
        self.uncounted_since: int | None = None
        self.written: dict[str, Any] | None = None
        self.to_forget: ForgetFormer | None = None

    def has_first_written(self, report: Report) -> bool:
        """Whether a report is of the first records in a partition that anybody knows of."""
        known = self.acknowledged
        return any(end and not known.get(place) for place, end in report.offsets.items())

    def take(self, shards: list[Shard], report: Report, recounting: Recounting) -> None:
        """Take over a report: what is hidden is of no use without the position it belongs to."""
        self.acknowledged |= report.offsets
        self.is_placed = self.is_placed or report.is_placed
        if report.done:  # before its first window a runner knows of nothing that hides
            self._hidden_since[report.shard] = report.hidden_since
        reports = [shard.report for shard in shards if shard.report is not None]
        if len(reports) == len(shards):
            self.position = min(r.position for r in reports)
            self.low = min(r.low for r in reports)
            self.has_read = True
            begun = self._begin.hidden_since
            since = [self._hidden_since.get(r.shard, begun) for r in reports]
            self.shards_hidden_since = min((at for at in since if at is not None), default=None)
        self.uncounted_since = recounting.uncounted_since

    def hidden(self, time: int | None) -> int | None:
        """Nothing that is hidden, or was and is not counted since, was created at or before.

        A new poller begins with it: whatever was hidden when the position was reached. Where that
        is years old nothing was seen hidden there, and a start counts again itself what the former
        run has left: of both, more than a day counts as a day.

        Args:
            time: the database's time of the last poll, µs; None: this run has not polled yet.
        """
        if not self.has_read:
            return None
        day_ago = (self._begin.now if time is None else time) - DAY
        others = [self.uncounted_since, self.position]
        seen = [self.shards_hidden_since, self.open_hidden_since]
        if time is None:
            others, seen = [*others, *seen], []
        since = [max(at, day_ago) for at in others if at is not None]
        return min([*since, *(at for at in seen if at is not None)])

    def held(self, shard: Shard) -> tuple[int, int] | None:
        """Between which times a shard may hold events, as it or the former run has said last."""
        begin, last = self._begin, shard.report
        if last is not None:
            return (last.low, last.position) if last.holds else None
        return None if begin.position is None else (begin.low, begin.position)

    def beginning(self, shard: Shard, uncounted_since: int | None) -> Beginning:
        """What a shard's next runner is to know, with its own `low` where it has reported one."""
        return Beginning(
            hidden_since=self._unpublished_since(uncounted_since),
            low=self.low if shard.report is None else max(self.low, shard.report.low),
            position=self.position,
            acknowledged=dict(self.acknowledged),
            is_placed=self.is_placed,
            uncounted_since=uncounted_since,
            former_shards=self.former_shards,
            former_indexes=self.former_indexes,
        )

    def _unpublished_since(self, *others: int | None) -> int | None:
        since = (self.shards_hidden_since, self.open_hidden_since, *others)
        return min((at for at in since if at is not None), default=None)

    def take_over_former(self) -> None:
        """All shards have what former indexes knew: these are removed when that is written."""
        former, indexes = self.former_shards, self.former_indexes
        self.former_shards, self.former_indexes = None, ()
        if former is not None or indexes:
            self.to_forget = ForgetFormer(former)

    def write(self, what: dict[str, Any], do: Do) -> None:
        """Have that written down, where it is new: a write waits for the disk."""
        if what != self.written or self.to_forget is not None:
            do(Remember(what, self.to_forget))
            self.written, self.to_forget = what, None

    def is_not_written(self, command: Remember) -> None:
        """The state could not be written: it is due again."""
        self.written = None
        self.to_forget = command.then or self.to_forget

    def document(self, shards: int, progress: Progress, recounting: Recounting) -> dict[str, Any]:
        """What must outlive the process."""
        begin = self._begin
        behind_since = recounting.behind_since(self.position)
        return {
            **begin.kept,
            "run": begin.run,
            "position": self.position,
            "low": self.low,
            "hidden_since": self._unpublished_since(recounting.uncounted_since, behind_since),
            "holds": progress.holds_open,
            "newest": None if self.newest is None else [*self.newest, self.layout.sampled_by],
            "ends": [[*place, end] for place, end in self.acknowledged.items()],
            "shards": shards if self.former_shards is None else self.former_shards,
            "partitions": begin.partitions,
            "placed": self.is_placed,
            "server": progress.server,
        }
