"""`eventpub migrate`, `doctor`, `run`, `verify` and `demo`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from eventpub.cli.options import Request, agrees, configured, is_somebody_there, reports
from eventpub.cli.output import DONE, NO, Report
from eventpub.cli.parts import Line, Part, Span
from eventpub.terminal import counted

if TYPE_CHECKING:
    from eventpub.errors import Check
from typing import NoReturn

import eventpub
from eventpub.errors import ConfigError

_STORE = ("store.url", "store.table")
_SINK = ("sink.bootstrap_servers", "sink.topic")
_STYLES = {"ok": "green", "warn": "yellow", "wrong": "bold red", "skipped": "dim"}
_NEEDLESS_TO_MIGRATE = {"app.id": "none", "sink.topic": "none"}


@click.command()
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
@click.option(
    "--dialect",
    type=click.Choice(["mysql", "mariadb"]),
    help="With --sql: print what makes the whole table on such a server; look at no database.",
)
@click.option("--yes", is_flag=True, help="Alter an existing table without asking.")
@reports
@configured(*_STORE, "ops.log")
def migrate(
    request: Request, sql: bool, dialect: Literal["mysql", "mariadb"] | None, yes: bool
) -> Report:
    """Create the event table, or what is missing of it.

    On a terminal it shows what it would do to a table that exists, and asks; elsewhere it does it.
    """
    if sql:
        return _print_migration(request, dialect)
    if dialect is not None:
        raise click.UsageError("--dialect goes with --sql")
    loaded = request.load(defaults=_NEEDLESS_TO_MIGRATE)
    from eventpub.sources import mysql as store

    table = loaded.config.store.table

    def ask(wanted: list[str]) -> None:
        question = "\n".join([*wanted, f"alter {table} like this now?"])
        if is_somebody_there() and not (yes or agrees(question)):
            raise _RefusedError

    try:
        statements = store.migrate(loaded.config.store, ask)
    except _RefusedError:
        result = {"table": table, "statements": []}
        return Report("migrate", False, "not done: nothing was altered", result)
    result = {"table": table, "statements": statements}
    if not statements:
        return Report("migrate", True, "the event table has all that it needs", result)
    return Report("migrate", True, f"done, {table} is ready: {' '.join(statements)}", result)


class _RefusedError(Exception):
    """Somebody at the terminal has said no."""


def _print_migration(request: Request, dialect: Literal["mysql", "mariadb"] | None) -> Report:
    """The statements, made for what is there; without a database, those of the whole table."""
    placeholder = "mysql+pymysql://nobody@localhost/none"
    loaded = request.load(defaults=_NEEDLESS_TO_MIGRATE | {"store.url": placeholder})
    if loaded.origins.get("store.url") == "default":
        dialect = dialect or "mysql"
    from eventpub.sources import mysql as store

    statements, has_looked = store.would_execute(loaded.config.store, dialect)
    table = loaded.config.store.table
    result = {"table": table, "statements": statements, "has_looked": has_looked}
    if not statements:
        return Report("migrate", True, "the event table has all that it needs", result)
    text = "\n".join(statements)
    if not has_looked:
        server = "MariaDB" if dialect == "mariadb" else "MySQL"
        text = f"-- no database was looked at: this makes the whole table, on {server}\n{text}"
    return Report("migrate", True, text, result)


@click.command()
@reports
@configured("app.id", "app.state_dir", *_STORE, *_SINK, "run.shards", "ops.log")
def doctor(request: Request) -> Report:
    """Check your setup and print the fix. Checks everything that `run` needs; changes nothing."""
    loaded = request.load(logging.WARNING)  # what the clients log, the checks say
    from eventpub.ops import doctor as examination

    checks = examination.examine(loaded.config)
    wrong = [c for c in checks if c.status == "wrong"]
    warned = sum(c.status == "warn" for c in checks)
    if wrong:
        made = sum(c.status != "skipped" for c in checks)
        are = "is" if len(wrong) == 1 else "are"
        names = ", ".join(c.name for c in wrong)
        summary = f"{len(wrong)} of {counted(made, 'check')} {are} wrong: {names}"
        if made < len(checks):
            summary += "; others depend on them"
    else:
        summary = f"{counted(len(checks), 'check')}, nothing wrong"
        if warned:
            summary += f", {counted(warned, 'warning')}"
    unreachable = examination.unreachable(checks)
    return Report(
        "doctor",
        not wrong,
        summary,
        {"checks": [vars(c) for c in checks]},
        parts=[part for check in checks for part in _parts_of(check)],
        status=unreachable.exit_status if unreachable else (NO if wrong else DONE),
        error=unreachable,
    )


def _parts_of(check: Check) -> list[Part]:
    shown = "-" if check.status == "skipped" else check.status
    line: list[Span] = [(f"{shown:>5}  ", _STYLES[check.status]), f"{check.name}: {check.message}"]
    if check.status == "ok":
        return [Line(*line)]
    if check.code:
        line.append((f"  [{check.code}]", "dim"))
    fix = (check.suggestion or "").splitlines()
    return [Line(*line), *(Line((f"       {row}", "cyan")) for row in fix)]


@click.command()
@click.option(
    "--available-now",
    is_flag=True,
    help="Publish what is in the table now, then stop. Waits until holds are filled or skipped.",
)
@reports
@configured(
    "app.id",
    "app.state_dir",
    *_STORE,
    "read.start",
    "read.delay",
    "read.page_rows",
    "gaps.max_backoff",
    "gaps.late",
    *_SINK,
    "sink.delivery",
    "run.engine",
    "spark.master",
    "run.shards",
    "ops.log",
)
def run(request: Request, available_now: bool) -> Report:
    """Publish until SIGTERM or Ctrl-C."""
    loaded = request.load()
    from eventpub.cli import live

    return live.publish(loaded.config, available_now=available_now)


@click.command()
@click.option(
    "--from",
    "from_",
    metavar="TIME",
    help="Compare events created at or after this (RFC 3339), and read only what is of that time;"
    " default: the publisher's start.",
)
@click.option(
    "--to",
    metavar="TIME",
    help="Compare events created at or before this; default: the publisher's position.",
)
@click.option(
    "--sample",
    metavar="N",
    type=click.IntRange(2, 100_000),
    help="Compare one aggregate in N, chosen by hash, with all its events.",
)
@click.option(
    "--differences",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write all differences to a file, one JSON object a line.",
)
@click.option(
    "--former-partitions",
    metavar="N,N…",
    default="",
    help="How many partitions the topic had before, the first number first;"
    " default: what app.state_dir remembers.",
)
@reports
@configured(
    "app.id",
    "app.state_dir",
    *_STORE,
    *_SINK,
    "read.start",
    "read.delay",
    "ops.log",
    texts={
        "read.start": "As for run: where the publisher's range begins, if its state does not say."
    },
)
def verify(  # noqa: PLR0913 (flags, by keyword)
    request: Request,
    *,
    from_: str | None,
    to: str | None,
    sample: int | None,
    differences: Path | None,
    former_partitions: str,
) -> Report:
    """Compare table and topic. Counts events missing, repeated, out of order, altered, extra.

    And rows of one version beside another ("doubled"). Without --to, also those that should be
    published by now and are not. Exit status 1 if it counts any.
    """
    first = _time(from_, "--from")
    last = _time(to, "--to")
    former = _numbers(former_partitions, "--former-partitions")
    loaded = request.load()
    from eventpub.cli import verdict

    found = verdict.compare(
        loaded.config,
        first=first,
        last=last,
        sample=sample,
        differences=differences,
        former_partitions=former,
    )
    return verdict.report(found)


def _time(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    from eventpub.config import parse_time

    try:
        return parse_time(text)
    except ValueError as e:
        raise click.UsageError(f"{flag} {text}: it must be {e}") from None


def _numbers(text: str, flag: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and 0 < int(part) < 1_000_000 for part in parts):
        raise click.UsageError(f"{flag} {text}: it must be numbers with commas between, as 4,6")
    return [int(part) for part in parts]


@click.command()
@click.option(
    "--seconds", type=click.FloatRange(1), help="Stop after so many seconds; default: at Ctrl-C."
)
@click.option(
    "--rate", type=click.IntRange(1), default=500, show_default=True, help="Events/s to write."
)
@click.option(
    "--engine",
    type=click.Choice(["threads", "spark"]),
    default="threads",
    show_default=True,
    help="What publishes; spark starts slower, and shows its own pages.",
)
@click.option("--keep", type=click.Path(), metavar="DIR", help="Keep data and logs in this folder.")
@reports
def demo(seconds: float | None, rate: int, engine: str, keep: str | None) -> Report:
    """See it work on this machine. Starts MariaDB, Kafka, writers and publisher; then verifies."""
    from eventpub.cli import demo_run

    sys.stdout.flush()
    return demo_run.run_demo(seconds=seconds, rate=rate, engine=engine, keep=keep)


def bench_command() -> click.Command:
    """The bench's own, or in its place one that says where it is."""
    clone = Path(eventpub.__file__).parents[1]
    if (clone / "bench" / "command.py").is_file():
        from bench.command import bench

        return bench

    @click.command("bench", context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1)
    def missing(arguments: tuple[str, ...]) -> NoReturn:
        """Measure on this machine; in a clone of eventpub only."""
        del arguments
        raise ConfigError(
            "bench.not_installed",
            "the bench is not installed with eventpub",
            where=str(clone),
            suggestion="run it in a clone of eventpub: pip install -e '.[bench]'",
        )

    return missing
