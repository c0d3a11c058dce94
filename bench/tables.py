"""Results as tables: for the terminal, for the page. Pure: what a case returned in, cells out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .words import PROCESSES

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
    for line in stated(result):
        console.print(Text(line, style="dim"))
    console.print()


def stated(result: Result) -> list[str]:
    """Where and with what it was measured, a line each."""
    where, settings = result.get("environment", {}), result["settings"]
    waited = where.get("waited_seconds")
    options = " ".join(settings.get("mysql_options", []))
    return [
        f"eventpub {where.get('git')}, {where.get('measured_at')}, {where.get('cores')} cores "
        f"({where.get('cpu')}), {where.get('memory_gib')} GiB",
        f"Load before: {load(result)}"
        + (f", after a wait of {waited:.0f} s for the machine to become quiet" if waited else ""),
        f"Database: MySQL {settings.get('mysql')} {options}",
        f"Broker: Kafka {settings.get('kafka')}, one, heap {settings.get('kafka_heap')}; topics of "
        f"{settings.get('partitions')} partitions, one replica, lz4",
        f"Events: payloads of {settings.get('payload_bytes')} bytes",
        f"Versions: Spark {where.get('pyspark')}, Java {where.get('java')}, "
        f"Python {where.get('python')}, librdkafka {where.get('librdkafka')}, "
        f"RocksDB by rocksdict {where.get('rocksdict')}",
    ]


def command(result: Result) -> str:
    """What measures it again."""
    return str(result.get("command", f"eventpub bench {result['case']}"))


def load(result: Result) -> str:
    """The load average before the measurement, ``1.9 (1 min)``."""
    before = result.get("environment", {}).get("load_before")
    return f"{before[0]:.1f} (1 min)" if before else "not known"


def configurations(result: Result) -> dict[str, str]:
    """What was set, as TOML, by who was measured."""
    found: dict[str, Any] = {}
    match result["case"]:
        case "article":
            found = {name: one["settings"] for name, one in result["columns"].items()}
        case "latency":
            found = {
                name: next(iter(rates.values()))["settings"]
                for name, rates in result["publishers"].items()
            }
        case "idle" | "large" | "sizing":
            found = {name: one["settings"] for name, one in result["publishers"].items()}
        case "drain":
            found = {run["what"]: run.get("settings", {}) for run in result["runs"]}
        case _:
            found = {"eventpub": {}}
    return {name: _as_toml(settings) for name, settings in found.items()}


def _as_toml(settings: Mapping[str, Any] | None) -> str:
    if settings is None:
        return "# no publisher: bench/poller.py"
    lines = [f"{_key(k)} = {toml(v)}" for k, v in settings.items() if not isinstance(v, Mapping)]
    for section, keys in settings.items():
        if isinstance(keys, Mapping):
            lines += [f"[{section}]", *(f"{_key(k)} = {toml(v)}" for k, v in keys.items())]
    return "\n".join(lines) or "# the defaults"


def toml(value: Any) -> str:
    """A value as it stands in `eventpub.toml`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)


def summary(result: Result) -> list[list[str]]:
    """What a case has shown, a few lines of three cells: of what, the figure, and its range."""
    return [[*line, ""][:3] for line in _SUMMARIES[result["case"]](result)]


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
_PUBLISHER = ("driver", "jvm", "workers")
"""The groups of its processes."""
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
                "p50, p99, max are of events whose transaction was committed at once (autocommit)",
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
                *("first event after", "CPU s per million", "peak memory", "runs"),
            ],
            rows,
            [
                "events/s: from the first visible transactions to the last, as a read_committed "
                "consumer sees them",
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
            ["", *(PROCESSES.get(group, group) for group in groups)],
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

    facts = ["events drained", "events/s", "time of a page", "CPU s per million", "peak memory"]
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
        "by_page": [f"time of a page: its rows divided by the rate; {among}"],
    }
    found = []
    for key, title, heading, name in parts:
        if not result[key]:
            continue
        columns, rows = [heading, *facts], [[name(run), *cells(run)] for run in result[key]]
        if key == "by_size":
            columns += ["the last tenth, events/s", f"{more} more, events/s", "time of a page"]
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
            f"{_memory(one['memory_mb']):,} MB",
        ]
        for name, one in result["publishers"].items()
    ]
    return [
        ResultTable(
            f"Nothing to publish, {result['settings']['seconds']:.0f} s",
            [
                *("", "publisher", *(PROCESSES[group] for group in ("driver", "jvm", "workers"))),
                *("database", "queries/s", "publisher's memory"),
            ],
            rows,
            [
                "CPU as a part of one core: all of the publisher, and of it each process; queries "
                "by the database's own count (Questions); memory: pages that processes share "
                "count once"
            ],
        )
    ]


def _memory(megabytes: Mapping[str, int]) -> int:
    return sum(megabytes.get(group, 0) for group in _PUBLISHER)


def _cores(measured: dict[str, Any]) -> tuple[str, ...]:
    """Cores of the publisher, its CPU seconds per 1,000 events, cores of database and broker."""
    cpu, span = measured["cpu_seconds"], measured["seconds"]
    own = cpu_of_publisher(cpu)
    return (
        f"{own / span:.2f}",
        f"{1_000 * own / measured['events']:.3f}",
        f"{cpu.get('database', 0.0) / span:.2f}",
        f"{cpu.get('broker', 0.0) / span:.2f}",
    )


def _memories(run: Mapping[str, Any]) -> list[str]:
    return [f"{_memory(run[key]):,} MB" for key in ("peak_memory_mb", "peak_rss_mb")]


def cpu_of_publisher(cpu: Mapping[str, float]) -> float:
    """The sum over the publisher's processes."""
    return sum(cpu.get(group, 0.0) for group in _PUBLISHER)


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
                "caught up: everything that arrives is as young as before the kill (its p99 plus "
                f"0.2 s: {result['normal_latency']:.2f} s)",
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


def _sizing(result: Result) -> list[ResultTable]:
    rows, disk = [], []
    for name, one in result["publishers"].items():
        rest = one["idle"]
        rows.append(
            [
                name,
                "idle",
                f"{rest['cpu_percent_of_the_publisher'] / 100:.3f}",
                "–",
                f"{rest['cpu_percent_of_a_core'].get('database', 0.0) / 100:.2f}",
                f"{rest['cpu_percent_of_a_core'].get('broker', 0.0) / 100:.2f}",
                *(f"{_memory(rest[key]):,} MB" for key in ("memory_mb", "rss_mb")),
                *("–", "–"),
            ]
        )
        for rate, run in one["rates"].items():
            waited = run["latency"]["at_once"]
            rows.append(
                [
                    name,
                    f"{float(rate):,.0f}/s",
                    *_cores(run["steady"]),
                    *_memories(run),
                    *(seconds(waited.get(key)) for key in ("p50", "p99")),
                ]
            )
            disk.append([name, f"{float(rate):,.0f}/s", *_disk(run["disk"], run["verdict"])])
        backlog = one["backlog"]
        rows.append(
            [
                name,
                f"a backlog, {count(backlog['rate'])}/s",
                *_cores(backlog),
                *_memories(backlog),
                *("–", "–"),
            ]
        )
        disk.append([name, "a backlog", *_disk(backlog["disk"], {"stored": backlog["events"]})])
    aggregates = next(iter(result["publishers"].values()))["backlog"]["disk"]["aggregates"]
    return [
        ResultTable(
            f"By the rate of events, {result['settings']['seconds']:.0f} s each after a warm-up",
            [
                *("", "events", "publisher, cores", "CPU s per 1,000 events", "database, cores"),
                *("broker, cores", "publisher's memory", "its RSS", "p50", "p99"),
            ],
            rows,
            [
                "the database also works for the writers, the broker for the consumer; "
                "a backlog: from the start of the process to its end"
            ],
        ),
        ResultTable(
            "Disk, bytes",
            ["", "events", "on the topic, per event", "table, per event", "index, all of it"],
            disk,
            [
                f"payloads of {result['settings']['payload_bytes']} random letters and digits, cut "
                "from a text of 64 kB (backlog: 16 kB), of which repetitions compress; the table "
                "with its three indexes",
                f"the backlog has {aggregates:,} aggregates, the others 20,000; the index is "
                "RocksDB's folder of both shards, its logs included",
            ],
        ),
    ]


def _disk(disk: Mapping[str, int], events: Mapping[str, int]) -> list[str]:
    stored = max(1, events["stored"])
    return [
        f"{disk['topic_bytes'] / stored:.0f}",
        f"{disk['table_bytes'] / stored:.0f}",
        f"{disk['index_bytes'] / 1e6:,.1f} MB",
    ]


def _range(values: Iterable[float], unit: Callable[[float], str]) -> str:
    found = sorted(values)
    return unit(found[0]) if found[0] == found[-1] else f"{unit(found[0])} to {unit(found[-1])}"


def _lost(name: str, verdict: Mapping[str, int]) -> list[str]:
    return [name, f"{count(verdict['lost'])} lost", f"of {count(verdict['stored'])} events"]


def _facts(name: str, facts: Mapping[str, float]) -> list[str]:
    p50, p99, highest = _waited(facts)
    return [name, f"p50 {p50}", f"p99 {p99}, highest {highest}"]


def _sum_drain(result: Result) -> list[list[str]]:
    return [
        [
            name,
            f"{count(one['rate'])} events/s",
            f"{count(one['lowest'])} to {count(one['highest'])}; from start "
            f"{count(one['rate_from_start'])}",
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
            f"{one['cpu_percent_of_the_publisher']:.1f}% of a core",
            f"{one['queries_per_second']:.1f} queries/s",
        ]
        for name, one in result["publishers"].items()
    ]


def _sum_sizing(result: Result) -> list[list[str]]:
    lines = []
    for name, one in result["publishers"].items():
        rate, run = max(one["rates"].items(), key=lambda item: float(item[0]))
        own = cpu_of_publisher(run["steady"]["cpu_seconds"]) / run["steady"]["seconds"]
        lines.append(
            [
                f"{name}, {float(rate):,.0f} events/s",
                f"{own:.2f} cores, {_memory(run['peak_rss_mb']):,} MB (RSS)",
                f"p99 {seconds(run['latency']['at_once'].get('p99'))}",
            ]
        )
    return lines


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
    "sizing": _sum_sizing,
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
    "sizing": _sizing,
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
        case "sizing":
            checked = {
                f"{name}, {rate}/s": one
                for name, parts in result["publishers"].items()
                for rate, one in parts["rates"].items()
            }
        case "restart":
            checked = {"restart": result}
    return [
        f"{result['case']}, {name}: lost {v['lost']}, repeated {v['repeated']}, "
        f"out of order {v['out_of_order']}"
        for name, one in checked.items()
        if (v := one["verdict"])["lost"] or v["repeated"] or v["out_of_order"] or v["unknown"]
    ]
