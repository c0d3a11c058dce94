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
_STEP_ON_TOP = 20
"""The same of what comes on top of a store: it has to be younger than the drain before."""
_BYTES_A_ROW = 700
"""On disk, with its indexes, and what making those needs."""
_BYTES_A_RECORD = 300
AGGREGATES = 100_000


def growth(  # noqa: PLR0913 (what a case is measured with)
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
        sizes: rows of the store, of 100,000 aggregates; all are drained, and then `drained` more,
            `rounds` times.
        aggregates: how many the drained events belong to.
        shards, pages: `run.shards` and `read.page_rows`.
        rounds: of what comes on top of each of `sizes`, by their median.

    Raises:
        LocalError: local.disk_full, before anything is filled.
    """

    def noted(what: str, run: dict[str, Any]) -> dict[str, Any]:
        say(f"{what}: {run['rate']:,} events/s, a page {run['page_seconds']:.2f} s")
        return {key: value for key, value in run.items() if key not in {"growth", "settings"}}

    rows = max([max(sizes, default=0) + rounds * drained, *aggregates, drained])
    check_space(machine.folder, rows * (_BYTES_A_ROW + _BYTES_A_RECORD))
    by_size: list[dict[str, Any]] = []
    for size in sizes:
        url = machine.table("growth")
        last = time.time_ns() // 1000 - 600_000_000
        seconds = machine.grow(url, size, AGGREGATES, first=last - size * _STEP, last=last)
        say(f"{size:,} rows, filled in {seconds:.0f} s")
        drain = peers.Eventpub(machine, url)
        run = noted(f"all of {size:,} rows", drain.drain(size))
        more = []
        for number in range(rounds):
            _append(machine, url, drained, f"{size}-{number}")
            more.append(noted(f"{drained:,} more", drain.drain(drained)))
        drain.finish()
        machine.drop("growth")
        more.sort(key=lambda one: float(one["rate"]))
        middle = more[len(more) // 2] | {"rates": [one["rate"] for one in more]}
        by_size.append({"rows": size, **run, "more": middle})

    by_aggregates = []
    for number in aggregates:
        url = machine.table("growth")
        events = max(drained, number)
        machine.fill(url, events, number)
        run = noted(f"{number:,} aggregates", peers.eventpub(machine, url, events))
        per_aggregate = round(run["index_bytes"] / number, 1)
        by_aggregates.append({"aggregates": number, "index_bytes_each": per_aggregate, **run})
        machine.drop("growth")

    url = machine.table("growth")
    machine.fill(url, drained, AGGREGATES)
    by_shards = [
        {
            "shards": number,
            **noted(
                f"{number} shards",
                peers.eventpub(machine, url, drained, {"run": {"shards": number}}),
            ),
        }
        for number in shards
    ]
    by_page = [
        {
            "page_rows": rows,
            **noted(
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


def _append(machine: Machine, url: str, events: int, prefix: str) -> None:
    """A backlog of new aggregates, so that the table's indexes are not written all over."""
    first = time.time_ns() // 1000
    last = first + events * _STEP_ON_TOP
    machine.fill(url, events, AGGREGATES, first=first, last=last, prefix=prefix)
    time.sleep(max(0.0, last / 1e6 + 1.0 - time.time()))
