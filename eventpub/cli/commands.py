"""`eventpub init`, `migrate`, `doctor`, `run`, `config` and `demo`, and the place of `bench`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import eventpub
from eventpub.cli.options import Request, agrees, configured, is_somebody_there, reports
from eventpub.cli.output import STYLES, Line, Part, Report, Span, Table, facts, notes
from eventpub.errors import ConfigError, counted

if TYPE_CHECKING:
    from eventpub.config import Config
    from eventpub.errors import Check

_STORE = ("store.url", "store.table")
_SINK = ("sink.bootstrap_servers", "sink.topic")
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
@configured(*_STORE, "app.id", "sink.topic", "sink.bootstrap_servers", "ops.log", loads=False)
def init(request: Request, url: str | None, output: Path, force: bool) -> Report:
    """Write a first eventpub.toml for your database.

    Finds the event table and its columns, recognises those of frameworks, and prints the statement
    that adds what the table lacks. Map other columns by --set store.columns.event_type=NAME. The
    password comes from EVENTPUB_STORE__PASSWORD and is not written. In place of root the file names
    a user eventpub, whose SQL is printed. Exit status 1 if no table is clearly the event table, or
    it cannot be published.
    """
    from eventpub.ops import init as making

    if not force:  # before the configuration, which may lack store.url
        making.require_absent(output)
    if url is not None:
        request.overrides["store.url"] = url
    loaded = request.load(
        defaults={"app.id": "events", "sink.topic": "events"},
        # an existing file is the output, not the base, unless it is named
        reads_file=request.file is not None,
    )
    result = making.init(loaded, output, force=force)
    summary = f"{result['file']} was written, for table {result['table']}"
    if result["framework"]:
        summary += f" of {result['framework']}"
    return Report(True, summary, result, _proposal(result))


def _proposal(result: dict[str, Any]) -> list[Part]:
    def named(columns: dict[str, Any]) -> dict[str, str]:
        return {k: v if isinstance(v, str) else " and ".join(v) for k, v in columns.items()}

    parts: list[Part] = [facts(named(result["columns"]))]
    if result["left_out"]:
        parts.append(Line(f"not published: {', '.join(result['left_out'])}"))
    parts += notes(result["notes"])
    for other in result["others"]:
        columns = ", ".join(f"{k} = {v}" for k, v in named(other["columns"]).items())
        parts.append(Line(f"or is it table {other['table']} ({columns})? then:"))
        parts.append(Line((f"  --table {other['table']} --force", "cyan")))
    for heading, texts in (
        ("for the table:", result["statements"]),
        ("an account for it:", result["account"]),
        ("next:", [f"{n}. {step}" for n, step in enumerate(result["next"], 1)]),
    ):
        parts += [Line((heading, "bold"))] if texts else []
        parts += [Line((f"  {text}", "cyan")) for text in texts]
    return parts


@click.command()
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
@click.option("--yes", is_flag=True, help="Alter an existing table without asking.")
@configured(*_STORE, "ops.log", loads=False)
def migrate(request: Request, sql: bool, yes: bool) -> Report:
    """Create the event table, or add what it lacks.

    On a terminal, shows the changes to an existing table and asks first.
    """
    loaded = request.load(defaults=_NEEDLESS_TO_MIGRATE)
    from eventpub.sources.mysql.migrating import migrate, would_execute

    store = loaded.config.store

    def ask(wanted: list[str]) -> None:
        question = "\n".join([*wanted, f"alter {store.table} like this now?"])
        if is_somebody_there() and not (yes or agrees(question)):
            raise _RefusedError

    try:
        statements = would_execute(store) if sql else migrate(store, ask)
    except _RefusedError:
        result: dict[str, Any] = {"table": store.table, "statements": []}
        return Report(False, "not done: nothing was altered", result)
    result = {"table": store.table, "statements": statements}
    text = f"done, {store.table} is ready: {' '.join(statements)}"
    if not statements:
        text = "the event table has all that it needs"
    return Report(True, "\n".join(statements) if sql and statements else text, result)


class _RefusedError(Exception):
    """The operator at the terminal declined."""


@click.command()
@configured("app.id", "app.state_dir", *_STORE, *_SINK, "run.shards", "ops.log", loads=False)
def doctor(request: Request) -> Report:
    """Check your setup and print the fix. Checks everything that `run` needs; changes nothing."""
    config = request.load(logging.WARNING).config  # the checks report what the clients log
    from eventpub.ops import doctor as examination

    checks = examination.examine(config)
    by = {status: [c.name for c in checks if c.status == status] for status in STYLES}
    wrong, made = by["wrong"], len(checks) - len(by["skipped"])
    if wrong:
        are = "is" if len(wrong) == 1 else "are"
        summary = f"{len(wrong)} of {counted(made, 'check')} {are} wrong: {', '.join(wrong)}"
        summary += "; others depend on them" if by["skipped"] else ""
    else:
        summary = f"{counted(len(checks), 'check')}, nothing wrong"
        summary += f", {counted(len(by['warn']), 'warning')}" if by["warn"] else ""
    unreachable = examination.unreachable(checks)
    return Report(
        not wrong,
        summary,
        {"checks": [vars(c) for c in checks]},
        [part for check in checks for part in _parts_of(check)],
        status=unreachable.exit_status if unreachable else None,
        error=unreachable,
    )


def _parts_of(check: Check) -> list[Part]:
    shown = "-" if check.status == "skipped" else check.status
    line: list[Span] = [(f"{shown:>5}  ", STYLES[check.status]), f"{check.name}: {check.message}"]
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
def run(config: Config, available_now: bool) -> Report:
    """Publish until SIGTERM or Ctrl-C."""
    from eventpub.cli import live

    return live.publish(config, available_now=available_now)


@click.group()
def config() -> None:
    """Check the configuration, or show what is in effect."""


@config.command("check")
@configured(loads=False)
def config_check(request: Request) -> Report:
    """Validate the configuration.

    It does not connect to the database or the brokers; with OIDC it requests a token.
    """
    loaded = request.load()
    from eventpub.config_values import read_file
    from eventpub.sink.client import check_properties
    from eventpub.sources.mysql.connection import connect_arguments

    url = connect_arguments(loaded.config.store)
    for name in ("ssl_ca", "ssl_cert", "ssl_key"):
        if (file := url.get(name)) is not None:
            read_file(Path(file), "store.url")
    check_properties(loaded.config.sink, loaded.config.app.id)
    where = str(loaded.file) if loaded.file else "environment and flags"
    return Report(True, f"the configuration ({where}) is valid")


@config.command("show")
@configured(loads=False)
def config_show(request: Request) -> Report:
    """Show each value and where it came from. Secrets are masked."""
    loaded = request.load()
    from eventpub.settings import effective

    values, origins = effective(loaded.config), loaded.origins
    rows = [
        (name, "" if value is None else json.dumps(value, ensure_ascii=False), origins[name])
        for name, value in values.items()
    ]
    result = {name: {"value": v, "origin": origins[name]} for name, v in values.items()}
    return Report(
        True,
        counted(len(values), "key"),
        {"file": str(loaded.file) if loaded.file else None, "keys": result},
        [Table(("key", "value", "from"), rows)],
    )


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
