"""What `eventpub bench` does: which cases, how large, and where the results go."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eventpub.errors import ConfigError

from . import report
from .article import COLUMNS, article
from .drain import drain
from .growth import growth
from .load import Phase
from .machine import Machine, become_quiet, environment, git_version
from .sizing import ENGINES, sizing
from .steady import DELAYS, bursts, idle, large, latency, restart
from .tables import CASES


@dataclass(frozen=True)
class Plan:
    """How large.

    Attributes:
        scale: of events and seconds; 1 is what the documentation shows.
        quick: all of it as small as it makes sense, in about four minutes.
        rates: events per second of `article`, `latency`, `large` and `sizing`; None: theirs.
        rounds: of `drain` and `growth` (runs of each) and `restart` (kills).
        debezium: run it beside the drain; not in the quick run.
        sizes, aggregates, shards, pages: of `growth`; None: as in the documentation.
    """

    scale: float = 1.0
    quick: bool = False
    rates: tuple[float, ...] | None = None
    rounds: int = 3
    debezium: bool = True
    sizes: tuple[int, ...] | None = None
    aggregates: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    pages: tuple[int, ...] | None = None

    def command(self, case: str) -> str:
        """What measures a case with this plan, as far as it is not the default one."""
        words = ["eventpub bench", case]
        for one in fields(self):
            value, flag = getattr(self, one.name), f"--{one.name}"
            if value == one.default:
                continue
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{one.name}")
            else:
                text = (
                    ",".join(f"{n:.0f}" for n in value) if isinstance(value, tuple) else str(value)
                )
                words += [flag, text]
        return " ".join(words)

    def events(self, number: int) -> int:
        """Scaled, at least 1,000."""
        return max(1_000, round(number * self.scale))

    def seconds(self, number: float) -> float:
        """Scaled, at least 1 s."""
        return max(1.0, number * self.scale)


_ONE = {name: DELAYS[name] for name in ("delay 50ms, watermark",)}
Say = Callable[[str], None]


def run(cases: Sequence[str], plan: Plan, out: Path, say: Say = print) -> list[dict[str, Any]]:
    """Measures the cases one after the other, each on servers of its own, and writes everything.

    A result is written as soon as it is there, over an older one of its case; the page and the
    plots are of all results that `out` has at the end. Before each case the machine has a minute
    to become quiet, but not in the quick run.

    Raises:
        ConfigError: bench.extra_missing.
        LocalError: a server could not be started.
    """
    require_extra()
    announce(cases, out, say)
    results = []
    with ExitStack() as stack:
        shared = stack.enter_context(Machine()) if plan.quick else None
        for case in cases:
            say(f"{case} …")
            where = environment(0.0 if plan.quick else become_quiet())
            with ExitStack() as own:
                binlog = case == "drain" and plan.debezium
                machine = shared or own.enter_context(Machine(binlog=binlog))
                measured = _CASES[case](machine, plan, say)
                result = {"environment": where, "command": plan.command(case), **measured}
            report.save(result, out)
            results.append(result)
    draw(out, say)
    return results


def announce(cases: Sequence[str], out: Path, say: Say) -> None:
    """Says what will be written, and which results of another commit stay beside it."""
    files = ", ".join(f"{case}.json" for case in cases)
    say(f"writes {files}, plots and index.html to {out.absolute()}; older ones are overwritten")
    present = git_version()
    others = {
        result["case"]: str(result.get("environment", {}).get("git"))
        for result in report.load(out)
        if result["case"] not in cases
    }
    mixed = [f"{case} ({commit[:7]})" for case, commit in others.items() if commit != present]
    if mixed:
        say(
            f"warning: {out} also has results of other commits than {present[:7]}: "
            f"{', '.join(mixed)}. The page will show them, each with its commit; measure them "
            "again, or use another --out"
        )


def draw(out: Path, say: Say = print) -> list[dict[str, Any]]:
    """Draws the page and the plots of the results that `out` has; returns them.

    Raises:
        ConfigError: bench.extra_missing, bench.no_results.
    """
    require_extra()
    results = report.load(out)
    if not results:
        raise ConfigError(
            "bench.no_results",
            "there are no results to draw",
            where=str(out),
            suggestion="run eventpub bench first, or name their folder with --out",
        )
    written = report.draw(results, out)
    say(f"written: {', '.join(str(path) for path in written)}")
    if report.is_of_documentation(out):
        say("tables of docs/measured.md and docs/sizing.md: python -m bench.documents --write")
    return results


def require_extra() -> None:
    """Raises ConfigError: bench.extra_missing, before anything is measured."""
    missing = [
        name for name in ("matplotlib", "connectorx") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(
            "bench.extra_missing",
            f"the bench needs {' and '.join(missing)}, which the extra 'bench' installs",
            where="eventpub[bench]",
            suggestion="pip install -e '.[bench]'",
        )


def _article(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        columns = {name: COLUMNS[name] for name in COLUMNS if name != "with backtrack"}
        phases = [Phase(1_000, 5, open_fraction=0.1, open_seconds=2, aggregates=5_000)]
        return article(machine, phases, columns=columns, quiet=6, say=say)
    rates = plan.rates or (6_000, 16_000)
    phases = [Phase(rate, plan.seconds(100), open_fraction=0.1) for rate in rates]
    return article(machine, phases, rows=100, say=say)


def _drain(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        return drain(machine, 150_000, 1, debezium=False, say=say)
    return drain(machine, plan.events(1_000_000), plan.rounds, debezium=plan.debezium, say=say)


def _growth(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        return growth(
            machine,
            drained=150_000,
            sizes=[200_000],
            aggregates=[10_000],
            shards=[],
            pages=[],
            say=say,
        )
    return growth(
        machine,
        drained=plan.events(1_000_000),
        sizes=plan.sizes or [plan.events(n) for n in (1_000_000, 10_000_000, 50_000_000)],
        aggregates=plan.aggregates
        or [plan.events(n) for n in (10_000, 100_000, 1_000_000, 5_000_000)],
        shards=plan.shards or (1, 2, 4),
        pages=plan.pages or (5_000, 20_000, 50_000, 100_000, 200_000),
        rounds=plan.rounds,
        say=say,
    )


def _idle(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        return idle(machine, 4, publishers=_ONE, say=say)
    return idle(machine, plan.seconds(60), say=say)


def _latency(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        return latency(
            machine, plan.rates or (500,), 4, publishers=_ONE, warm_up=2, quiet=3, say=say
        )
    rates = plan.rates or (10, 1_000, 6_000, 16_000)
    return latency(machine, rates, plan.seconds(30), say=say)


def _bursts(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        return bursts(machine, 200, 6, 20_000, every=6, length=1, zipf=False, quiet=4, say=say)
    return bursts(machine, 1_500, plan.seconds(120), plan.events(1_000_000), say=say)


def _restart(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        return restart(machine, 500, 1, calm=4, quiet=3, say=say)
    return restart(machine, 6_000, plan.rounds, say=say)


def _large(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        return large(machine, 3_000, 6, publishers=_ONE, warm_up=2, quiet=4, say=say)
    rate = (plan.rates or (12_000,))[0]
    return large(machine, rate, plan.seconds(60), say=say)


def _sizing(machine: Machine, plan: Plan, say: Say) -> dict[str, Any]:
    if plan.quick:
        engine = 'run.engine = "threads"'
        only = {engine: ENGINES[engine]}
        return sizing(machine, (500,), 4, 20_000, publishers=only, warm_up=2, quiet=3, say=say)
    rates = plan.rates or (1_000, 6_000, 16_000)
    return sizing(machine, rates, plan.seconds(30), plan.events(1_000_000), say=say)


_CASES: dict[str, Callable[[Machine, Plan, Say], dict[str, Any]]] = {
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
assert tuple(_CASES) == CASES
