"""The SELECTs that read events, as text.

Each names the index it is to use: left to itself the optimizer turns a page of a table far behind
into a table scan and a sort. Values are numbers, times made here, or hexadecimal strings; names
come quoted from the layout.
"""
# ruff: noqa: S608 (nothing in here comes from outside but through `quote` and `literal`)

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from eventpub.admission.model import Shard, VersionRange
from eventpub.store.layout import SLICES, Layout

_EPOCH = datetime(1970, 1, 1)
_DATETIMES = -30_610_224_000_000_000, 253_402_300_799_999_999  # 1000-01-01 to 9999-12-31
# A bound outside of what a TIMESTAMP can be makes MySQL scan the whole index.
_TIMESTAMPS = 1_000_000, 2_147_483_647_999_999  # 1970-01-01 00:00:01 to 2038-01-19 03:14:07.999999

_NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
NOW = f"SELECT {_NOW}"

_FEW = 10
"""Versions of a range that are named one by one, where that makes an index of more use."""


def columns(layout: Layout) -> str:
    """What every SELECT of events selects, in the order of `EVENTS`."""
    return ", ".join(
        [
            layout.identity.selected,
            layout.version,
            layout.event_type,
            layout.payload,
            layout.metadata or "NULL",
            layout.create_time,
        ]
    )


def window(
    layout: Layout, first: int, last: int, shard: Shard | None, most: int | None = None
) -> str:
    """Rows of a `local_range`, by time, at most `most`."""
    order = layout.create_time + (f", {layout.id}" if layout.ties_by_id and layout.id else "")
    limit = "" if most is None else f" LIMIT {most:d}"
    return (
        f"SELECT {columns(layout)} FROM {layout.table} FORCE INDEX ({layout.time_index})"
        f" WHERE {between(layout, first, last)}{in_shard(layout, shard)} ORDER BY {order}{limit}"
    )


def moment(layout: Layout, value: int, shard: Shard | None, above: int | None, most: int) -> str:
    """Rows of one local time with their ids, those above one, at most `most`."""
    condition = "" if above is None else f" AND {layout.id} > {above:d}"
    return (
        f"SELECT {columns(layout)}, {layout.id} FROM {layout.table}"
        f" FORCE INDEX ({layout.time_index}) WHERE {layout.create_time} = {_time(value)}{condition}"
        f"{in_shard(layout, shard)} ORDER BY {layout.id} LIMIT {most:d}"
    )


def keys(layout: Layout, first: int, last: int, shard: Shard | None) -> str:
    """Aggregate, version and time of the rows of a `local_range`."""
    return (
        f"SELECT {_key_and_time(layout)} FROM {layout.table}"
        f" FORCE INDEX ({layout.time_index})"
        f" WHERE {between(layout, first, last)}{in_shard(layout, shard)}{_with_identity(layout)}"
    )


def _key_and_time(layout: Layout) -> str:
    return f"{layout.identity.selected}, {layout.version}, {layout.create_time}"


def counts(layout: Layout, ranges: Sequence[tuple[int, int]]) -> str:
    """How many rows each of some ranges of values has, in their order.

    By the index alone, unless rows without an identity are not to be counted.
    """
    return " UNION ALL ".join(
        f"SELECT {number}, COUNT(*) FROM {layout.table} FORCE INDEX ({layout.time_index})"
        f" WHERE {between(layout, first, last)}{_with_identity(layout)}"
        for number, (first, last) in enumerate(ranges)
    )


def nth_time(layout: Layout, first: int, last: int, n: int) -> str:
    """The `create_time` of the n-th row (from 1) of a range, by the index alone."""
    return (
        f"SELECT {layout.create_time} FROM {layout.table} FORCE INDEX ({layout.time_index})"
        f" WHERE {between(layout, first, last)} ORDER BY {layout.create_time}"
        f" LIMIT 1 OFFSET {n - 1}"
    )


def now_and_first_time(layout: Layout, after: int, others: str) -> str:
    """The database's time, the `create_time` of the first row behind a position, and others."""
    values = local_range(layout, after, _DATETIMES[1])
    first = "NULL" if values is None else f"({nth_time(layout, *values, 1)})"
    return f"SELECT {_NOW}, {first}, {others}"


def now_and(others: str) -> str:
    """The database's time, and others."""
    return f"SELECT {_NOW}, {others}"


def now_and_newest_time(layout: Layout) -> str:
    """The database's time, and the latest `create_time` of all."""
    return f"SELECT {_NOW}, ({newest_time(layout)})"


def newest_time(layout: Layout) -> str:
    """The latest `create_time` of all."""
    return (
        f"SELECT {layout.create_time} FROM {layout.table} FORCE INDEX ({layout.time_index})"
        f" ORDER BY {layout.create_time} DESC LIMIT 1"
    )


def newest_ids(layout: Layout, above: int | None, most: int) -> str:
    """Id and `create_time` of the rows with the highest ids, or the lowest of those above one."""
    condition = "" if above is None else f" WHERE {layout.id} > {above:d}"
    order = "DESC" if above is None else "ASC"
    return (
        f"SELECT {layout.id}, {layout.create_time} FROM {layout.table}"
        f" FORCE INDEX ({layout.id_index}){condition} ORDER BY {layout.id} {order} LIMIT {most:d}"
    )


def newest_times(layout: Layout, above: int | None, last: int, most: int) -> str:
    """As `newest_ids`, where the local `create_time` is the id: the newest rows that are not above
    one, or the oldest of those above another."""
    condition = f"{layout.create_time} <= {_time(last)}"
    if above is not None:
        condition += f" AND {layout.create_time} > {_time(max(above, _DATETIMES[0]))}"
    order = "DESC" if above is None else "ASC"
    return (
        f"SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {layout.create_time}),"
        f" {layout.create_time} FROM {layout.table} FORCE INDEX ({layout.time_index})"
        f" WHERE {condition} ORDER BY {layout.create_time} {order} LIMIT {most:d}"
    )


def without_time(layout: Layout, most: int) -> str:
    """How many rows are never read, at most `most`: with no time, a zero date, or before 1970."""
    nothing = f"{layout.create_time} < '1970-01-01 00:00:01' OR {layout.create_time} IS NULL"
    return (
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {layout.table} FORCE INDEX ({layout.time_index})"
        f" WHERE {nothing} LIMIT {most:d}) AS never_read"
    )


def without_identity(layout: Layout, most: int) -> str:
    """How many of the newest rows, at most `most`, have no identity or version."""
    return (
        f"SELECT COALESCE(SUM(has_none), 0) FROM (SELECT {_has_no_identity(layout)} AS has_none"
        f" FROM {layout.table} FORCE INDEX ({layout.time_index})"
        f" ORDER BY {layout.create_time} DESC LIMIT {most:d}) AS newest"
    )


def _has_no_identity(layout: Layout) -> str:
    columns = [*layout.identity.names, layout.version]
    return f"({' OR '.join(f'{column} IS NULL' for column in columns)})"


def _with_identity(layout: Layout) -> str:
    return f" AND NOT {_has_no_identity(layout)}" if layout.skips_nulls else ""


def waiting(layout: Layout, first: int, last: int, most: int) -> str:
    """The oldest `create_time` of a range and its rows, at most `most`, by the index alone."""
    return (
        f"SELECT MIN(t), COUNT(*) FROM (SELECT {layout.create_time} AS t FROM {layout.table}"
        f" FORCE INDEX ({layout.time_index}) WHERE {between(layout, first, last)}"
        f" ORDER BY {layout.create_time} LIMIT {most}) AS waiting"
    )


def local_range(layout: Layout, after: int, upto: int) -> tuple[int, int] | None:
    """The values ``first ≤ value ≤ last`` that the column can hold for ``after < t ≤ upto``.

    None where there is none.
    """
    zone, unit = layout.zone, layout.unit
    first, last = zone.local_range(after, upto) if zone else (after + 1, upto)
    earliest, latest = _DATETIMES if zone else _TIMESTAMPS
    first = -(-max(first, earliest) // unit) * unit
    last = min(last, latest) // unit * unit
    return (first, last) if first <= last else None


def between(layout: Layout, first: int, last: int) -> str:
    """The condition of a range of values of `create_time`."""
    return f"{layout.create_time} BETWEEN {_time(first)} AND {_time(last)}"


def in_shard(layout: Layout, shard: Shard | None) -> str:
    """The condition that a row is the shard's, from the slice column where that can tell."""
    if shard is None or shard.shards == 1:
        return ""
    if layout.slice and SLICES % shard.partitions == 0:
        number = layout.slice
    else:
        number = f"CRC32({layout.identity.utf8})"
    condition = f"{number} % {shard.partitions} % {shard.shards} = {shard.number}"
    if "aggregate_id" in layout.nullable and shard.number == 0:
        # such a row belongs to nobody; it is read so that it is refused, not passed over
        condition = f"({condition} OR {layout.identity.selected} IS NULL)"
    return f" AND {condition}"


def versions_by_key(layout: Layout, ranges: Sequence[VersionRange]) -> str:
    """All rows of some ranges, each aggregate's in the order of its versions."""
    conditions = " OR ".join(f"({_in_range(layout, r)})" for r in ranges)
    # in the order of the index, so that nothing is sorted and the first row comes at once
    return (
        f"SELECT {columns(layout)} FROM {layout.table} FORCE INDEX ({layout.key_index})"
        f" WHERE {conditions} ORDER BY {', '.join(layout.key_columns)}"
    )


def version_numbers(layout: Layout, r: VersionRange, most: int, *, highest: bool) -> str:
    """Which versions of a range there are, at most so many, by the index alone."""
    direction = "DESC" if highest else "ASC"
    return _union(layout, [_in_range(layout, r)], direction, most, layout.version)


def existing(layout: Layout, wanted: Sequence[tuple[str, int]]) -> str:
    """Which of some (aggregate, version) there are, by the index alone."""
    conditions = " OR ".join(
        f"({layout.identity.equals(a)} AND {layout.version} = {v:d})" for a, v in wanted
    )
    return (
        f"SELECT {layout.identity.selected}, {layout.version} FROM {layout.table}"
        f" FORCE INDEX ({layout.key_index}) WHERE {conditions}"
    )


def lowest_versions(layout: Layout, aggregates: int, first: int) -> str:
    """Of the first so many aggregates: how many there are, and where they begin.

    Above a version, with the next one, and below it.
    """
    *parts, last = layout.key_columns
    rows = f"{layout.table} FORCE INDEX ({layout.key_index})"
    if last != layout.version:  # not to be grouped by the index: only rows at its beginning
        parts, some = [*layout.identity.names], ", ".join(layout.key_columns)
        rows = f"(SELECT {some} FROM {rows} LIMIT {aggregates * 10:d}) AS some"
    tests = f"v > {first:d}", f"v = {first + 1:d}", f"v < {first:d}"
    sums = ", ".join(f"COALESCE(SUM({test}), 0)" for test in tests)
    return (
        f"SELECT COUNT(*), {sums} FROM (SELECT MIN({layout.version}) AS v"
        f" FROM {rows} GROUP BY {', '.join(parts)} LIMIT {aggregates:d}) AS lowest"
    )


def some_keys(layout: Layout, most: int) -> str:
    """The columns of the identity and the version of some rows, by the index alone."""
    return (
        f"SELECT {', '.join(layout.identity.names)}, {layout.version} FROM {layout.table}"
        f" FORCE INDEX ({layout.key_index}) ORDER BY {', '.join(layout.key_columns)}"
        f" LIMIT {most:d}"
    )


def repeated(layout: Layout) -> str:
    """The identity and the version of which there are several rows."""
    key = ", ".join([*layout.identity.names, layout.version])
    return f"SELECT {key} FROM {layout.table} GROUP BY {key} HAVING COUNT(*) > 1"


def lower_versions(layout: Layout, bounds: Sequence[tuple[str, int]], limit: int) -> str:
    """Keys and times of the highest versions below each bound, at most `limit` of each."""
    conditions = [f"{layout.identity.equals(a)} AND {layout.version} < {int(v)}" for a, v in bounds]
    return _union(layout, conditions, "DESC", limit, _key_and_time(layout))


def _in_range(layout: Layout, r: VersionRange) -> str:
    versions = f"BETWEEN {r.first:d} AND {r.last:d}"
    if layout.key_columns[-1] != layout.version and r.last - r.first < _FEW:
        # what stands behind the version in the index is compared by it, too
        versions = f"IN ({', '.join(str(v) for v in range(r.first, r.last + 1)) or 'NULL'})"
    return f"{layout.identity.equals(r.aggregate_id)} AND {layout.version} {versions}"


def _union(
    layout: Layout,
    conditions: Sequence[str],
    direction: str,
    limit: int,
    selected: str,
) -> str:
    # ordered by both columns of the index, or a collation that is not byte-wise sorts
    return " UNION ALL ".join(
        f"(SELECT {selected} FROM {layout.table} FORCE INDEX ({layout.key_index})"
        f" WHERE {condition} ORDER BY {layout.version} {direction} LIMIT {limit:d})"
        for condition in conditions
    )


def _time(local: int) -> str:
    return f"'{(_EPOCH + timedelta(microseconds=local)).isoformat(' ', 'microseconds')}'"
