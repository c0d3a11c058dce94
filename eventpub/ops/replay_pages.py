"""The events of a range in the order in which `replay` publishes them, page by page.

By creation time; but a version that was created after a later one of its aggregate comes with the
page of that one, before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from eventpub.admission import EVENTS, VersionRange, values
from eventpub.ops.repeated_hours import Key, RepeatedHours, keys_of
from eventpub.sink.reading import Place
from eventpub.sources.mysql import EventStore, Layout

_PAGE_ROWS = 20_000
_PAGE_BYTES = 16 * 1024 * 1024
_BELOW = 16
"""Versions in a row, created outside the range, below which none is looked for that was created in
it, and later: so far apart, versions and times of an aggregate do not differ in order."""
_HIGHEST = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """What is published again, and where.

    Attributes:
        first, last: of creation times, both included, µs.
        topic: the topic.
        aggregate_id: of one aggregate alone; None: of all.
        id: of the replay; "": made of all these.
    """

    first: int
    last: int
    topic: str
    aggregate_id: str | None = None
    id: str = ""

    def named(self, app_id: str) -> str:
        """Its id."""
        if self.id:
            return self.id
        parts = (app_id, self.first, self.last, self.topic, self.aggregate_id)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@dataclass
class Done:
    """What of a replay is on the topic.

    Attributes:
        places: the topic's partitions.
        events: how many.
        position: everything created at or before is, µs.
        version: the highest.
        ahead: those created later that are, too, with their times.
        read_to: the next offset to read of each partition.
    """

    places: list[Place]
    events: int = 0
    position: int = 0
    version: int = -1
    ahead: dict[Key, int] = field(default_factory=dict)
    read_to: dict[Place, int] = field(default_factory=dict)


class Pages:
    """What is left to be published: pages, and of each the events that were created after it.

    Args:
        store, layout: where the events are.
        what: the range.
        done: what of it is published.
        hours: those that the range has twice.
    """

    def __init__(
        self, store: EventStore, layout: Layout, what: Range, done: Done, hours: RepeatedHours
    ) -> None:
        self._store = store
        self._layout = layout
        self._what = what
        self._done = done
        self._hours = hours

    def __iter__(self) -> Iterator[tuple[pa.Table, set[Key]]]:
        what, done, store = self._what, self._done, self._store
        if what.aggregate_id is not None:
            yield from self._of_aggregate(what.aggregate_id)
            return
        unit = self._layout.unit
        # the boundary is below a value of a coarse column whose time may go on
        upto = what.last if unit == 1 else what.last + unit
        after, ahead = max(what.first - 1, done.position), set(done.ahead)
        while after < what.last:
            poll = store.poll(after, 0, None, at_most=upto)
            if not poll.has_rows or poll.upper <= after:
                return
            while after < poll.upper:
                page = store.page(after, poll.upper, _PAGE_ROWS, _PAGE_BYTES)
                batches, end = page.batches, poll.upper if page.end is None else page.end
                if not batches and page.end is not None:  # more rows of one moment than a page has
                    batches = list(store.window(after, end, None))
                rows = self._hours.once(pa.Table.from_batches(batches, EVENTS))
                rows = _without(rows, ahead)
                early = self._created_later(rows, end, ahead)
                new = set(keys_of(early))
                if rows.num_rows or new:
                    yield _in_order(pa.concat_tables([rows, early])), new
                ahead |= new
                after = end

    def _of_aggregate(self, aggregate_id: str) -> Iterator[tuple[pa.Table, set[Key]]]:
        what = self._what
        left = [VersionRange(aggregate_id, self._done.version + 1, _HIGHEST)]
        while left:
            rows, left = self._store.fetch(left, _PAGE_ROWS, _PAGE_BYTES)
            if not rows.num_rows:
                return
            rows = self._hours.timed(rows)
            created = rows.column("create_time").to_numpy()
            rows = rows.filter(pa.array((created >= what.first) & (created <= what.last)))
            if rows.num_rows:
                yield rows, set()

    def _created_later(self, rows: pa.Table, end: int, ahead: set[Key]) -> pa.Table:
        """Versions below those of a page that were created after it, within the range.

        Below the highest versions of each aggregate it looks down to one that was published before,
        since what is below that was looked at then; or past `_BELOW` that are none of the range's.
        """
        what, store, hours = self._what, self._store, self._hours
        here = set(keys_of(rows))
        found: list[pa.Table] = []
        asked, limit = list(_highest_runs(here).items()), 1
        while asked:
            lower: list[Key] = []
            below: dict[str, tuple[int, bool]] = {}
            for aggregate_id, chunk in _below(store, asked, limit).items():
                goes_on = limit == 1
                for version, read_as in chunk:
                    key = (aggregate_id, version)
                    created = hours.instant(key, read_as)
                    is_within = what.first <= created <= what.last
                    if key in ahead or (is_within and created <= end and key not in here):
                        break
                    goes_on = goes_on or is_within
                    if is_within and key not in here:
                        lower.append(key)
                else:
                    below[aggregate_id] = chunk[-1][0], goes_on
            here.update(lower)
            left = [VersionRange(a, v, v) for a, v in lower]
            while left:
                some, left = store.fetch(left, _PAGE_ROWS, _PAGE_BYTES)
                found.append(hours.timed(some))
            asked, limit = [(a, version) for a, (version, on) in below.items() if on], _BELOW
        return pa.concat_tables(found) if found else EVENTS.empty_table()


def _without(rows: pa.Table, published: set[Key]) -> pa.Table:
    """Rows that were not published ahead of their time; those that were are forgotten."""
    if not published:
        return rows
    keys = keys_of(rows)
    found = [key in published for key in keys]
    published.difference_update(key for key, is_there in zip(keys, found, strict=True) if is_there)
    return rows.filter(pa.array([not is_there for is_there in found], pa.bool_()))


def _highest_runs(keys: set[Key]) -> dict[str, int]:
    """Of each aggregate, where the highest versions begin that follow on one another."""
    begin: dict[str, int] = {}
    for aggregate_id, version in sorted(keys):
        if (aggregate_id, version - 1) not in keys:
            begin[aggregate_id] = version
    return begin


def _below(store: EventStore, bounds: list[Key], limit: int) -> dict[str, list[tuple[int, int]]]:
    """By aggregate: version and creation time of what is next below, the highest first."""
    found: dict[str, list[tuple[int, int]]] = {}
    for batch in store.below(bounds, limit):
        columns = (values(batch, name) for name in ("aggregate_id", "version", "create_time"))
        for aggregate_id, version, created in zip(*columns, strict=True):
            found.setdefault(aggregate_id, []).append((version, created))
    return {a: sorted(of, reverse=True) for a, of in found.items()}


def _in_order(rows: pa.Table) -> pa.Table:
    """By creation time across aggregates, by version within each."""
    codes = rows.column("aggregate_id").combine_chunks().dictionary_encode().indices.to_numpy()
    version = rows.column("version").to_numpy()
    created = rows.column("create_time").to_numpy()
    order = np.lexsort((version, codes))
    key = created[order].copy()
    starts = np.flatnonzero(np.append(True, codes[order][1:] != codes[order][:-1]))
    for start, end in zip(starts, np.append(starts[1:], len(order)), strict=True):
        np.maximum.accumulate(key[start:end], out=key[start:end])
    return rows.take(order[np.lexsort((version[order], key))])
