"""`eventpub init`, `migrate`, `doctor`, `run`, `config` and `demo`, and the place of `bench`."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import eventpub
from eventpub.cli.options import Request, agrees, configured, is_somebody_there, reports
from eventpub.cli.output import DONE, NO, Line, Part, Report, Span, Table
from eventpub.errors import ConfigError
from eventpub.terminal import counted

if TYPE_CHECKING:
    from eventpub.errors import Check

_STORE = ("store.url", "store.table")
_SINK = ("sink.bootstrap_servers", "sink.topic")
_STYLES = {"ok": "green", "warn": "yellow", "wrong": "bold red", "skipped": "dim"}
_NEEDLESS_TO_MIGRATE = {"app.id": "none", "sink.topic": "none"}


@click.command()
@click.option(
    "--url",
    metavar="URL",
    help="The database, as for --store-url: mysql+pymysql://user@host:3306/database.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("eventpub.toml"),
    show_default=True,
    metavar="FILE",
    help="The file to write.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@configured(
    "store.url", "store.table", "app.id", "sink.topic", "sink.bootstrap_servers", "ops.log",
    texts={"store.table": "The event table; default: the likeliest one."},
)  # fmt: skip
def init(request: Request, url: str | None, output: Path, force: bool) -> Report:
    """Write a first eventpub.toml for your database.

    Finds the event table and its columns, recognises those of frameworks, and prints the statement
    that adds what the table lacks. Map other columns by --set store.columns.event_type=NAME. The
    password comes from EVENTPUB_STORE__PASSWORD and is not written. In place of root the file names
    a user eventpub, whose SQL is printed. Exit status 1 if no table is clearly the event table, or
    it cannot be published.
    """
    from eventpub.ops import init as making

    if not force:
        making.require_absent(output)
    given = dict(request.overrides)
    if url is not None:
        given["store.url"] = url
    # a file that is there already is no base for what is to be written, unless it is named
    asked = replace(request, overrides=given, reads_file=request.file is not None)
    loaded = asked.load(defaults={"app.id": "events", "sink.topic": "events"})
    result = making.init(loaded, output, force=force)
    summary = f"{result['file']} was written, for table {result['table']}"
    if result["framework"]:
        summary += f" of {result['framework']}"
    return Report("init", True, summary, result, _proposal(result))


def _named(name: str | tuple[str, ...]) -> str:
    return name if isinstance(name, str) else " and ".join(name)


def _proposal(result: dict[str, Any]) -> list[Part]:
    parts: list[Part] = [
        Line(f"{ours:>14} = {_named(name)}") for ours, name in result["columns"].items()
    ]
    if result["left_out"]:
        parts.append(Line(f"not published: {', '.join(result['left_out'])}"))
    parts += [Line((f"note: {note}", "yellow")) for note in result["notes"]]
    for other in result["others"]:
        columns = ", ".join(f"{ours} = {_named(name)}" for ours, name in other["columns"].items())
        question = f"or is it table {other['table']} ({columns})? then:"
        parts.append(Line(f"{question} --table {other['table']} --force"))
    steps = [f"{number}. {step}" for number, step in enumerate(result["next"], 1)]
    for heading, lines, style in (
        ("for the table:", result["statements"], "cyan"),
        ("an account for it:", result["account"], "cyan"),
        ("next:", steps, ""),
    ):
        parts += [Line((heading, "bold"))] if lines else []
        parts += [Line((f"  {line}", style)) for line in lines]
    return parts


@click.command()
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
@click.option("--yes", is_flag=True, help="Alter an existing table without asking.")
@configured(*_STORE, "ops.log")
def migrate(request: Request, sql: bool, yes: bool) -> Report:
    """Create the event table, or add what it lacks.

    On a terminal, shows the changes to an existing table and asks first.
    """
    loaded = request.load(defaults=_NEEDLESS_TO_MIGRATE)
    from eventpub.sources.mysql.migrating import migrate, would_execute

    table = loaded.config.store.table

    def ask(wanted: list[str]) -> None:
        question = "\n".join([*wanted, f"alter {table} like this now?"])
        if is_somebody_there() and not (yes or agrees(question)):
            raise _RefusedError

    try:
        statements = (
            would_execute(loaded.config.store) if sql else migrate(loaded.config.store, ask)
        )
    except _RefusedError:
        result = {"table": table, "statements": []}
        return Report("migrate", False, "not done: nothing was altered", result)
    result = {"table": table, "statements": statements}
    if not statements:
        return Report("migrate", True, "the event table has all that it needs", result)
    text = ("\n" if sql else " ").join(statements)
    return Report("migrate", True, text if sql else f"done, {table} is ready: {text}", result)


class _RefusedError(Exception):
    """The operator at the terminal declined."""


@click.command()
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
@configured(
    "app.id", "app.state_dir", *_STORE, "read.start", *_SINK, "run.engine", "run.shards", "ops.log"
)
def run(request: Request, available_now: bool) -> Report:
    """Publish until SIGTERM or Ctrl-C."""
    loaded = request.load()
    from eventpub.cli import live

    return live.publish(loaded.config, available_now=available_now)


@click.group()
def config() -> None:
    """Check the configuration, or show what is in effect."""


@config.command("check")
@configured()
def config_check(request: Request) -> Report:
    """Validate the configuration.

    It does not connect to the database or the brokers; with OIDC it requests a token.
    """
    loaded = request.load()
    from eventpub import settings
    from eventpub.sink.client import check_properties
    from eventpub.sources.mysql.connection import connect_arguments

    url = connect_arguments(loaded.config.store)
    for name in ("ssl_ca", "ssl_cert", "ssl_key"):
        if (file := url.get(name)) is not None:
            settings.read_file(Path(file), "store.url")
    check_properties(loaded.config.sink, loaded.config.app.id)
    where = str(loaded.file) if loaded.file else "environment and flags"
    return Report("config check", True, f"the configuration ({where}) is valid")


@config.command("show")
@configured()
def config_show(request: Request) -> Report:
    """Show each value and where it came from. Secrets are masked."""
    loaded = request.load()
    from eventpub.settings import effective

    values = effective(loaded.config)
    result: dict[str, Any] = {
        key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()
    }
    return Report(
        "config show",
        True,
        counted(len(values), "key"),
        {"file": str(loaded.file) if loaded.file else None, "keys": result},
        parts=[Table(("key", "value", "from"), [_key(n, **shown) for n, shown in result.items()])],
    )


def _key(name: str, value: object, origin: str) -> list[Span]:
    text = "" if value is None else json.dumps(value, ensure_ascii=False)
    is_default = origin == "default"
    return [name if is_default else (name, "bold"), text, (origin, "dim" if is_default else "")]


@click.command()
@click.option("--seconds", type=click.FloatRange(1), help="Seconds to run; default: until Ctrl-C.")
@click.option(
    "--rate", type=click.IntRange(1), default=500, show_default=True, help="Events/s to write."
)
@click.option(
    "--engine",
    type=click.Choice(["spark", "threads"]),
    default="spark",
    show_default=True,
    help="What publishes; threads start faster and need no Java.",
)
@click.option("--keep", type=click.Path(), metavar="DIR", help="Keep data and logs in this folder.")
@reports
def demo(seconds: float | None, rate: int, engine: str, keep: str | None) -> Report:
    """See it work on this machine. Starts MariaDB, Kafka, writers and publisher; then verifies."""
    from eventpub.cli import demo_run

    sys.stdout.flush()
    return demo_run.run_demo(seconds=seconds, rate=rate, engine=engine, keep=keep)


def bench_command() -> click.Command:
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
