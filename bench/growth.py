"""What grows with the store: drains at several sizes, numbers of aggregates, and settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from eventpub.local.downloads import check_space

from . import peers
from .machine import Machine

_STEP = 100
"""Microseconds from one event to the next: 50,000,000 events are 83 minutes."""
_BYTES_A_ROW = 700
"""On disk, with its indexes, and what making those needs."""
_BYTES_A_RECORD = 300
AGGREGATES = 100_000


def growth(
    machine: Machine,
    *,
    drained: int,
    sizes: Sequence[int],
    aggregates: Sequence[int],
    shards: Sequence[int],
    pages: Sequence[int],
    rounds: int = 1,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Drains, one after the other.

    Args:
        drained: events of each drain but those of `sizes`; of more aggregates, as many as those.
        sizes: rows of the store, ascending; all are drained, of 100,000 aggregates.
        aggregates: how many the drained events belong to.
        shards, pages: `spark.shards` and `read.page_rows`.
        rounds: of the smallest of `sizes`, by their median; before more than one, a drain does not
            count, since a broker's first is slow.

    Raises:
        LocalError: local.disk_full, before anything is filled.
    """

    def told(what: str, run: dict[str, Any]) -> dict[str, Any]:
        say(f"{what}: {run['rate']:,} events/s, a page {run['page_seconds']:.2f} s")
        return {key: value for key, value in run.items() if key != "growth"}

    records = sum(sizes) + sum(max(drained, number) for number in aggregates)
    records += drained * (len(shards) + len(pages) + rounds)
    rows = max([*sizes, *aggregates, drained])
    check_space(machine.folder, rows * _BYTES_A_ROW + records * _BYTES_A_RECORD)
    by_size: list[dict[str, Any]] = []
    url = machine.table("growth")
    begin = time.time_ns() // 1000 - max(sizes, default=0) * _STEP - 600_000_000
    there = 0
    for size in sizes:
        seconds = machine.grow(
            url,
            size - there,
            AGGREGATES,
            first=begin + there * _STEP,
            last=begin + size * _STEP,
            before=there,
        )
        say(f"{size:,} rows, filled in {seconds:.0f} s")
        there = size
        again = 1 if by_size else rounds
        if again > 1:
            peers.eventpub(machine, url, size)
        runs = [peers.eventpub(machine, url, size) for _ in range(again)]
        runs.sort(key=lambda one: float(one["rate"]))
        run = told(f"all of {size:,} rows", runs[len(runs) // 2])
        by_size.append({"rows": size, **run, "rates": [one["rate"] for one in runs]})
    machine.drop("growth")

    by_aggregates = []
    for number in aggregates:
        url = machine.table("growth")
        events = max(drained, number)
        machine.fill(url, events, number)
        run = told(f"{number:,} aggregates", peers.eventpub(machine, url, events))
        per_aggregate = round(run["index_bytes"] / number, 1)
        by_aggregates.append({"aggregates": number, "index_bytes_each": per_aggregate, **run})
        machine.drop("growth")

    url = machine.table("growth")
    machine.fill(url, drained, AGGREGATES)
    by_shards = [
        {
            "shards": number,
            **told(
                f"{number} shards",
                peers.eventpub(machine, url, drained, {"spark": {"shards": number}}),
            ),
        }
        for number in shards
    ]
    by_page = [
        {
            "page_rows": rows,
            **told(
                f"pages of {rows:,} rows",
                peers.eventpub(machine, url, drained, {"read": {"page_rows": rows}}),
            ),
        }
        for rows in pages
    ]
    machine.drop("growth")
    return {
        "case": "growth",
        "settings": machine.settings() | {"drained": drained, "aggregates": AGGREGATES},
        "by_size": by_size,
        "by_aggregates": by_aggregates,
        "by_shards": by_shards,
        "by_page": by_page,
    }
