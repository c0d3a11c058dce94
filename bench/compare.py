"""What a reader of the topic would complain of, and how long it waited. Pure: arrays in, facts out.

It shares nothing with the publisher: a set of what is stored, a list of what was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_VERSIONS = 40
"""Bits of a code that are the version."""


@dataclass(frozen=True)
class Records:
    """What a consumer read, in its order; the times are µs since 1970.

    Attributes:
        names: of the aggregates; `keys` are positions in it.
        keys, versions: of each record.
        created: `create_time`, as the record says.
        arrived: when the consumer had it.
        late: whether it is marked as late, so that it may stand behind later versions.
    """

    names: list[str]
    keys: Ints
    versions: Ints
    created: Ints
    arrived: Ints
    late: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Verdict:
    """Counts of events; `unknown` are records that the store does not have."""

    stored: int
    records: int
    lost: int
    repeated: int
    out_of_order: int
    unknown: int


def codes(keys: Ints, versions: Ints) -> Ints:
    """One number for an aggregate's position and a version below 2^40 and not below 0."""
    coded: Ints = (keys << _VERSIONS) | versions
    return coded


def compare(stored: Ints, records: Records) -> Verdict:
    """Compare: `stored` are the codes of the store's events, by the positions of `records.names`.

    Lost: in the store and never read. Repeated: each record after the first one of an event. Out of
    order: a record (not repeated, not marked as late) that comes after a later version of its
    aggregate.
    """
    read = codes(records.keys, records.versions)
    distinct, first = np.unique(read, return_index=True)
    in_order = np.zeros(len(read), np.bool_)
    in_order[first] = True
    in_order &= ~records.late
    keys, versions = records.keys[in_order], records.versions[in_order]
    by_key = np.argsort(keys, kind="stable")
    ordered = codes(keys[by_key], versions[by_key])
    # A running maximum of codes starts anew with each aggregate, whose codes are all higher.
    behind = ordered < np.maximum.accumulate(ordered) if len(ordered) else ordered
    return Verdict(
        stored=len(stored),
        records=len(read),
        lost=len(np.setdiff1d(stored, distinct, assume_unique=True)),
        repeated=len(read) - len(distinct),
        out_of_order=int(np.count_nonzero(behind)),
        unknown=len(np.setdiff1d(distinct, stored, assume_unique=True)),
    )


def stored_codes(rows: Iterable[tuple[Any, ...]], names: list[str]) -> Ints:
    """Codes of the store's (aggregate_id, version); `names` gets those that it has not."""
    numbers = {name: number for number, name in enumerate(names)}
    keys, versions = [], []
    for name, version in rows:
        number = numbers.get(name)
        if number is None:
            number = numbers[name] = len(names)
            names.append(name)
        keys.append(number)
        versions.append(version)
    return codes(np.array(keys, np.int64), np.array(versions, np.int64))


def spread(micros: Ints) -> dict[str, float | int]:
    """Count, and p50, p99 and maximum in seconds; a percentile is a value that occurred."""
    if not len(micros):
        return {"count": 0}
    p50, p99 = np.percentile(micros, [50, 99], method="inverted_cdf")
    return {
        "count": len(micros),
        "p50": round(float(p50) / 1e6, 4),
        "p99": round(float(p99) / 1e6, 4),
        "max": round(float(micros.max()) / 1e6, 4),
    }


def over_time(
    created: Ints, waited: Ints, start: int, every: float = 1.0
) -> dict[str, list[float]]:
    """Latency of the events created in each interval from `start` (µs) on, in seconds."""
    number = (created - start) // round(every * 1e6)
    series: dict[str, list[float]] = {"seconds": [], "events": [], "p50": [], "p99": [], "max": []}
    order = np.argsort(number, kind="stable")
    edges = np.flatnonzero(np.diff(number[order])) + 1
    for group in np.split(order, edges):
        if len(group):
            facts = spread(waited[group])
            series["seconds"].append(round(float(number[group[0]]) * every, 3))
            series["events"].append(facts["count"])
            for name in ("p50", "p99", "max"):
                series[name].append(facts[name])
    return series


def caught_up(records: Records, since: int, normal: float) -> float | None:
    """Seconds from `since` (µs) until everything that arrives is as young as `normal` seconds.

    The end of the last second in which something older arrived; None: it never was.
    """
    after = records.arrived >= since
    old = after & (records.arrived - records.created > normal * 1e6)
    if not after.any() or not (records.arrived > records.arrived[old].max(initial=0)).any():
        return None
    return max(0.0, (int(records.arrived[old].max(initial=since)) - since) / 1e6)
