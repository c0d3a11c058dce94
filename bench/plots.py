"""Results as plots, by matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .tables import Result
from .words import PROCESSES

BLUE, ORANGE, GREEN, RED, GREY, SKY = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00"),
    *("#8A8A8A", "#56B4E9"),
)
"""Told apart by colour-blind people, too (Okabe and Ito)."""
_COLOURS = {
    "eventpub": BLUE,
    "with recount and watermark": BLUE,
    "with backtrack": ORANGE,
    "window only": RED,
    "timestamp poller": GREY,
    "raw pipe": GREY,
    "Debezium": ORANGE,
    "delay 1s, watermark off": ORANGE,
    "delay 50ms, watermark": BLUE,
}
_PROCESSES = {
    "driver": SKY,
    "jvm": BLUE,
    "workers": GREEN,
    "raw pipe": "#B8B8B8",
    "connect": ORANGE,
    "database": "#CC79A7",
    "broker": "#F0E442",
}
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def plots(result: Result) -> dict[str, Figure]:
    """The figures of one case by the name of their file; none where a table says it all."""
    draw = _PLOTS.get(result["case"])
    return draw(result) if draw else {}


def _figure(rows: int = 1, columns: int = 1, *, size: tuple[float, float]) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, grid


def _bars(axes: Any, values: Mapping[str, float], *, label: str, text: Any = None) -> None:
    """Horizontal bars, the first one on top, each with its number."""
    names = list(values)
    places = range(len(names))
    colours = [_COLOURS.get(name, BLUE) for name in names]
    axes.barh(places, list(values.values()), color=colours, height=0.62)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(_THOUSANDS)
    axes.set_xlim(0, max([*values.values(), 1]) * 1.18)
    for place, value in zip(places, values.values(), strict=True):
        axes.annotate(
            (text or (lambda v: f"{v:,.0f}"))(value),
            (value, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )


def _article(result: Result) -> dict[str, Figure]:
    columns = result["columns"]
    lost, grid = _figure(size=(8, 0.7 + 0.55 * len(columns)))
    _bars(grid[0][0], {n: c["verdict"]["lost"] for n, c in columns.items()}, label="events lost")
    total = max(c["verdict"]["stored"] for c in columns.values())
    grid[0][0].set_title(f"Events that never reach the topic, of {total:,}", loc="left")

    lag, grid = _figure(size=(9, 4.2))
    axes = grid[0][0]
    for name, one in columns.items():
        series = one["over_time"]
        axes.plot(
            series["seconds"], series["p99"], color=_COLOURS.get(name), label=name, linewidth=1.8
        )
    elapsed = 0.0
    for phase in result["settings"]["phases"]:
        axes.axvline(elapsed, color="#BBBBBB", linewidth=1)
        axes.annotate(
            f" {phase['rate']:,.0f} events/s",
            (elapsed, 1.0),
            xycoords=("data", "axes fraction"),
            va="top",
            color="#666666",
        )
        elapsed += phase["seconds"]
    axes.set_xlabel("seconds since the first event")
    axes.set_ylabel("p99 of the events created in a second, s")
    axes.set_ylim(0)
    axes.set_title("Lag of events that are committed at once", loc="left", pad=14)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.93))
    return {"article-lost": lost, "article-lag": lag}


def _drain(result: Result) -> dict[str, Figure]:
    medians = result["medians"]
    rates, grid = _figure(size=(8, 0.9 + 0.6 * len(medians)))
    axes = grid[0][0]
    _bars(axes, {n: m["rate"] for n, m in medians.items()}, label="events/s, exactly once")
    for place, name in enumerate(medians):
        own = [run["rate"] for run in result["runs"] if run["what"] == name]
        axes.plot(own, [place + 0.2] * len(own), "o", color="black", markersize=4, alpha=0.6)
    highest = max(m["highest"] for m in medians.values())
    axes.set_xlim(0, highest * 1.18)
    axes.set_title(
        f"Draining {result['settings']['events']:,} events: medians, and each run as a dot",
        loc="left",
    )

    cpu, grid = _figure(size=(8, 1.3 + 0.6 * len(medians)))
    axes = grid[0][0]
    left = dict.fromkeys(medians, 0.0)
    for group, colour in _PROCESSES.items():
        values = [m["cpu"].get(group, 0.0) for m in medians.values()]
        if not any(values):
            continue
        axes.barh(
            list(medians),
            values,
            left=list(left.values()),
            color=colour,
            label=PROCESSES.get(group, group),
            height=0.62,
        )
        left = {n: x + v for (n, x), v in zip(left.items(), values, strict=True)}
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("CPU seconds per million events, without starts")
    axes.set_title("Where the CPU time goes", loc="left")
    axes.legend(
        frameon=False,
        ncols=7,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.3),
        columnspacing=1.2,
        handlelength=1.2,
    )

    over_time, grid = _figure(size=(9, 4))
    axes = grid[0][0]
    for name in medians:
        own = [run for run in result["runs"] if run["what"] == name]
        for number, run in enumerate(own):
            first = run["first_visible_seconds"]
            base = run["growth"][0][1]
            axes.step(
                [t - first for t, _ in run["growth"] if t >= first],
                [n - base for t, n in run["growth"] if t >= first],
                where="post",
                color=_COLOURS.get(name),
                label=name if number == 0 else None,
                linewidth=1.6,
                alpha=0.85,
            )
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.set_xlabel("seconds since the first visible event")
    axes.set_ylabel("events visible")
    axes.set_title("What a read_committed consumer can see", loc="left")
    axes.legend(frameon=False, loc="lower right")
    return {"drain-rates": rates, "drain-cpu": cpu, "drain-progress": over_time}


def _short(number: float) -> str:
    """``50M``, ``20k``."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"


def _growth(result: Result) -> dict[str, Figure]:
    figure, grid = _figure(2, 2, size=(10, 7))
    drained = _short(result["settings"]["drained"])
    parts = [
        ("by_size", "rows", "rows in the store", "rate", "events/s"),
        ("by_aggregates", "aggregates", "aggregates", "rate", "events/s"),
        ("by_shards", "shards", "shards", "rate", "events/s"),
        ("by_page", "page_rows", "rows of a page (read.page_rows)", "page_seconds", "s a page"),
    ]
    for axes, (key, x, label, y, heading) in zip(grid.flat, parts, strict=True):
        known = [run for run in result[key] if run[y] is not None]
        at = [run[x] for run in known]
        highest = max([run[y] for run in known], default=1)
        axes.plot(at, [run[y] for run in known], "o-", color=BLUE, label="all")
        if key == "by_size":
            more = [run["more"]["rate"] for run in known]
            highest = max([highest, *more])
            axes.plot(at, more, "s--", color=ORANGE, label=f"and then {drained} more")
            axes.legend(frameon=False, loc="lower right", title="drained")
        if known:
            axes.set_xscale("log")
            axes.set_xticks(at, [_short(number) for number in at])
            axes.minorticks_off()
        if y == "rate":
            axes.yaxis.set_major_formatter(_THOUSANDS)
        axes.set_ylim(0, highest * 1.15)
        axes.set_xlabel(label)
        axes.set_ylabel(heading)
    title = f"Draining the rows of a store; number of aggregates, shards, pages: {drained} events"
    figure.suptitle(title, x=0.01, ha="left")
    return {"growth": figure}


def _latency(result: Result) -> dict[str, Figure]:
    figure, grid = _figure(size=(8, 4.2))
    axes = grid[0][0]
    for name, rates in result["publishers"].items():
        at = [float(rate) for rate in rates]
        for percentile, style in (("p50", "o--"), ("p99", "o-")):
            axes.plot(
                at,
                [one["latency"]["at_once"][percentile] for one in rates.values()],
                style,
                color=_COLOURS.get(name),
                label=f"{name}: {percentile}",
            )
    axes.set_xscale("log")
    axes.set_xticks(
        at := [float(r) for r in next(iter(result["publishers"].values()))],
        [f"{rate:,.0f}" for rate in at],
    )
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel("events/s")
    axes.set_ylabel("create_time → consumer, s")
    axes.set_title("Latency at a steady rate", loc="left")
    axes.legend(frameon=False)
    return {"latency": figure}


def _over_time(parts: Mapping[str, Mapping[str, Any]], marks: list[float]) -> Figure:
    figure, grid = _figure(2, len(parts), size=(5.2 * len(parts) + 1, 5.6))
    for number, (name, one) in enumerate(parts.items()):
        series = one["over_time"]
        events, waited = grid[0][number], grid[1][number]
        events.fill_between(series["seconds"], series["events"], color=GREY, step="post", alpha=0.5)
        events.yaxis.set_major_formatter(_THOUSANDS)
        events.set_ylabel("events created in a second")
        events.set_title(name, loc="left", fontsize=10)
        waited.plot(series["seconds"], series["max"], color=SKY, label="max", linewidth=1.2)
        waited.plot(series["seconds"], series["p50"], color=BLUE, label="p50", linewidth=1.8)
        waited.set_ylabel("lag, s")
        waited.set_xlabel("seconds since the first event")
        waited.legend(frameon=False)
        for axes in (events, waited):
            axes.set_ylim(0)
            for mark in marks:
                axes.axvline(mark, color=RED, linewidth=1.2)
    return figure


def _bursts(result: Result) -> dict[str, Figure]:
    return {"bursts": _over_time(result["loads"], [])}


def _restart(result: Result) -> dict[str, Figure]:
    kills = [(kill - result["started_at"]) / 1e6 for kill in result["kill_times"]]
    name = "kill -9 of the whole publisher (red), started again at once"
    figure = _over_time({name: result}, kills)
    figure.set_size_inches(9, 5.6)
    return {"restart": figure}


_PLOTS: dict[str, Callable[[Result], dict[str, Figure]]] = {
    "article": _article,
    "drain": _drain,
    "growth": _growth,
    "latency": _latency,
    "bursts": _bursts,
    "restart": _restart,
}
