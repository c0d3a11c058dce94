"""The tables of docs/measured.md and docs/sizing.md, from the results in docs/bench/*.json.

    python -m bench.documents             prints them
    python -m bench.documents --write     writes them into the two pages

In a page a table stands between ``<!-- bench: NAME -->`` and ``<!-- /bench -->``. NAME is a case,
whose first table it is (all are in docs/bench/index.html), or one of `PARTS`. A test compares the
pages with the results.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from . import report
from .tables import Result, ResultTable, command, cpu_of_publisher, load, tables

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("measured.md", "sizing.md")
RECOMMENDED = 'run.engine = "threads"'
"""What the decision table is of: the way for one machine."""
_BLOCK = re.compile(r"(<!-- bench: ([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
_DAY = 86_400


def written(page: str, results: Mapping[str, Result]) -> str:
    """The page with its tables made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{block(found[2], results)}\n{found[3]}", page)


def block(name: str, results: Mapping[str, Result]) -> str:
    """What stands between a pair of marks."""
    case = name.partition("-")[0]
    result = results.get(case)
    if result is None:
        return f"Not measured yet: `eventpub bench {case}`.\n"
    if name in PARTS:
        return f"{_conditions(result)}\n\n{_markdown(PARTS[name](result))}"
    return f"{_conditions(result)}\n\n{_markdown(tables(result)[0])}"


def decision(result: Result) -> ResultTable:
    """What to take for which rate, of the recommended way; memory for a backlog in any case."""
    one = result["publishers"][RECOMMENDED]
    idle, backlog = one["idle"], one["backlog"]
    most = backlog["peak_rss_mb"]["driver"]

    def line(name: str, cores: float, rss: int, topic: str = "–", p99: str = "–") -> list[str]:
        return [
            name,
            f"{max(1, math.ceil(2 * cores))}",
            f"{256 * math.ceil(2 * max(rss, most) / 256):,} MB",
            f"{cores:.3f}" if cores < 0.1 else f"{cores:.2f}",
            f"{rss:,} MB",
            topic,
            p99,
        ]

    rows = [line("0", idle["cpu_percent_of_the_publisher"] / 100, idle["rss_mb"]["driver"])]
    for rate, run in one["rates"].items():
        each = run["disk"]["topic_bytes"] / max(1, run["verdict"]["stored"])
        rows.append(
            line(
                f"{float(rate):,.0f}",
                cpu_of_publisher(run["steady"]["cpu_seconds"]) / run["steady"]["seconds"],
                run["peak_rss_mb"]["driver"],
                f"{each * float(rate) * _DAY / 1e9:,.0f} GB",
                f"{run['latency']['at_once']['p99']:.2f} s",
            )
        )
    cores = cpu_of_publisher(backlog["cpu_seconds"]) / backlog["seconds"]
    rows.append(line(f"a backlog, {backlog['rate']:,}", cores, most))
    return ResultTable(
        "",
        [
            *("events/s", "take: cores", "take: memory", "measured: cores", "memory"),
            *("topic, a day", "p99"),
        ],
        rows,
        [
            "take: twice the measured cores, rounded up; and twice the memory of a backlog, which "
            "each publisher meets at its first start and after an outage, rounded up to a multiple "
            "of 256 MB",
            "topic: one replica, compressed by lz4",
        ],
    )


def disk(result: Result) -> ResultTable:
    """Bytes by event and by aggregate, of the recommended way."""
    one = result["publishers"][RECOMMENDED]
    rows = []
    for rate, run in one["rates"].items():
        stored = max(1, run["verdict"]["stored"])
        sizes = [run["disk"][key] / stored for key in ("topic_bytes", "table_bytes")]
        rows.append([f"{float(rate):,.0f} events/s", *(f"{size:,.0f}" for size in sizes), "–"])
    backlog = one["backlog"]
    sizes = [backlog["disk"][key] / backlog["events"] for key in ("topic_bytes", "table_bytes")]
    each = backlog["disk"]["index_bytes"] / backlog["disk"]["aggregates"]
    rows.append(
        [
            f"a backlog of {backlog['events']:,}",
            *(f"{size:,.0f}" for size in sizes),
            f"{each:,.0f}",
        ]
    )
    return ResultTable(
        "",
        [
            *("bytes", "topic, per event", "event table, per event"),
            f"index, per aggregate ({backlog['disk']['aggregates']:,})",
        ],
        rows,
        tables(result)[1].notes[:1],
    )


PARTS: Mapping[str, Callable[[Result], ResultTable]] = {
    "sizing-decision": decision,
    "sizing-disk": disk,
}


def _conditions(result: Result) -> str:
    where = result.get("environment", {})
    return (
        f"`{command(result)}`, {str(where.get('git'))[:7]}, "
        f"{str(where.get('measured_at'))[:10]}, load before: {load(result)}."
    )


def _markdown(table: ResultTable) -> str:
    """The table, its title before it and its notes after it."""
    lines = [f"**{table.title}**", ""] if table.title else []
    lines.append("| " + " | ".join(table.columns) + " |")
    lines.append("|---" + "|---:" * (len(table.columns) - 1) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    notes = ". ".join(note[:1].upper() + note[1:] for note in table.notes)
    if notes:
        lines += ["", notes + "."]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.documents", description=__doc__)
    parser.add_argument("--write", action="store_true", help="into the pages")
    given = parser.parse_args(arguments)
    results = {result["case"]: result for result in report.load(DOCS / "bench")}
    for name in PAGES:
        path = DOCS / name
        page = written(path.read_text(encoding="utf-8"), results)
        if given.write:
            path.write_text(page, encoding="utf-8")
            print(f"written: {path}")
        else:
            print("\n".join(found[0] for found in _BLOCK.finditer(page)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
