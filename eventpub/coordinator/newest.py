"""Rows that are inserted now and say that they were created long ago: windows have passed them.

Writers whose sessions keep another time zone than the one a DATETIME is read in, an import with
times of its own, a replica that lags: such rows lie below the position and beyond the horizon, no
recount comes to them, and nothing else would show it. So the rows with the newest ids are sampled
about once a second. The second of each one found there is counted again, which publishes it.

A transaction that was open for so long brings such rows, too. Without the privilege to see it end
that is no reason to stop. But it leaves the order of ids and times as it is, and its age is any
number. So where rows keep coming whose age looks like the difference of two zones, or which have
got their ids after much younger ones, the publisher stops: what a sample does not see would be
lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from eventpub.admission.model import bucket_of
from eventpub.config import format_time
from eventpub.errors import StoreError
from eventpub.sources.base import NewRow
from eventpub.sources.mysql.values import writers_zone

SAMPLE = 20
"""Rows of a sample: those with the highest ids; of a table without ids, the youngest but for those
of the future."""

MOST = 100_000
"""Rows that are fetched, lowest ids first, where all of a sample are new and one is of the past."""

ENDED_FOR = 60.0
"""Seconds for which rows are explained by a transaction that has ended."""

_NEVER_LATE = 60_000_000
"""µs: no zones differ by less; commits may be so late whatever the horizon is."""

_ZONES_DIFFER_BY = 900_000_000
"""µs; the times of two zones differ by a multiple of it."""
_ZONES_DIFFER = 26 * 3600 * 1_000_000
"""µs, at most."""
_COMMITS_WITHIN = 10_000_000
"""µs for which a writer in another zone leaves its transaction open, or its clock is off."""

_TRIPS_AT = 3
_OF_SAMPLES = 10
"""Samples with rows of the past, of so many that had new rows, that stop the publisher."""


_NO_ID = -(2**63)
"""Below the ids of all rows: the last of a table without any."""


def last_of(rows: Sequence[NewRow], now: int, above: int | None = None) -> tuple[int, int]:
    """Highest id and time of a sample that was taken now, µs.

    Args:
        above: the rows are those above this id; None: those with the highest ids of all.
    """
    return max((row.id for row in rows), default=_NO_ID if above is None else above), now


class NewestRows:
    """What successive samples of the newest ids say. Pure: times are arguments, µs.

    Args:
        horizon: of the recount; 0: there is none.
        start: nothing created at or before is of interest.
        before: highest id and time of a sample that was taken before anything was read, or of the
            last one of a former run; None: it is that of the first sample.
    """

    def __init__(self, horizon: int, start: int, before: tuple[int, int] | None = None) -> None:
        self._horizon = horizon
        self._start = start
        self._last = before
        self._has_more = False
        self._continues = False
        self._suspicious: list[NewRow] = []
        self._youngest = 0
        self._samples: deque[bool] = deque(maxlen=_OF_SAMPLES)
        self.worst: NewRow | None = None

    @property
    def last(self) -> tuple[int, int] | None:
        """As of `last_of` the sample before; None: there was none."""
        return self._last

    def wants_more(self, rows: Sequence[NewRow]) -> int | None:
        """Above which id all rows are wanted, since a sample may show but some of the past.

        Args:
            rows: those with the highest ids.
        """
        if self._has_more and self._last is not None:
            return self._last[0]
        if self._last is None or not rows or min(row.id for row in rows) <= self._last[0]:
            return None
        behind = self._last[1] - self._horizon
        return self._last[0] if any(self._start < r.created <= behind for r in rows) else None

    def sample(
        self,
        now: int,
        position: int,
        rows: Sequence[NewRow],
        ended: Collection[tuple[int, int]],
        above: int | None = None,
    ) -> list[NewRow]:
        """The new rows that lie below the position and beyond the horizon.

        Args:
            now: the database's time.
            position: everything created at or before has been read.
            rows: those with the highest ids, or those above one.
            ended: first and last bucket in which transactions wrote that have ended late: what
                was created there is no news.
            above: as of `last_of`.
        """
        if self._suspicious:  # judged now: that its transaction has ended shows a moment later
            unexplained = [
                row
                for row in self._suspicious
                if not any(a - 1 <= bucket_of(row.created) <= b + 1 for a, b in ended)
            ]
            if not self._continues:  # one import is one sight, however many portions it takes
                self._samples.append(bool(unexplained))
            self.worst = max(unexplained, key=lambda row: row.id, default=self.worst)
        before = self._last
        known_id = before[0] if above is None and before is not None else above
        self._last = last_of(rows, now, known_id)
        self._suspicious = []
        highest, at = before or self._last
        known = [row.created for row in rows if row.id <= highest and row.created <= now]
        self._youngest = max([self._youngest, *known])
        if before is None:
            return []
        new = [row for row in rows if row.id > highest and row.created > self._start]
        behind = [row for row in new if row.created <= min(position, at - self._horizon)]
        late = max(self._horizon, _NEVER_LATE)
        for row in sorted(new, key=lambda row: row.id):
            is_late = row.created <= min(position, at - late)
            if is_late and (_is_of_zone(at, now, row) or row.created <= self._youngest - late):
                self._suspicious.append(row)
            if row.created <= now:
                self._youngest = max(self._youngest, row.created)
        self._continues, self._has_more = self._has_more, len(rows) >= MOST
        if new and not self._suspicious:
            self._samples.append(False)
        return behind

    def begin_anew(self) -> None:
        """The table was altered: its rows may have other ids, or have got some."""
        self._last, self._has_more = None, False

    @property
    def trips(self) -> bool:
        """Whether rows of the past keep coming that no late commit explains."""
        return sum(self._samples) >= _TRIPS_AT

    def error(self, now: int, where: str, zone: str | None) -> StoreError:
        """What is wrong then.

        Args:
            zone: of a DATETIME column; None: it is a TIMESTAMP.
        """
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
    """Whether a row that was committed between two times looks like one of another time zone."""
    age = now - row.created
    rest = age % _ZONES_DIFFER_BY
    is_multiple = rest <= now - at + _COMMITS_WITHIN or rest >= _ZONES_DIFFER_BY - _COMMITS_WITHIN
    return is_multiple and age <= _ZONES_DIFFER + _ZONES_DIFFER_BY
