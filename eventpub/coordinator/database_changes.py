"""What polls and samples show of the database: what to log, and what to count again.

Writers in another time zone than a DATETIME is read in, or an import, insert rows below the
position and beyond the recount's horizon. So the rows with the newest ids are sampled about once a
second, and the second of each such row is counted again, which publishes it. A long transaction
brings such rows too, but keeps the order of ids and times. If rows keep coming whose age looks like
the difference of two zones, or whose ids follow those of much younger rows, the publisher stops:
rows that no sample sees would be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import TypeAlias

from eventpub.admission.model import bucket_of
from eventpub.config import Config, format_time
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.events import Do, Reassign, Sampled, TableChecked, warning
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.recounting import Recounting
from eventpub.errors import StoreError, counted
from eventpub.sources.base import NewRow
from eventpub.sources.mysql import Layout
from eventpub.sources.mysql.events import altered_table
from eventpub.sources.mysql.values import writers_zone
from eventpub.times import ZONES_DIFFER

SAMPLE = 20
"""Rows of a sample: the highest ids, or the youngest rows of a table without ids."""

MOST = 100_000
"""Rows fetched, lowest ids first, if a whole sample is new and one row is of the past."""

ENDED_FOR = 60.0
"""Seconds for which an ended transaction explains rows."""

_NEVER_LATE = 60_000_000
"""µs: commits may be this late whatever the horizon; no two zones differ by less."""

_ZONES_DIFFER_BY = 900_000_000
"""µs; two zones differ by a multiple of it."""
_COMMITS_WITHIN = 10_000_000
"""Tolerance for commit delay or clock skew of a writer in another zone, µs."""

_TRIPS_AT = 3
_OF_SAMPLES = 10
"""Samples with rows of the past, of `_OF_SAMPLES` with new rows, that stop the publisher."""


_NO_ID = -(2**63)
"""Below all ids: the last id of an empty table."""


def last_of(rows: Sequence[NewRow], now: int, above: int | None = None) -> tuple[int, int]:
    """Highest id of a sample, and its time, µs; `above`: the id that the sample began above."""
    return max((row.id for row in rows), default=_NO_ID if above is None else above), now


class NewestRows:
    """What successive samples of the newest ids show. Pure: times are arguments, µs.

    `before`: highest id and time of an earlier sample; None: the first sample's.
    """

    def __init__(self, horizon: int, start: int, before: tuple[int, int] | None = None) -> None:
        self._horizon = horizon
        self._start = start
        self.last = before
        self._known: set[int] = set()
        self._has_more = False
        self._continues = False
        self._suspicious: list[NewRow] = []
        self._youngest = 0
        self._samples: deque[bool] = deque(maxlen=_OF_SAMPLES)
        self.worst: NewRow | None = None

    def wants_more(self, rows: Sequence[NewRow]) -> int | None:
        """The id above which to read all rows, if a sample shows only some of the past."""
        if self._has_more and self.last is not None:
            return self.last[0]
        if self.last is None or not rows or min(row.id for row in rows) <= self.last[0]:
            return None
        behind = self.last[1] - self._horizon
        return self.last[0] if any(self._start < r.created <= behind for r in rows) else None

    def sample(
        self,
        now: int,
        position: int,
        rows: Sequence[NewRow],
        ended: Collection[tuple[int, int]],
        above: int | None = None,
    ) -> list[NewRow]:
        """Take a sample and return its new rows below the position and beyond the horizon.

        `ended`: first and last buckets of transactions that ended late, which explain rows.
        """
        if self._suspicious:  # one sample late: that a transaction has ended shows a moment later
            unexplained = [
                row
                for row in self._suspicious
                if not any(a - 1 <= bucket_of(row.created) <= b + 1 for a, b in ended)
            ]
            if not self._continues:  # one import counts once, however many portions it takes
                self._samples.append(bool(unexplained))
            self.worst = max(unexplained, key=lambda row: row.id, default=self.worst)
        before = self.last
        known_id = before[0] if above is None and before is not None else above
        self.last = last_of(rows, now, known_id)
        self._suspicious = []
        highest, at = before or self.last
        # a transaction that commits late has ids below others that are known
        known, self._known = self._known or {highest}, {row.id for row in rows}
        least = min(known)
        new = [row for row in rows if row.id > least and row.id not in known]
        new = [row for row in new if row.created > self._start]
        times = [row.created for row in rows if row.id <= highest and row.created <= now]
        self._youngest = max([self._youngest, *times])
        if before is None:
            return []
        behind = [row for row in new if row.created <= min(position, at - self._horizon)]
        late = max(self._horizon, _NEVER_LATE)
        for row in sorted(new, key=lambda row: row.id):
            is_late = row.created <= min(position, at - late)
            is_odd = row.id > highest and row.created <= self._youngest - late
            if is_late and (is_odd or _is_of_zone(at, now, row)):
                self._suspicious.append(row)
            if row.created <= now:
                self._youngest = max(self._youngest, row.created)
        self._continues, self._has_more = self._has_more, len(rows) >= MOST
        if new and not self._suspicious:
            self._samples.append(False)
        return behind

    def restart(self) -> None:
        self.last, self._has_more = None, False

    def forgive(self) -> None:
        """Forget rows of the past, as they were read in another time zone than the table's."""
        self._suspicious = []
        self._samples.clear()

    @property
    def trips(self) -> bool:
        """Whether rows of the past keep coming that no late commit explains."""
        return sum(self._samples) >= _TRIPS_AT

    def error(self, now: int, where: str, zone: str | None) -> StoreError:
        """`zone` of a DATETIME column; None for a TIMESTAMP."""
        row = self.worst
        assert row is not None
        kept = "" if zone is None else f" (read as local time of {zone})"
        return StoreError(
            "store.rows_in_past",
            "new rows arrive with a create_time older than what has already been read:"
            f" id {row.id} at {format_time(row.created)}{kept},"
            f" {(now - row.created) // 1_000_000} s behind the database's clock. Some would be"
            " lost",
            where=where,
            suggestion=writers_zone(zone) + ". If old rows are imported, or statements wait that"
            ' long: recount.rows_in_past = "count" publishes those that are seen. `eventpub verify`'
            " names those that were missed, `eventpub publish ID VERSION` publishes one",
        )


def _is_of_zone(at: int, now: int, row: NewRow) -> bool:
    """Whether a row committed between `at` and `now` looks like one of another time zone."""
    age = now - row.created
    rest = age % _ZONES_DIFFER_BY
    is_multiple = rest <= now - at + _COMMITS_WITHIN or rest >= _ZONES_DIFFER_BY - _COMMITS_WITHIN
    return is_multiple and age <= ZONES_DIFFER + _ZONES_DIFFER_BY


_WATERMARK = {
    "denied": "the account may not see open transactions, so the boundary is the database's time"
    " minus read.delay; late commits are still found (to make them visible: GRANT PROCESS ON *.*)",
    "stale": "no fresh answer about open transactions, since another client polls"
    " information_schema.innodb_trx too often, or statements run that MySQL cannot show (binary"
    " values as _binary'…' in their text); the boundary is the database's time minus read.delay;"
    " late commits are still found",
}

_WARNS_FOR = 300.0
"""Seconds since the last row of the past for which the check warns of it."""

_CLOCK_TOLERANCE = 60_000_000
"""µs by which an event may lie in the future without a warning."""


Newest: TypeAlias = tuple[int, int, str]


class DatabaseChanges:
    """Pure: times are arguments, monotonic s.

    Attributes:
        newest: `NewestRows.last` of an earlier sample whose rows of the past are counted, and the
            column that it was sampled by.
    """

    def __init__(  # noqa: PLR0913 (the parts that it passes things to)
        self,
        config: Config,
        start: int,
        newest: Newest | None,
        layout: Layout,
        *,
        recounting: Recounting,
        progress: Progress,
        do: Do,
    ) -> None:
        self.newest, self.layout = newest, layout
        before = None if newest is None or newest[2] != layout.sampled_by else newest[:2]
        self._rows = NewestRows(config.recount.horizon, start, before)
        self.wants_more = self._rows.wants_more
        self._is_fatal = config.recount.rows_in_past == "stop"
        self._has_recount = config.recount.horizon > 0
        self._recounting = recounting
        recounting.recount.trusts_counts = layout.times_last
        self._progress = progress
        self._do = do
        self._warned_of_watermark = ""
        self._never_read = 0
        self._past_at, self._past_rows, self._past_oldest = float("-inf"), 0, 0
        self._ended: dict[tuple[int, int], float] = {}
        self._warned_of = (False, False)
        self._looks, self._doubted_at = 0, -1

    # -- polls ------------------------------------------------------------------------------------

    def polled(self, result: PollResult, now: float) -> bool:
        """Process a poll; True if the state must be written at once."""
        progress = self._progress
        progress.time = result.now
        self._meet(result.server)
        for after, upto in result.ended:
            self._recounting.recount.ended(after, upto)
        found = ((bucket_of(after + 1), bucket_of(upto)) for after, upto in result.ended)
        self._ended |= dict.fromkeys(found, now)
        progress.passed += result.timed_out
        self._say_watermark(result.state)
        seconds = self._recounting.clock_stepped(result.now, now)
        if seconds:
            finds = "only the recount finds" if self._has_recount else "nothing finds"
            text = f"the database's clock went back; until it catches up, {finds} new rows"
            if not self._has_recount:
                text += ', as recount.horizon is "0": eventpub verify names them afterwards'
            if seconds > 0:
                text = "the database's clock went ahead of this machine's: its seconds are counted"
                text += " again"
            position = format_time(progress.position)
            self._do(warning(text, seconds=abs(round(seconds, 3)), position=position))
        return seconds < 0

    def _meet(self, server: str) -> None:
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
            self._recounting.recount.everything(self._progress.time)

    def _say_watermark(self, state: str) -> None:
        if state != self._progress.watermark and state in _WATERMARK:
            if state != self._warned_of_watermark:
                self._do(warning(_WATERMARK[state], state=state))
            self._warned_of_watermark = state
        elif state in {"open", "off"}:
            self._warned_of_watermark = ""
        self._progress.watermark = state

    # -- samples and checks -----------------------------------------------------------------------

    def sampled(self, event: Sampled, upto: int, now: float) -> StoreError | None:
        """Process a sample; returns the error to stop with if rows would be lost, and still would
        once the table was looked at again (see `doubts`).

        `upto`: what was created up to here may have been read before the sample, µs.
        """
        newest, progress = self._rows, self._progress
        self._ended = {b: since for b, since in self._ended.items() if now - since < ENDED_FOR}
        ended = list(self._ended)
        found = newest.sample(progress.time, upto, event.rows, ended, event.above)
        if found:
            self._note_past([row.created for row in found], now)
        elif not self._recounting.recount.has_late:
            last = newest.last
            self.newest = None if last is None else (*last, self.layout.sampled_by)
        is_far = event.ahead > _CLOCK_TOLERANCE
        progress.ahead_seconds = event.ahead / 1e6 if is_far else 0.0
        progress.rows_ahead = event.rows_ahead if is_far else 0
        self._warn_of_odd_times(now)
        if not (self._is_fatal and newest.trips):
            self._doubted_at = -1
        elif self._doubted_at < 0:
            self._doubted_at = self._looks
        elif not self.doubts:
            return newest.error(progress.time, self.layout.where, self._zone)
        return None

    @property
    def doubts(self) -> bool:
        """Whether the table must be looked at again: the server's time zone may have changed."""
        return self._doubted_at == self._looks

    @property
    def _zone(self) -> str | None:
        zone = self.layout.zone
        return None if zone is None else zone.name

    def _note_past(self, created: list[int], now: float) -> None:
        self._recounting.recount.note([bucket_of(at) for at in created])
        self._progress.rows_in_past += len(created)
        if now - self._past_at > _WARNS_FOR:
            self._past_rows, self._past_oldest = 0, self._progress.time
        self._past_at, self._past_rows = now, self._past_rows + len(created)
        self._past_oldest = min(self._past_oldest, *created)

    def odd_times(self, now: float) -> str:
        """What is odd about the rows' times now, or ""."""
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
        """Log odd times when another kind comes; the check `times` shows how many there are."""
        kinds = (bool(self._progress.ahead_seconds), now - self._past_at <= _WARNS_FOR)
        if any(kinds) and kinds != self._warned_of:
            advice = writers_zone(self._zone) + "; if transactions last that long, raise"
            advice += " recount.horizon" + ", or GRANT PROCESS" * (
                self._progress.watermark == "denied"
            )
            self._do(warning(self.odd_times(now), fix=advice))
        self._warned_of = kinds

    def altered(self, event: TableChecked) -> StoreError | None:
        """Use an altered table's layout, and return the error to reconnect with."""
        self._never_read = event.never_read
        self._looks += 1
        before, layout = self.layout, event.layout
        if layout == before:
            return None
        names = [name for name in vars(layout) if vars(layout)[name] != vars(before)[name]]
        self._do(warning("the event table was altered", table=layout.table, changed=names))
        self.layout = layout
        self._recounting.recount.trusts_counts = layout.times_last
        if layout.sampled_by != before.sampled_by:
            self._rows.restart()
        if layout.read_as != before.read_as:
            self._rows.forgive()
        self._do(Reassign(layout))
        return altered_table(layout)
