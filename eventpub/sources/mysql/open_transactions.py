"""What several polls of the open transactions say together. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

SECOND = 1_000_000
DAY = 86_400 * SECOND
_EVER = 0
"""µs; since when rows are hidden, where that is unknown."""
_FIRST_PSEUDO_ID = 1 << 48  # MySQL's ids of transactions that have not written; MariaDB's are 0


@dataclass(frozen=True)
class Transaction:
    """One that has written or runs a statement that may.

    Attributes:
        id: InnoDB's; one that has not written yet has none of its own (a pseudo id).
        thread: of its connection; 0 for one without (prepared XA).
        started: µs, rounded down to a second; where it runs a statement that began before InnoDB
            knew of it, the start of that.
        modified: rows that it has written, deleted, or rolled back, so far.
        is_running: whether it runs a statement.
        is_waiting: its statement waits for a lock, and InnoDB knows nothing of it yet.
        statement: when the statement that it runs began, µs; None: it runs none, or a young one.
        before: at this time, µs, it had neither written nor run a statement.
        since: nothing that it hides was created at or before, µs.
        first_seen: µs.
        wrote_before: µs; nothing that it had written when it was seen last is newer.
        shown: µs; when it began as InnoDB said last.
        timed_out: it was open for longer than `max_wait`, and is no longer waited for.
        is_ahead: InnoDB said that it began later than now: the clock was set back since, and how
            long it has been open is unknown.
    """

    id: int
    thread: int
    started: int
    modified: int = 0
    is_running: bool = False
    is_waiting: bool = False
    statement: int | None = None
    before: int = 0
    since: int = 0
    first_seen: int = 0
    wrote_before: int = 0
    shown: int = 0
    timed_out: bool = False
    is_ahead: bool = False

    @property
    def has_id(self) -> bool:
        """Whether `id` is its own."""
        return 0 < self.id < _FIRST_PSEUDO_ID

    def may_be(self, other: Transaction) -> bool:
        """Whether it may be the same as `other`, of the same thread, which was seen earlier."""
        if other.has_id:
            return self.id == other.id
        if other.is_waiting:
            return not self.is_waiting or self.started <= other.wrote_before
        return not self.is_waiting and (self.id == other.id or self.started == other.shown)


class OpenTransactions:
    """What several polls say together. Pure.

    Args:
        max_wait: how long a transaction is waited for, µs.
        hidden_since: of a former reader that has read on: nothing that was hidden then was created
            at or before, µs; None: there was none.

    Attributes:
        polled_at: the time of the last poll, µs; None: there was none.
        timed_out: how many transactions were open for longer.
    """

    def __init__(self, max_wait: int, hidden_since: int | None = None) -> None:
        self._max_wait = max_wait
        self._hidden_since = hidden_since
        self._open: dict[tuple[int, int], Transaction] = {}
        self.polled_at: int | None = None
        self.timed_out = 0
        self._ended: list[tuple[int, int]] = []
        self._first_poll: int | None = None
        self._steady_since = 0

    def seen(self, at: int, transactions: Iterable[Transaction], reached: int = 0) -> None:
        """Take over a poll.

        Args:
            at: its database time, µs.
            transactions: that were open.
            reached: up to where the reader has read before it, µs.
        """
        if went_back := self.polled_at is not None and at < self.polled_at:
            self._clock_went_back(at)
        before = dict(self._open)
        by_id = {t.id: key for key, t in before.items() if t.has_id}
        after: dict[tuple[int, int], Transaction] = {}
        for found in transactions:
            key = (found.thread, 0 if found.thread else found.id)
            # by its id first: a prepared one changes or loses its thread
            former = by_id.get(found.id, key) if found.has_id else key
            earlier = before.get(former)
            if earlier is not None and found.may_be(earlier):
                del before[former]
                now = self._is_still_open(found, earlier, at)
                if earlier.is_waiting and not found.is_waiting:
                    # unless that statement is over, and this is another one
                    self._end(earlier, reached)
            else:
                now = self._begins(found, at, went_back=went_back)
            if not now.timed_out and at - now.first_seen > self._max_wait:
                now = replace(now, timed_out=True)
                self.timed_out += 1
            after[key] = now
        if self._first_poll is None:
            self._first_poll = self._steady_since = at
            since = self._hidden_since
            if since is not None and since < reached:
                # what was open at the former reader's last poll, and has ended since
                self._ended.append((since, reached))
        for t in before.values():
            self._end(t, reached)
        self._open, self.polled_at = after, at

    def _clock_went_back(self, at: int) -> None:
        """What was written since then may be older than all polls before it."""
        self.polled_at, self._steady_since = at - SECOND, at
        self._open = {
            key: replace(
                t,
                before=min(t.before, self.polled_at),
                since=min(t.since, self.polled_at),
                first_seen=min(t.first_seen, at),
            )
            for key, t in self._open.items()
        }

    def _is_still_open(self, found: Transaction, earlier: Transaction, at: int) -> Transaction:
        began = earlier.started if found.statement is None else found.statement
        wrote = found.is_running or found.modified != earlier.modified
        return replace(
            found,
            started=min(found.started, earlier.started),
            before=min(earlier.before, began) if found.is_waiting else earlier.before,
            since=min(earlier.since, began) if found.is_waiting else earlier.since,
            first_seen=earlier.first_seen,
            wrote_before=at if wrote else earlier.wrote_before,
            shown=found.started,
            timed_out=earlier.timed_out,
            is_ahead=earlier.is_ahead or found.is_ahead,
        )

    def _begins(self, found: Transaction, at: int, *, went_back: bool) -> Transaction:
        """Its first statement began after the last poll; InnoDB may have known of it much later.

        Args:
            went_back: whether the clock has, since that poll, so that the time of the poll says
                nothing.
        """
        started = found.started if found.statement is None else min(found.started, found.statement)
        if self.polled_at is None:
            before = started
            since = before if self._hidden_since is None else min(before, self._hidden_since)
            if not found.thread:
                # prepared (XA), and perhaps before the server started: after that it says that the
                # transaction began when it was recovered
                since = _EVER
        else:
            before = min(self.polled_at, started) if went_back else self.polled_at
            if found.statement is not None:
                before = found.statement if found.is_waiting else min(before, found.statement)
            # after a pause between polls: the clock may have gone back and ahead again meanwhile
            since = before if at - self.polled_at <= SECOND else min(before, started)
        return replace(
            found,
            started=started,
            before=before,
            since=since,
            first_seen=at,
            wrote_before=at,
            shown=found.started,
        )

    def _end(self, t: Transaction, reached: int) -> None:
        """Report it where the reader may have read past what it hid.

        So it has where it did not wait, or could not see: before the first poll, or while no answer
        was fresh. Rows that were stamped before the clock went back may be newer than every poll.
        """
        first, last = self._first_poll, self.polled_at or 0
        if t.timed_out or t.since < reached or (first is not None and t.before < first):
            is_known = t.first_seen > self._steady_since and not t.is_ahead and reached <= last
            upto = t.wrote_before if is_known else max(t.wrote_before, reached)
            self._ended.append((t.since, upto))

    def take_ended(self) -> list[tuple[int, int]]:
        """When those whose rows the reader may have passed, and that are gone, may have written:
        ``(after, upto]``, µs. Each is reported once."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def upto(self) -> int | None:
        """Everything created at or before is visible, except what is no longer waited for; µs."""
        waited_for = [t.before for t in self._open.values() if not t.timed_out]
        return min(waited_for, default=self.polled_at)

    @property
    def awaits_first_poll(self) -> bool:
        """Whether something was hidden when somebody else polled, and nobody has polled since."""
        return self.polled_at is None and self._hidden_since is not None

    @property
    def open_since(self) -> int | None:
        """When the oldest that is open began, µs, rounded down to a second; None: none is. Where
        it is unknown when one began, a day before it was seen."""
        return min((t.started - DAY * t.is_ahead for t in self._open.values()), default=None)

    @property
    def hidden_since(self) -> int | None:
        """Nothing that they hide was created at or before, µs; None: they hide nothing."""
        if self.polled_at is None:
            return self._hidden_since
        return min((t.since for t in self._open.values()), default=None)
