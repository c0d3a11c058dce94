"""Late commits: what a moving window loses, and what it takes to lose nothing.

Named after an article whose load it repeats: 6,000 events a second for 100 s, then 16,000 for
100 s, 10% of the transactions open for 0 to 5 s. Three publishers of the same code with mechanisms
switched off, and a poller as it is usually written, each on a table of its own. And once more, with
nothing switched off, in transactions that are larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .load import QUIET, Phase, under_load
from .machine import Machine
from .publisher import Settings

COLUMNS: dict[str, Settings | None] = {
    "window only": {
        "read": {"delay": "1s", "watermark": "off"},
        "run": {"engine": "threads"},
        "bench": {"backtrack": False},
        "recount": {"horizon": "0"},
    },
    "with backtrack": {
        "read": {"delay": "1s", "watermark": "off"},
        "recount": {"horizon": "0"},
    },
    "timestamp poller": None,
    "with recount and watermark": {},
}
"""By name: the settings, as of `bench.publisher`; None: the poller of `bench.poller`."""


def article(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    phases: list[Phase],
    *,
    columns: dict[str, Settings | None] | None = None,
    rows: int | None = None,
    quiet: float = QUIET,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All columns, one after the other.

    Args:
        rows: of the transactions that are larger; None: there are none.
    """
    runs = [(name, settings, phases) for name, settings in (columns or COLUMNS).items()]
    if rows is not None:
        larger = [replace(phase, events_per_transaction=rows) for phase in phases]
        runs.append((f"the same, {rows} rows a transaction", {}, larger))
    found: dict[str, Any] = {}
    for number, (name, settings, load) in enumerate(runs):
        database = f"article{number}"
        found[name] = under_load(
            machine, database, load, settings, quiet=quiet, verify=settings == {}
        )
        machine.drop(database)
        verdict = found[name]["verdict"]
        say(
            f"{name}: {verdict['stored']:,} events, lost {verdict['lost']:,}, repeated "
            f"{verdict['repeated']:,}, out of order {verdict['out_of_order']:,}; "
            f"latency {found[name]['latency']['at_once']}"
        )
    return {
        "case": "article",
        "settings": machine.settings() | {"phases": [vars(phase) for phase in phases]},
        "columns": found,
    }
