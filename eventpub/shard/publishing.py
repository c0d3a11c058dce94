"""Publishes a chunk of rows: admit, backtrack, publish, record.

The transaction is the only atomic point. The index is written after it, as a fold would: the
process may die between any two lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from eventpub import admission
from eventpub.admission.model import (
    EVENTS,
    Decision,
    Hold,
    Known,
    VersionRange,
    numbers_of,
    values,
    version_ranges,
)
from eventpub.errors import SinkError, StateError
from eventpub.shard.context import Accounted, ShardContext
from eventpub.shard.dead_letters import Refusals
from eventpub.shard.pace import rows_within
from eventpub.sink.base import REDO, Content, PublishedBatch, RecordRefusedError

NO_EVENTS = EVENTS.empty_table()
Event: TypeAlias = tuple[str, int]
"""Aggregate and version."""

_BELOW = 16
"""Rows read below a first sight; if none is baseline, all versions below are backtracked."""

_FETCH_TURN = 0.3
"""Seconds to look up a chunk's missing versions; the rest waits for its turn."""

_MOST_SHOWN = 100
"""Skipped gaps named in a report; all are on their topic."""

_MOST_REDOS = 5


class Publishing:
    """Decides and publishes a shard's chunks; `renew_sink` replaces an unusable sink, and folds."""

    def __init__(
        self, context: ShardContext, accounted: Accounted, renew_sink: Callable[[], None]
    ) -> None:
        self._renew_sink = renew_sink
        config = context.assignment.config
        self._context = context
        self._accounted = accounted
        self._refusals = Refusals(config.sink)
        self._holds_shard = config.gaps.policy == "hold_shard"

    def step(  # noqa: PLR0913 (options, by keyword)
        self,
        rows: pa.Table,
        position: int | None,
        *,
        due: int = 0,
        retry_now: Sequence[str] = (),
        skip_now: Sequence[str] = (),
        since: int | None = None,
    ) -> bool:
        """Decide and publish one chunk, in as many transactions as it takes.

        Args:
            position: the index's position afterwards; None: unchanged.
            due: how many due holds to retry as well.
            since: publish rows created from then on, µs, even if the baseline covers them.

        Returns:
            False if the shard waits for a gap, or stops, and the rest of the chunk with it.
        """
        context = self._context
        most = context.parts.sizes.rows * 3 // 2
        begin = redos = 0
        while True:
            if context.sink.needs_replacement:
                self._renew_sink()
            end = begin + rows_within(rows, begin, context.pace.size, most)
            part, upto = rows.slice(begin, end - begin), position
            if end < rows.num_rows and position is not None:
                upto = part.column("create_time")[-1].as_py() - 1
            try:
                whole = self._attempt(part, upto, due, retry_now, skip_now, since)
            except RecordRefusedError:
                continue  # its rows are dead letters now
            except SinkError as error:
                redos += 1
                if error.code not in REDO or redos == _MOST_REDOS:
                    raise
                continue
            if not whole or end >= rows.num_rows:
                return whole
            if context.is_stopping:
                return False
            begin, redos = end, 0

    def _attempt(  # noqa: PLR0913, PLR0917 (as of `step`)
        self,
        rows: pa.Table,
        position: int | None,
        due: int,
        retry_now: Sequence[str],
        skip_now: Sequence[str],
        since: int | None,
    ) -> bool:
        context = self._context
        now = context.look_at_clock()
        waiting, due_now = self._still_missing(now, due) if due else ({}, [])
        retry = [*due_now, *retry_now]
        with context.timed("index"):
            ids: list[Any] = rows.column("aggregate_id").unique().to_pylist()
            if not (ids or retry or skip_now):
                self._publish(Decision(NO_EVENTS, holds=waiting), Known(), position, now)
                return True
            # also of held ones: their earlier skips must stay
            known = context.index.known(list(dict.fromkeys([*ids, *retry, *skip_now])))
            if since is not None and known.baseline is not None:
                known.baseline = min(known.baseline, since - 1)

        def decide(some: pa.Table) -> Decision:
            with context.timed("admit"):
                plan = admission.Plan(
                    some,
                    known,
                    context.rules,
                    now,
                    retry,
                    open_since=context.window.open_since,
                    skip_now=skip_now,
                )
            with context.timed("backtrack"):
                found, rest = self._backtrack(plan, known)
            with context.timed("admit"):
                decided = plan.decide(found, rest)
                decided.holds |= waiting
                return decided

        if context.rules.contents_of is not None:
            known.contents = context.index.contents(_decided(rows, known))
            known.lone = self._lone(rows, known) if known.contents else set()
        decision = decide(rows)
        whole = True
        if self._holds_shard and rows.num_rows:
            hold = min(filter(None, decision.holds.values()), key=attrgetter("since"), default=None)
            if hold is not None:
                whole = False
                position = None if position is None else hold.since - 1
                created = rows.column("create_time").to_numpy()
                waits = rows.filter(pa.array(created == hold.since))
                hold, whole_decision = _at_first_row(hold, waits), decision
                decision = decide(rows.filter(pa.array(created < hold.since)))
                hold = with_unpublished(hold, whole_decision, decision)
                decision.holds[hold.aggregate_id] = hold
                decision.counts.gaps_opened += 1
        _assert_order(decision, known)
        self._publish(decision, known, position, now)
        return whole

    # -- publish, record -----------------------------------------------------------------------

    def _publish(self, decision: Decision, known: Known, position: int | None, now: int) -> None:
        context, report = self._context, self._context.report
        if decision.counts.conflicts:
            # times that are now read differently must not look like conflicts
            context.lookup.require_same_times()
        where = context.assignment.layout.where
        content, run = self._refusals.without(decision, context.index.dead_run, where, now)
        refused: dict[str, list[int]] = {}
        for a, v in _events((decision.refused or [NO_EVENTS])[0]):
            if v < context.rules.first_version:
                refused.setdefault(a, list(known.refused.get(a, ()))).append(v)
        published = PublishedBatch(0, {})
        if decision.publishes:
            published = self._transact(content)
            report.published += published.events
            if content.events.num_rows:
                context.committed(content.events.column("create_time").to_numpy())
            some = decision.gaps[: max(0, _MOST_SHOWN - len(report.skipped))]
            report.skipped.extend(asdict(gap) for gap in some)
            report.dead.extend(
                {"aggregate_id": d.aggregate_id, "version": d.version, "reason": d.reason}
                for d in content.dead
            )
            context.parts.failpoint("before_index")
        report.begin_above += self._begin_above(decision, known)
        counted, oldest = self._accounted.take(position), context.oldest_bucket()
        with context.timed("index"):
            context.index.record(
                decision,
                published.next_offsets,
                position,
                written=published.written,
                refused=refused,
                dead_run=run,
                contents=self._contents(decision, known),
                counted=counted,
                forget_below=oldest,
            )
        for bucket in (b for b in counted if b >= oldest):
            report.buckets[bucket] = context.index.counts.of(bucket)
        if decision.publishes:
            context.parts.failpoint("after_index")
        report.counts.add(decision.counts)

    def _transact(self, content: Content) -> PublishedBatch:
        context, diverted = self._context, content.diverted
        size = content.events.nbytes + (0 if diverted is None else diverted.nbytes)
        began = context.parts.clock.monotonic()
        try:
            with context.timed("publish"):
                published = context.sink.publish(content, context.parts.failpoint)
        except RecordRefusedError as refusal:
            self._refusals.note(refusal, content.events, diverted)
            raise
        except SinkError:
            context.pace.failed(size)
            context.index.note(chunk_bytes=context.pace.size)
            raise
        self._refusals.forget()
        context.pace.published(size, context.parts.clock.monotonic() - began)
        if context.pace.is_full:
            context.index.note(chunk_bytes=None)
        return published

    def _begin_above(self, decision: Decision, known: Known) -> int:
        """The number of new aggregates that miss their first version."""
        first, now = self._context.rules.first_version, self._context.now
        return sum(
            hold is not None
            and (hold.first_missing, hold.first_seen, hold.attempts) == (first, now, 0)
            and not hold.catching_up
            and a not in known.last
            for a, hold in decision.holds.items()
        )

    def _contents(self, decision: Decision, known: Known) -> dict[Event, set[bytes]]:
        """Known contents of the decision's versions, with those that it decides."""
        contents_of = self._context.rules.contents_of
        found: dict[Event, set[bytes]] = {}
        if contents_of is None:
            return found
        for table in (decision.events, decision.diverted, (decision.refused or [None])[0]):
            if table is not None:
                for event, content in zip(_events(table), contents_of(table), strict=True):
                    found.setdefault(event, set(known.contents.get(event, ()))).add(content)
        return found

    def _lone(self, rows: pa.Table, known: Known) -> set[Event]:
        """See `Known.lone`."""
        context, of = self._context, self._context.rules.contents_of
        assert of is not None
        each = zip(_events(rows), of(rows), strict=True)
        changed = {event for event, now in each if now not in known.contents.get(event, [now])}
        ranges, there = version_ranges(changed), Counter[Event]()
        with context.timed("backtrack"):
            while ranges:
                found, ranges = context.fetch(ranges)
                there.update(_events(found))
        return {event for event in changed if there[event] < 2}

    # -- backtrack -------------------------------------------------------------------------------

    def _still_missing(self, now: int, most: int) -> tuple[dict[str, Hold | None], list[str]]:
        """Split due holds into those that wait on and those to decide, by the missing versions."""
        context, all_holds = self._context, self._context.index.holds
        open_since = context.window.open_since
        holds = [all_holds[a] for a in all_holds.due(now, most)]
        missing = [(h.aggregate_id, h.first_missing) for h in holds if not h.catching_up]
        with context.timed("backtrack"):
            there = context.lookup.existing(missing) if missing else set()
        waiting: dict[str, Hold | None] = {}
        for hold in holds:
            if not hold.catching_up and (hold.aggregate_id, hold.first_missing) not in there:
                tried = admission.failed_attempt(hold, context.rules, now, open_since)
                if tried is not None:
                    waiting[hold.aggregate_id] = tried
        return waiting, [h.aggregate_id for h in holds if h.aggregate_id not in waiting]

    def _backtrack(self, plan: admission.Plan, known: Known) -> tuple[pa.Table, list[VersionRange]]:
        """What is missing, up to one transaction's size, and what of it was not read."""
        context = self._context
        if plan.first_sights:
            assert known.baseline is not None
            plan.settle(self._baseline_ends(plan.first_sights, known.baseline))
        if not plan.missing:
            return NO_EVENTS, []
        seconds = None if self._holds_shard else _FETCH_TURN
        return context.fetch(plan.missing, context.pace.size, seconds)

    def _baseline_ends(
        self, sights: list[tuple[str, int]], baseline: int
    ) -> dict[str, tuple[int, int]]:
        """See `admission.Plan.settle`."""
        ends: dict[str, int] = {}
        newest: dict[str, int] = {}
        for keys in self._context.lookup.below(sights, _BELOW):
            are_old = self._context.rules.are_in(baseline, keys.column("create_time").to_numpy())
            columns = (values(keys, n) for n in ("aggregate_id", "version", "create_time"))
            for aggregate_id, version, created, is_old in zip(*columns, are_old, strict=True):
                newest[aggregate_id] = max(created, newest.get(aggregate_id, created))
                if is_old:
                    ends[aggregate_id] = max(version, ends.get(aggregate_id, version))
        return {aggregate_id: (end, newest[aggregate_id]) for aggregate_id, end in ends.items()}


def _at_first_row(hold: Hold, rows: pa.Table) -> Hold:
    """The hold up to its first event: a waiting shard knows of no later one yet."""
    versions = [v for a, v in _events(rows) if a == hold.aggregate_id and v > hold.first_missing]
    return replace(hold, seen=min(versions, default=hold.seen))


def with_unpublished(hold: Hold, whole: Decision, published: Decision) -> Hold:
    """The hold, extended down to events below its gap that are published only after the wait.

    Those have the held event's time or a later one, or came by the backtrack. If what is published
    shows some to be baseline, its last version is above them.
    """
    a, first = hold.aggregate_id, hold.first_missing
    last = published.last.get(a)
    waiting = {*_events(_in_order(whole))} - {*_events(_in_order(published))}
    below = [v for of, v in waiting if of == a and v < first and (last is None or v > last)]
    if not below:
        return hold
    return replace(hold, first_missing=min(below), next_attempt=hold.first_seen, catching_up=True)


def _in_order(decision: Decision) -> pa.Table:
    """The events that are not late."""
    late = decision.late
    return decision.events if late is None else decision.events.filter(pa.array(~late))


def _events(rows: pa.Table) -> list[Event]:
    return list(zip(values(rows, "aggregate_id"), values(rows, "version"), strict=True))


def _decided(rows: pa.Table, known: Known) -> list[Event]:
    """Versions of which a row may have been decided."""
    return [
        (a, version)
        for a, version in dict.fromkeys(_events(rows))
        if version <= known.last.get(a, version - 1) or version in known.refused.get(a, ())
    ]


def _assert_order(decision: Decision, known: Known) -> None:
    """Refuse versions published twice or out of order, by the result, however it was made."""
    events = _in_order(decision)
    if not events.num_rows:
        return
    encoded = events.column("aggregate_id").combine_chunks().dictionary_encode()
    code = encoded.indices.to_numpy()
    version = events.column("version").to_numpy()
    order = np.argsort(code, kind="stable")
    c, v = code[order], version[order]
    first = np.append(True, c[1:] != c[:-1])
    ascending = bool((first[1:] | (v[1:] > v[:-1])).all())
    ids: list[Any] = encoded.dictionary.to_pylist()
    last = numbers_of(ids, known.last, np.iinfo(np.int64).min)
    fresh = bool((v[first] > last[c[first]]).all())
    if not (ascending and fresh):
        raise StateError(
            "publish.order_violated",
            "a batch would have published a version twice or out of order; nothing was published",
            suggestion="this is a bug in eventpub; please report it",
        )
