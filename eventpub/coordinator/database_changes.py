"""What polls and samples show of the database: what is logged of it, and what is counted again.

Another server answers, its clock was set back, it does not let open transactions be seen, one of
them has ended after its rows were passed, rows of the past or of the future come, the table was
altered.
"""

from __future__ import annotations

from collections.abc import Sequence

from eventpub.coordinator import wording
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.durable_state import DurableState
from eventpub.coordinator.events import Do, Reassign, Sampled, TableChecked
from eventpub.coordinator.past import OddRows
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.recounting import Recounting
from eventpub.errors import StoreError
from eventpub.store.events import NewRow, altered_table


class DatabaseChanges:
    """See the module. Pure: the machine's times are arguments, s.

    Args:
        odd: judges samples of the newest rows.
        recounting: counts again.
        durable: has the position, and keeps what is known of the table.
        progress: shows what the database is like.
        do: takes commands.

    Attributes:
        seen_at: when the last poll was answered; None: none was.
    """

    def __init__(
        self,
        odd: OddRows,
        recounting: Recounting,
        durable: DurableState,
        progress: Progress,
        do: Do,
    ) -> None:
        self._odd = odd
        self._recounting = recounting
        self._durable = durable
        self._progress = progress
        self._do = do
        self._warned_of_watermark = ""
        self.seen_at: float | None = None

    # -- polls ------------------------------------------------------------------------------------

    def polled(self, result: PollResult, now: float) -> bool:
        """The boundary was polled; whether that has shown what is to be written down at once."""
        progress = self._progress
        self.seen_at = now
        progress.time = result.now
        if result.state != "denied":  # what was seen to be hidden stays so while nobody may look
            self._durable.open_hidden_since = result.hidden_since
        self._meet(result.server)
        self._recounting.ended(result.ended)
        self._odd.ended(result.ended, now)
        progress.no_longer_waited_for(result.timed_out)
        self._say_watermark(result.state)
        seconds = self._recounting.clock_went_back(result.now)
        if seconds:
            self._do(wording.clock_went_back(seconds, self._durable.position))
        return seconds > 0

    def _meet(self, server: str) -> None:
        """Which server is read; a change is said, and everything is counted again."""
        before = self._progress.server
        if not server or server == before:
            return
        self._progress.server = server
        if before:
            self._do(wording.another_server(before, server))
            self._recounting.everything(self._progress.time)

    def _say_watermark(self, state: str) -> None:
        if state != self._progress.watermark and state in wording.WATERMARK:
            if state != self._warned_of_watermark:
                self._do(wording.warning(wording.WATERMARK[state], state=state))
            self._warned_of_watermark = state
        elif state in {"open", "off"}:
            self._warned_of_watermark = ""
        self._progress.watermark = state

    # -- samples and checks -----------------------------------------------------------------------

    def wants_more(self, rows: Sequence[NewRow]) -> int | None:
        """As of `NewestRows.wants_more`."""
        return self._odd.newest.wants_more(rows)

    def sampled(self, event: Sampled, now: float) -> StoreError | None:
        """Rows that are inserted now but say that they were created long ago, or will be.

        Returns:
            The error to end with, where they are of a kind that would be lost.
        """
        odd, durable, time = self._odd, self._durable, self._progress.time
        buckets, lines = odd.sample(time, durable.position, event, now)
        if not (buckets or self._recounting.has_late):
            durable.newest = odd.newest.last
        if buckets:
            self._recounting.note(buckets)
            self._progress.rows_in_past += len(buckets)
        for line in [*lines, *odd.future(event.ahead, event.rows_ahead, now)]:
            self._do(line)
        self._progress.ahead_seconds, self._progress.rows_ahead = odd.ahead_seconds, odd.rows_ahead
        return odd.error(time, durable.layout)

    def odd_times(self, now: float) -> str:
        """As of `OddRows.warning`."""
        return self._odd.warning(now)

    def altered(self, event: TableChecked) -> StoreError | None:
        """What the event table looks like now; what to begin again for, where it has changed."""
        self._odd.never_read = event.never_read
        before, layout = self._durable.layout, event.layout
        if layout == before:
            return None
        names = [name for name in vars(layout) if vars(layout)[name] != vars(before)[name]]
        self._do(wording.warning("the event table was altered", table=layout.table, changed=names))
        self._durable.layout = layout
        if layout.sampled_by != before.sampled_by:
            self._odd.newest.begin_anew()
        self._do(Reassign(layout))
        return altered_table(layout)
