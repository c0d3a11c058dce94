"""Results as tables: for the terminal, for the page. Pure: what a case returned in, cells out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Result = Mapping[str, Any]


@dataclass(frozen=True)
class ResultTable:
    """One table; `notes` say what the numbers mean."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def tables(result: Result) -> list[ResultTable]:
    """The tables of one case's result."""
    return _TABLES[result["case"]](result)


def show(console: Console, result: Result) -> None:
    """The tables on a terminal."""
    from rich.table import Table
    from rich.text import Text

    for made in tables(result):
        table = Table(title=made.title, title_justify="left", box=None, pad_edge=False)
        for number, column in enumerate(made.columns):
            table.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in made.rows:
            table.add_row(*map(Text, row))
        console.print(table)
        for note in made.notes:
            console.print(Text(note, style="dim"))
        console.print()
    console.print(Text(stated(result), style="dim"))
    console.print()


def stated(result: Result) -> str:
    """Where and with what it was measured, in one line."""
    where, settings = result.get("environment", {}), result["settings"]
    return (
        f"eventpub {where.get('git')}, {where.get('measured_at')}: {where.get('cores')} cores "
        f"({where.get('cpu')}), {where.get('memory_gib')} GiB, MySQL {settings.get('mysql')}, "
        f"Kafka {settings.get('kafka')}, Spark {where.get('pyspark')}, "
        f"Java {where.get('java')}, Python {where.get('python')}, "
        f"payloads of {settings.get('payload_bytes')} bytes, {settings.get('partitions')} "
        f"partitions; load of the machine before: {where.get('load_before')}"
    )


def summary(result: Result) -> list[list[str]]:
    """What a case has shown, a few lines of two cells: of what, and the figure with its range."""
    return _SUMMARIES[result["case"]](result)


def count(value: float | None) -> str:
    """``1,234,567``."""
    return "–" if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Seconds with as many digits as matter."""
    if value is None:
        return "–"
    return (
        f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"
    )


def _wrong(verdict: Mapping[str, int]) -> list[str]:
    return [count(verdict[name]) for name in ("stored", "lost", "repeated", "out_of_order")]


def _waited(facts: Mapping[str, float]) -> list[str]:
    return [seconds(facts.get(name)) for name in ("p50", "p99", "max")]


_LATENCY = [
    "latency: create_time (the database's) until a read_committed consumer has the event; one clock"
]
_JUDGED = ["events", "lost", "repeated", "out of order"]


def _article(result: Result) -> list[ResultTable]:
    rows, held = [], []
    for name, one in result["columns"].items():
        latency = one["latency"]
        rows.append([name, *_wrong(one["verdict"]), *_waited(latency["at_once"])])
        held.append(
            [name, *_waited(latency["held_open"]), *_waited(latency["held_open_from_commit"])]
        )
    phases = result["settings"]["phases"]
    load = ", then ".join(f"{p['rate']:,.0f} events/s for {p['seconds']:.0f} s" for p in phases)
    opened = phases[0]
    written = {
        name: " and ".join(f"{report['rate']:,.0f}" for report in one["writers"])
        for name, one in result["columns"].items()
    }
    return [
        ResultTable(
            f"Late commits: {load}; {100 * opened['open_fraction']:.0f}% of transactions open for "
            f"0 to {opened['open_seconds']:.0f} s",
            ["", *_JUDGED, "p50", "p99", "max"],
            rows,
            [
                *_LATENCY,
                "p50, p99, max: events of transactions that were committed at once (autocommit)",
                "settings: "
                + "; ".join(
                    f"{name}: {one['settings'] if one['settings'] else 'the defaults'}"
                    for name, one in result["columns"].items()
                    if one["settings"] is not None
                ),
                "written, events/s: " + "; ".join(f"{k}: {v}" for k, v in written.items()),
            ],
        ),
        ResultTable(
            "Events of transactions that were held open",
            ["", "p50", "p99", "max", "from the commit: p50", "p99", "max"],
            held,
            ["from create_time, and from the moment the writer had the answer to its COMMIT"],
        ),
    ]


def _drain(result: Result) -> list[ResultTable]:
    rows = [
        [
            what,
            count(one["rate"]),
            f"{one['lowest']:,.0f}–{one['highest']:,.0f}",
            f"{one['ratio']:.2f}",
            count(one["rate_from_start"]),
            seconds(one["first_visible_seconds"]),
            f"{one['cpu_seconds_per_million']:.1f}",
            f"{one['peak_memory_mb']:,.0f} MB",
            str(one["runs"]),
        ]
        for what, one in result["medians"].items()
    ]
    groups = list(
        dict.fromkeys(g for run in result["runs"] for g in run["cpu_seconds_per_million_visible"])
    )
    by_process = [
        [what, *(f"{one['cpu'].get(group, 0.0):.1f}" for group in groups)]
        for what, one in result["medians"].items()
    ]
    events = result["settings"]["events"]
    return [
        ResultTable(
            f"Draining {events:,} events, exactly once (medians of alternating runs)",
            [
                *("", "events/s", "lowest–highest", "eventpub is × as fast", "events/s from start"),
                *("first visible after", "CPU s per million", "peak memory", "runs"),
            ],
            rows,
            [
                "events/s: from the first visible transactions to the last, as a read_committed "
                "consumer sees them; from start: of the process, Spark's JVM included (Debezium: "
                "of the connector on a worker that runs)",
                "raw pipe: ConnectorX → transactional produce of the same records, no checks; "
                "it is the ceiling, not an alternative",
                "CPU: all of publisher, database and broker, starts included; memory: of the "
                "publisher's processes, shared pages once",
                "cores that the rest of the machine used meanwhile: "
                + ", ".join(
                    f"{k} {v.get('others_cores', '–')}" for k, v in result["medians"].items()
                ),
            ],
        ),
        ResultTable(
            "CPU seconds per million events while they become visible, by process",
            ["", *groups],
            by_process,
            ["without starts; sampled every 0.5 s"],
        ),
        ResultTable(
            "Clients that only read the table into Arrow, one page after the other",
            ["", "rows/s", "CPU s per million, imports included"],
            [
                [client, count(one["rate"]), f"{one['cpu_seconds_per_million']:.1f}"]
                for client, one in result["readers"].items()
            ],
            ["the raw pipe takes the fastest"],
        ),
    ]


def _growth(result: Result) -> list[ResultTable]:
    def cells(run: Mapping[str, Any]) -> list[str]:
        memory = sum(v for k, v in run["peak_memory_mb"].items() if k not in {"database", "broker"})
        return [
            count(run["events"]),
            count(run["rate"]),
            seconds(run["page_seconds"]),
            f"{run['cpu_seconds_per_million']:.1f}",
            f"{memory:,} MB",
        ]

    facts = ["events drained", "events/s", "a page", "CPU s per million", "peak memory"]
    parts: list[tuple[str, str, str, Callable[[Mapping[str, Any]], str]]] = [
        ("by_size", "Rows in the store", "rows", lambda r: f"{r['rows']:,}"),
        ("by_aggregates", "Aggregates", "aggregates", lambda r: f"{r['aggregates']:,}"),
        ("by_shards", "Shards", "shards", lambda r: str(r["shards"])),
        ("by_page", "Rows of a page", "read.page_rows", lambda r: f"{r['page_rows']:,}"),
    ]
    own = result["settings"]
    more = f"{own['drained']:,}"
    among = f"{own['aggregates']:,} aggregates"
    notes = {
        "by_size": [
            f"all are drained, and then {more} more, which begins as any drain: some pages are "
            f"read while Spark starts; {among}",
            *(
                f"{more} more than {r['rows']:,} rows, {count(r['more']['rate'])} is the median of "
                + ", ".join(count(rate) for rate in r["more"]["rates"])
                for r in result["by_size"]
                if len(r["more"]["rates"]) > 1
            ),
        ],
        "by_aggregates": ["index: on disk at the end, both shards; ids such as order-0001234"],
        "by_shards": [among],
        "by_page": [f"a page: its rows by the rate, what a read and its publishing cost; {among}"],
    }
    found = []
    for key, title, heading, name in parts:
        if not result[key]:
            continue
        columns, rows = [heading, *facts], [[name(run), *cells(run)] for run in result[key]]
        if key == "by_size":
            columns += ["the last tenth, events/s", f"{more} more, events/s", "a page"]
            for row, run in zip(rows, result[key], strict=True):
                row.append(count(run["rates_of_tenths"][-1]))
                row += [count(run["more"]["rate"]), seconds(run["more"]["page_seconds"])]
        if key == "by_aggregates":
            columns.append("index, bytes each")
            for row, run in zip(rows, result[key], strict=True):
                row.append(f"{run['index_bytes_each']:.0f}")
        found.append(ResultTable(f"Growth: {title.lower()}", columns, rows, notes[key]))
    return found


def _idle(result: Result) -> list[ResultTable]:
    rows = [
        [
            name,
            f"{one['cpu_percent_of_the_publisher']:.1f}%",
            *(f"{one['cpu_percent_of_a_core'].get(g, 0):.1f}%" for g in ("driver", "jvm")),
            f"{one['cpu_percent_of_a_core'].get('workers', 0):.1f}%",
            f"{one['cpu_percent_of_a_core'].get('database', 0):.1f}%",
            f"{one['queries_per_second']:.1f}",
        ]
        for name, one in result["publishers"].items()
    ]
    return [
        ResultTable(
            f"Nothing to publish, {result['settings']['seconds']:.0f} s",
            ["", "publisher", "driver", "JVM", "workers", "database", "queries/s"],
            rows,
            ["CPU as a part of one core; queries by the database's own count (Questions)"],
        )
    ]


def _latency(result: Result) -> list[ResultTable]:
    rows = [
        [
            f"{float(rate):,.0f}/s",
            name,
            *_wrong(one["verdict"]),
            *_waited(one["latency"]["at_once"]),
        ]
        for name, rates in result["publishers"].items()
        for rate, one in rates.items()
    ]
    s = result["settings"]
    return [
        ResultTable(
            f"Latency at a rate, {s['seconds']:.0f} s after {s['warm_up']:.0f} s of warm-up",
            ["events", "", *_JUDGED, "p50", "p99", "max"],
            rows,
            [*_LATENCY, "every transaction is committed at once"],
        )
    ]


def _bursts(result: Result) -> list[ResultTable]:
    rows = [
        [name, *_wrong(one["verdict"]), *_waited(one["latency"]["at_once"])]
        for name, one in result["loads"].items()
    ]
    hot = result["one_aggregate"]
    rate, span = result["settings"]["rate"], result["settings"]["seconds"]
    return [
        ResultTable(
            f"Bursts and hot keys, {rate:,.0f} events/s for {span:.0f} s",
            ["", *_JUDGED, "p50", "p99", "max"],
            rows,
            [
                *_LATENCY,
                f"one aggregate with {hot['events']:,} events waiting: {hot['rate']:,} events/s",
            ],
        )
    ]


def _restart(result: Result) -> list[ResultTable]:
    rows = [
        [str(number + 1), seconds(run["first_new_event"]), seconds(run["caught_up"])]
        for number, run in enumerate(result["kills"])
    ]
    median = result["median"]
    rows.append(["median", seconds(median["first_new_event"]), seconds(median["caught_up"])])
    verdict = result["verdict"]
    return [
        ResultTable(
            f"kill -9 of the whole publisher at {result['settings']['phase']['rate']:,.0f} "
            "events/s, started again at once",
            ["kill", "first new event visible after", "caught up after"],
            rows,
            [
                "caught up: everything that arrives is as young as before the kill (p99 and 0.2 s: "
                f"{result['normal_latency']:.2f} s)",
                f"{verdict['stored']:,} events: lost {verdict['lost']}, repeated "
                f"{verdict['repeated']}, out of order {verdict['out_of_order']}",
            ],
        )
    ]


def _large(result: Result) -> list[ResultTable]:
    rows = [
        [
            name,
            *_wrong(one["verdict"]),
            *_waited(one["latency"]["held_open_from_commit"]),
            *_waited(one["latency"]["held_open"]),
        ]
        for name, one in result["publishers"].items()
    ]
    phase = result["settings"]["phase"]
    return [
        ResultTable(
            f"Transactions of some {phase['events_per_transaction']:,} rows, {phase['rate']:,.0f} "
            f"events/s, {100 * phase['open_fraction']:.0f}% open for 0 to "
            f"{phase['open_seconds']:.0f} s",
            ["", *_JUDGED, "p50", "p99", "max", "since create_time: p50", "p99", "max"],
            rows,
            ["from the answer to the COMMIT until a read_committed consumer has the event"],
        )
    ]


def _range(values: Iterable[float], unit: Callable[[float], str]) -> str:
    found = sorted(values)
    return unit(found[0]) if found[0] == found[-1] else f"{unit(found[0])} to {unit(found[-1])}"


def _lost(name: str, verdict: Mapping[str, int]) -> list[str]:
    return [name, f"{count(verdict['lost'])} of {count(verdict['stored'])} events lost"]


def _facts(name: str, facts: Mapping[str, float]) -> list[str]:
    return [name, "p50 {}, p99 {}, highest {}".format(*_waited(facts))]


def _sum_drain(result: Result) -> list[list[str]]:
    return [
        [
            name,
            f"{count(one['rate'])} events/s ({count(one['lowest'])} to {count(one['highest'])}), "
            f"{count(one['rate_from_start'])} from the start of the process",
        ]
        for name, one in result["medians"].items()
    ]


def _sum_latency(result: Result) -> list[list[str]]:
    lines = []
    for name, rates in result["publishers"].items():
        rate, one = max(rates.items(), key=lambda item: float(item[0]))
        lines.append(_facts(f"{name}, {float(rate):,.0f} events/s", one["latency"]["at_once"]))
    return lines


def _sum_restart(result: Result) -> list[list[str]]:
    return [
        [heading, _range((kill[key] for kill in result["kills"]), seconds)]
        for heading, key in (
            ("first new event after a kill -9", "first_new_event"),
            ("all as young as before it", "caught_up"),
        )
    ]


def _sum_idle(result: Result) -> list[list[str]]:
    return [
        [
            name,
            f"{one['cpu_percent_of_the_publisher']:.1f}% of a core, "
            f"{one['queries_per_second']:.1f} queries/s",
        ]
        for name, one in result["publishers"].items()
    ]


_SUMMARIES: dict[str, Callable[[Result], list[list[str]]]] = {
    "article": lambda r: [_lost(name, one["verdict"]) for name, one in r["columns"].items()],
    "drain": _sum_drain,
    "growth": lambda r: [
        [
            "whole stores, of all sizes",
            _range((x["rate"] for x in r["by_size"]), count) + " events/s",
        ]
    ],
    "idle": _sum_idle,
    "latency": _sum_latency,
    "bursts": lambda r: [
        _facts(name, one["latency"]["at_once"]) for name, one in r["loads"].items()
    ],
    "restart": _sum_restart,
    "large": lambda r: [
        _facts(f"{name}, after the COMMIT", one["latency"]["held_open_from_commit"])
        for name, one in r["publishers"].items()
    ],
}


_TABLES: dict[str, Callable[[Result], list[ResultTable]]] = {
    "article": _article,
    "drain": _drain,
    "growth": _growth,
    "idle": _idle,
    "latency": _latency,
    "bursts": _bursts,
    "restart": _restart,
    "large": _large,
}
CASES = tuple(_TABLES)


def faults(result: Result) -> list[str]:
    """Where eventpub, with nothing switched off, has lost, repeated or reordered something."""
    checked: dict[str, Mapping[str, Any]] = {}
    match result["case"]:
        case "article":
            checked = {k: v for k, v in result["columns"].items() if v["settings"] == {}}
        case "latency":
            # without recount nothing is lost either: every transaction is committed at once
            checked = {
                f"{name}, {rate}/s": one
                for name, rates in result["publishers"].items()
                for rate, one in rates.items()
            }
        case "bursts":
            checked = dict(result["loads"])
        case "large":
            checked = dict(result["publishers"])
        case "restart":
            checked = {"restart": result}
    return [
        f"{result['case']}, {name}: lost {v['lost']}, repeated {v['repeated']}, "
        f"out of order {v['out_of_order']}"
        for name, one in checked.items()
        if (v := one["verdict"])["lost"] or v["repeated"] or v["out_of_order"] or v["unknown"]
    ]
