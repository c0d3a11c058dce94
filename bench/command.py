"""The command `eventpub bench`: measurements on servers of its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from click.core import ParameterSource

from eventpub.cli.options import reports
from eventpub.cli.output import Report
from eventpub.errors import ConfigError

_ALL = ("article", "drain", "growth", "idle", "latency", "bursts", "restart", "large", "sizing")
_OF_CASES = {
    "rates": ("article", "latency", "large", "sizing"),
    "rounds": ("drain", "growth", "restart"),
    "debezium": ("drain",),
}
"""Options that the help of other cases does not show: they do nothing there."""


def _numbers(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    """Numbers with commas between; ``1_000`` is one, too."""
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1000,6000")
    return numbers


def _sized(command: Callable[..., Any], case: str | None = None) -> Callable[..., Any]:
    """Add the options of a case; None: of all cases."""
    hidden = {name: case not in {None, *cases} for name, cases in _OF_CASES.items()}
    for option in (
        click.option("--quick", is_flag=True, help="Small sizes: about four minutes."),
        click.option(
            "--scale",
            type=click.FloatRange(0, min_open=True),
            default=1.0,
            show_default=True,
            help="Multiplies numbers of events and seconds.",
        ),
        click.option(
            "--rates",
            callback=_numbers,
            metavar="N,N,…",
            hidden=hidden["rates"],
            help="Events/s (article, latency, sizing), rows/s (large: the first number).",
        ),
        click.option(
            "--rounds",
            type=click.IntRange(1),
            default=3,
            show_default=True,
            hidden=hidden["rounds"],
            help="Number of runs (drain, growth) or of kills (restart).",
        ),
        click.option(
            "--debezium/--no-debezium",
            default=True,
            hidden=hidden["debezium"],
            help="Whether drain measures Debezium, too.",
        ),
        _out,
        reports,
    ):
        command = option(command)
    return command


_out = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("docs/bench"),
    show_default=True,
    help="Folder of results, plots and page. Results that it has are overwritten, case by case.",
)


@click.group(invoke_without_command=True)
@_sized
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> Report | None:
    """Measure on this machine. Starts MySQL, Kafka, writers, the publisher and a reader.

    Without a command it runs all cases, about an hour and a half; with --quick it takes minutes.
    It prints tables and writes to --out: CASE.json for each case, plots, and index.html, a page of
    all results in the folder. It warns where some of them are of another commit. The default is
    docs/bench below the current folder, in a clone the page of the documentation.
    """
    if context.invoked_subcommand is not None:
        for name in options:
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                flag = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{flag} belongs behind {context.invoked_subcommand}")
        return None
    return _measure(_ALL, **options)


def _case(name: str, text: str) -> None:
    def command(**options: Any) -> Report:
        return _measure((name,), **options)

    command.__doc__ = text
    if name == "growth":
        for flag, what in (
            ("--sizes", "Numbers of rows in the table."),
            ("--aggregates", "Numbers of aggregates."),
            ("--shards", "Values of run.shards."),
            ("--pages", "Values of read.page_rows."),
        ):
            command = click.option(flag, callback=_numbers, metavar="N,N,…", help=what)(command)
    bench.command(name)(_sized(command, name))


_case(
    "article",
    "What a poller loses and eventpub finds. 6,000, then 16,000 events/s, some committed late.",
)
_case("drain", "Publish a backlog of 1,000,000 events. Compared with a raw pipe and Debezium.")
_case("growth", "Backlogs by table size, aggregates, shards and page size.")
_case("idle", "CPU and queries with nothing to publish.")
_case("latency", "Latency to the consumer at 100 to 16,000 events/s.")
_case("bursts", "Bursts, hot keys, and one aggregate with 1,000,000 events.")
_case("restart", "How long it takes to recover from kill -9 under load.")
_case(
    "large",
    "Latency of transactions of 3,000 rows, a tenth held open.",
)
_case("sizing", "CPU, memory and disk by rate, with Spark and without. About eight minutes.")


@bench.command("report")
@_out
@reports
def report(out: Path) -> Report:
    """Make table, plots and page again from existing results."""
    main = _module("main")
    results: list[dict[str, Any]] = main.draw(out, _say)
    return _answer(results, out)


def _measure(cases: tuple[str, ...], **options: Any) -> Report:
    main = _module("main")
    out: Path = options.pop("out")
    results = main.run(cases, main.Plan(**options), out, _say)
    return _answer(results, out)


def _answer(results: list[dict[str, Any]], out: Path) -> Report:
    tables = _module("tables")
    wrong = [fault for result in results for fault in tables.faults(result)]
    summary = "; ".join(wrong) or (
        f"{', '.join(result['case'] for result in results)}: nothing lost, repeated or out of order"
        f" with the defaults; see {out / 'index.html'}"
    )

    source = click.get_current_context().get_parameter_source("as_json")
    if source is not ParameterSource.COMMANDLINE:
        for result in results:
            from eventpub.cli.terminal import console

            tables.show(console(), result)
    return Report(not wrong, summary, {r["case"]: r for r in results})


def _say(text: str) -> None:
    print(f"eventpub: {text}", file=sys.stderr, flush=True)


def _module(name: str) -> ModuleType:
    """A module of the bench; most import what only its extra installs.

    Raises:
        ConfigError: bench.extra_missing
    """
    if importlib.util.find_spec("psutil") is None:
        raise ConfigError(
            "bench.extra_missing",
            "the bench needs psutil, which the extra 'bench' installs",
            where="eventpub[bench]",
            suggestion="pip install -e '.[bench]'",
        )
    return importlib.import_module(f"bench.{name}")
