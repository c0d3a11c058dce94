"""What polls and samples show of the database: what is logged of it, and what is counted again.

Another server answers, its clock was set back, it does not let open transactions be seen, one of
them has ended after its rows were passed, rows of the past or of the future come, the table was
altered.
"""

from __future__ import annotations

from typing import Protocol

from eventpub.admission.model import bucket_of
from eventpub.config import format_time
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.events import Do, Reassign, Sampled, TableChecked
from eventpub.coordinator.newest import ENDED_FOR, NewestRows
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.recounting import Recounting
from eventpub.coordinator.wording import warning
from eventpub.errors import StoreError
from eventpub.sources.mysql import Layout
from eventpub.sources.mysql.events import altered_table
from eventpub.sources.mysql.zones import writers_zone
from eventpub.terminal import counted

_WATERMARK = {
    "denied": "the account may not see open transactions, so the boundary is the database's time"
    " minus read.delay; late commits are still found (to make them visible: GRANT PROCESS ON *.*)",
    "stale": "no fresh answer about open transactions, since another client polls"
    " information_schema.innodb_trx too often; the boundary is the database's time minus"
    " read.delay; late commits are still found",
}
"""By state of the watermark, where it cannot see."""

_WARNED_EVERY = 60.0
"""Seconds between two warnings of one kind."""

_WARNS_FOR = 300.0
"""Seconds for which the check of times warns of rows of the past after the last of them."""

_CLOCK_TOLERANCE = 60_000_000
"""µs by which an event may lie in the future without a word."""


class Known(Protocol):
    """What is known of the table; times are µs.

    Attributes:
        position: everything created at or before is read.
        layout: of the event table.
        newest: as of `NewestRows.last`.
        open_hidden_since: as of `channel.Window`, of what was open at the last poll.
    """

    position: int
    layout: Layout
    newest: tuple[int, int] | None
    open_hidden_since: int | None


class DatabaseChanges:
    """Pure: the machine's times are arguments, s.

    Args:
        is_fatal: whether rows of the past that keep coming end the publisher.

    Attributes:
        seen_at: when the last poll was answered; None: none was.
    """

    def __init__(  # noqa: PLR0913 (the parts that it passes things to)
        self,
        newest: NewestRows,
        recounting: Recounting,
        durable: Known,
        progress: Progress,
        do: Do,
        *,
        is_fatal: bool,
    ) -> None:
        self._newest = newest
        self.wants_more = newest.wants_more
        self._is_fatal = is_fatal
        self._recounting = recounting
        self._durable = durable
        self._progress = progress
        self._do = do
        self._warned_of_watermark = ""
        self._never_read = 0
        self._past_at, self._past_rows, self._past_oldest = float("-inf"), 0, 0
        self._ended: dict[tuple[int, int], float] = {}
        self._warned_at, self._warned_of = float("-inf"), ((False, False), 0)
        self.seen_at: float | None = None

    # -- polls ------------------------------------------------------------------------------------

    def polled(self, result: PollResult, now: float) -> bool:
        """The boundary was polled; whether that has shown what is to be written down at once."""
        progress = self._progress
        self.seen_at = now
        progress.time = result.now
        if result.state != "denied":  # what was seen to be hidden stays so without the privilege
            self._durable.open_hidden_since = result.hidden_since
        self._meet(result.server)
        self._recounting.ended(result.ended)
        found = ((bucket_of(after + 1), bucket_of(upto)) for after, upto in result.ended)
        self._ended |= dict.fromkeys(found, now)
        progress.no_longer_waited_for(result.timed_out)
        self._say_watermark(result.state)
        seconds = self._recounting.clock_stepped(result.now, now)
        if seconds:
            text = (
                "the database's clock went back; until it catches up, only the recount finds new"
                " rows"
            )
            if seconds > 0:
                text = "the database's clock went ahead of this machine's: its seconds are counted"
                text += " again"
            position = format_time(self._durable.position)
            self._do(warning(text, seconds=abs(round(seconds, 3)), position=position))
        return seconds < 0

    def _meet(self, server: str) -> None:
        """Which server is read; a change is said, and everything is counted again."""
        before = self._progress.server
        if not server or server == before:
            return
        self._progress.server = server
        if before:
            text = (
                "another database server answers now: events that only it has are published,"
                " events that only the old one had stay on the topic, and versions that differ"
                " become dead letters; `eventpub verify` compares everything"
            )
            self._do(warning(text, before=before, now=server))
            self._recounting.everything(self._progress.time)

    def _say_watermark(self, state: str) -> None:
        if state != self._progress.watermark and state in _WATERMARK:
            if state != self._warned_of_watermark:
                self._do(warning(_WATERMARK[state], state=state))
            self._warned_of_watermark = state
        elif state in {"open", "off"}:
            self._warned_of_watermark = ""
        self._progress.watermark = state

    # -- samples and checks -----------------------------------------------------------------------

    def sampled(self, event: Sampled, now: float) -> StoreError | None:
        """Rows that are inserted now but say that they were created long ago, or will be.

        Returns:
            The error to end with, where they are of a kind that would be lost.
        """
        newest, durable, time = self._newest, self._durable, self._progress.time
        self._ended = {b: since for b, since in self._ended.items() if now - since < ENDED_FOR}
        ended = list(self._ended)
        found = newest.sample(time, durable.position, event.rows, ended, event.above)
        if found:
            self._note_past([row.created for row in found], now)
        elif not self._recounting.has_late:
            durable.newest = newest.last
        progress, is_far = self._progress, event.ahead > _CLOCK_TOLERANCE
        progress.ahead_seconds = event.ahead / 1e6 if is_far else 0.0
        progress.rows_ahead = event.rows_ahead if is_far else 0
        self._warn_of_odd_times(now)
        if not (self._is_fatal and newest.trips):
            return None
        return newest.error(time, durable.layout.where, self._zone)

    @property
    def _zone(self) -> str | None:
        """In which times are read; None: the column is a TIMESTAMP."""
        zone = self._durable.layout.zone
        return None if zone is None else zone.name

    def _note_past(self, created: list[int], now: float) -> None:
        self._recounting.note([bucket_of(at) for at in created])
        self._progress.rows_in_past += len(created)
        if now - self._past_at > _WARNS_FOR:
            self._past_rows, self._past_oldest = 0, self._progress.time
        self._past_at, self._past_rows = now, self._past_rows + len(created)
        self._past_oldest = min(self._past_oldest, *created)

    def odd_times(self, now: float) -> str:
        """What is odd about the rows' times at the moment; "": nothing is."""
        said, progress = [], self._progress
        if progress.ahead_seconds:
            said.append(
                f"store.rows_in_future: {counted(progress.rows_ahead, 'row')}, the newest"
                f" {progress.ahead_seconds:.0f} s ahead of the database's time, published then"
            )
        if now - self._past_at <= _WARNS_FOR:
            said.append(
                f"store.rows_in_past: {counted(self._past_rows, 'row')} committed recently with old"
                f" times, from {format_time(self._past_oldest)}; a recount publishes them"
                " (`eventpub verify` shows whether all are published)"
            )
        if self._never_read:
            said.append(
                f"{counted(self._never_read, 'row')} with a create_time before 1970, or none, are"
                " not read (eventpub doctor)"
            )
        return "; ".join(said)

    def _warn_of_odd_times(self, now: float) -> None:
        """Log them: at once where they are of another kind than before, or where more have come."""
        text, rows = self.odd_times(now), self._past_rows
        kinds = (bool(self._progress.ahead_seconds), now - self._past_at <= _WARNS_FOR)
        has_more = rows > self._warned_of[1] and now - self._warned_at >= _WARNED_EVERY
        if any(kinds) and (kinds != self._warned_of[0] or has_more):
            self._warned_at = now
            advice = writers_zone(self._zone) + "; if transactions last that long, raise"
            advice += " recount.horizon" + ", or GRANT PROCESS" * (
                self._progress.watermark == "denied"
            )
            self._do(warning(text, fix=advice))
            self._warned_of = kinds, rows
        elif not any(kinds):
            self._warned_of = kinds, 0

    def altered(self, event: TableChecked) -> StoreError | None:
        """What the event table looks like now; what to begin again for, where it has changed."""
        self._never_read = event.never_read
        before, layout = self._durable.layout, event.layout
        if layout == before:
            return None
        names = [name for name in vars(layout) if vars(layout)[name] != vars(before)[name]]
        self._do(warning("the event table was altered", table=layout.table, changed=names))
        self._durable.layout = layout
        if layout.sampled_by != before.sampled_by:
            self._newest.begin_anew()
        self._do(Reassign(layout))
        return altered_table(layout)
