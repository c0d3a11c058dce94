"""Indexes read from outside: another process may have them open, or none."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from eventpub.admission import Hold
from eventpub.errors import StateError
from eventpub.index.database import Storage, read_only
from eventpub.index.facts import read_facts
from eventpub.index.values import unpacked_hold

Ranges: TypeAlias = list[tuple[int, int]]


@dataclass(frozen=True)
class Pending:
    """What waits in an index, where there may be hundreds of thousands of holds.

    Attributes:
        holds: of the requested aggregates, and those first seen; `count`: of all.
        skipped: skipped versions of the requested aggregates that have not turned up.
    """

    holds: list[Hold]
    count: int
    skipped: dict[str, Ranges]


@dataclass(frozen=True)
class Summary:
    """An index's facts; `low`: from where a shard that lost it must read again, µs."""

    position: int | None
    low: int | None
    baseline: int | None
    identity: dict[str, Any]


def choose(holds: Iterable[Hold], most: int, about: Collection[str]) -> tuple[list[Hold], int]:
    """Holds of the aggregates in `about`, then the `most` first seen; and the total count."""
    named: list[Hold] = []
    count = 0

    def others() -> Iterator[Hold]:
        nonlocal count
        for hold in holds:
            count += 1
            if hold.aggregate_id in about:
                named.append(hold)
            else:
                yield hold

    first = heapq.nsmallest(max(most, 1), others(), key=attrgetter("first_seen"))
    return [*named, *first[:most]], count


def glance(directory: Path, most: int = 0, about: Collection[str] = ()) -> Pending:
    """Up to `most` holds, first seen first, and all about some aggregates; empty if no index.

    Another process may have the index open.

    Raises:
        StateError: index.newer_format, index.corrupt, ….
    """
    for _ in range(5):  # files vanish while another process writes
        with suppress(StateError):
            return _glance(directory, most, about)
        time.sleep(0.05)
    return _glance(directory, most, about)


def _glance(directory: Path, most: int, about: Collection[str]) -> Pending:
    with read_only(directory) as items:
        if items is None:
            return Pending([], 0, {})
        held = (unpacked_hold(key[1:].decode(), value) for key, value in items(b"h"))
        holds, count = choose(held, most, about)
        skipped = {
            key[1:].decode(): [(first, last) for first, last in json.loads(value)]
            for key, value in items(b"s")
            if key[1:].decode() in about
        }
        return Pending(holds, count, skipped)


def summary(directory: Path, storage: Storage) -> Summary | None:
    """Of an index that no process has open; None if absent or unusable."""
    try:
        with read_only(directory, storage) as items:
            if items is None:
                return None
            facts = read_facts(items)
            since = [unpacked_hold("", value).since for _, value in items(b"h")]
    except StateError:
        return None
    if "offsets" not in facts:
        return None
    position = facts.get("position")
    low = None if position is None else min([position, *(at - 1 for at in since)])
    return Summary(position, low, facts.get("baseline"), facts.get("identity", {}))
