"""The commands: what each takes from the command line and how it shows its answer."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from eventpub.cli.options import Request, agrees, configured, is_somebody_there, reports
from eventpub.cli.output import DONE, NO, Report
from eventpub.words import counted, named_versions

if TYPE_CHECKING:
    from rich.console import Console

    from eventpub.errors import Check

_STORE = ("store.url", "store.table")
_SINK = ("sink.bootstrap_servers", "sink.topic")
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
    loaded = request.load(otherwise=_NEEDLESS_TO_MIGRATE)
    from eventpub import store

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
    loaded = request.load(otherwise=_NEEDLESS_TO_MIGRATE | {"store.url": placeholder})
    if loaded.origins.get("store.url") == "default":
        dialect = dialect or "mysql"
    from eventpub import store

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
@configured("app.id", "app.state_dir", *_STORE, *_SINK, "spark.shards", "ops.log")
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
        text=lambda console: _show_checks(console, checks, summary),
        status=unreachable.exit_status if unreachable else (NO if wrong else DONE),
        error=unreachable,
    )


def _show_checks(console: Console, checks: list[Check], summary: str) -> None:
    from rich.text import Text

    from eventpub.terminal import for_people

    styles = {"ok": "green", "warn": "yellow", "wrong": "bold red", "skipped": "dim"}
    for check in checks:
        shown = "-" if check.status == "skipped" else check.status
        line = Text(f"{shown:>5}  ", style=styles[check.status])
        line.append(for_people(f"{check.name}: {check.message}"), style="default")
        if check.code and check.status != "ok":
            line.append(f"  [{check.code}]", style="dim")
        console.print(line)
        if check.suggestion and check.status != "ok":
            for row in for_people(check.suggestion).splitlines():
                console.print(Text(f"       {row}", style="cyan"))
    console.print(summary, markup=False)


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
    "spark.master",
    "spark.shards",
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


@click.group()
def gaps() -> None:
    """List missing versions, or act on one.

    A hold is an aggregate that waits for a missing version. A skip is a gap that was given up.
    """


@gaps.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="Show at most so many holds, and so many skips.",
)
@reports
@configured("app.id", "app.state_dir", *_SINK, "ops.log")
def gaps_list(request: Request, limit: int) -> Report:
    """List aggregates that wait for a version (holds), and versions that were given up (skips).

    When no publisher runs: as the last one has left them. Exit status 1 while any aggregate waits.
    """
    loaded = request.load()
    from eventpub.cli.status import KINDS
    from eventpub.ops.gaps import find, with_times

    found = find(loaded.config, limit)
    missing = sum(still for _, still in found.skipped)
    summary = counted(found.open_count, "aggregate is held", "aggregates are held") + ", "
    if found.unread is None:
        recorded = counted(found.skipped_count, "skip is recorded", "skips are recorded")
        of = "" if found.skipped_count <= limit else f" of the last {limit}"
        summary += f"{recorded} ({missing}{of} still missing)"
    else:
        why = f"{found.unread.code}: {found.unread.message}"
        summary += f"the recorded skips cannot be read: {why}"
    if found.requests:
        waiting = counted(len(found.requests), "request waits", "requests wait")
        summary += f", {waiting} for a publisher"
    if found.kind != "running":
        summary += f"; {KINDS[found.kind]}"
    result = {
        "running": found.kind == "running",
        "kind": found.kind,
        "open": [with_times(hold) for hold in found.open],
        "open_count": found.open_count,
        "skipped": found.skips(),
        "skipped_count": found.skipped_count,
        "requests": [_request(request) for request in found.requests],
    }
    return Report(
        "gaps list",
        not found.open_count and found.unread is None,
        summary,
        result,
        text=lambda console: _show_gaps(console, result, summary),
        status=None if found.unread is None else found.unread.exit_status,
        error=found.unread,
    )


def _show_gaps(console: Console, result: dict[str, Any], summary: str) -> None:
    from eventpub.cli.terminal import Rows

    columns = {
        "open": ("aggregate_id", "first_missing", "seen", "first_seen", "attempts", "next_attempt"),
        "skipped": (
            "aggregate_id", "from_version", "to_version", "skipped_at", "reason", "still_missing",
        ),
        "requests": ("id", "action", "aggregate_id", "from_version", "to_version"),
    }  # fmt: skip
    for kind, names in columns.items():
        if result[kind]:
            headings = [name.replace("_", " ") for name in names]
            rows = [[_word(entry[name]) for name in names] for entry in result[kind]]
            console.print(Rows(headings, rows, kind))
    console.print(summary, markup=False)


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


_later = click.option(
    "--later", is_flag=True, help="If no publisher is running, keep the request for the next one."
)


@gaps.command("retry")
@click.argument("aggregate_id")
@_later
@reports
@configured("app.id", "app.state_dir", "ops.log")
def gaps_retry(request: Request, aggregate_id: str, later: bool) -> Report:
    """Look up an aggregate's missing versions now, whether they are waited for or were skipped.

    Exit status 1 if they are still missing, or nobody has looked; 0 if none is missing any more.
    """
    loaded = request.load()
    from eventpub.ops.gaps import act

    answer = act(loaded.config, "retry", aggregate_id, later=later)
    return _acted("retry", aggregate_id, answer, "")


@gaps.command("skip")
@click.argument("aggregate_id")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_later
@reports
@configured("app.id", "app.state_dir", "ops.log")
def gaps_skip(request: Request, aggregate_id: str, yes: bool, later: bool) -> Report:
    """Skip an aggregate's missing versions now. Records the skip; later versions are published."""
    loaded = request.load()
    from eventpub.ops.gaps import Answer, act, given_up
    from eventpub.state import StateDir

    gap = given_up(loaded.config, aggregate_id)
    if gap is None:
        return _acted("skip", aggregate_id, Answer("nothing is held"), "")
    named = named_versions(*gap)
    if not (later or StateDir(loaded.config.app.state_dir).is_running()):
        return _acted("skip", aggregate_id, Answer("not running"), named, gap)
    if not (yes or agrees(f"{aggregate_id}: give up {named}?")):
        return _acted("skip", aggregate_id, Answer("not confirmed"), named, gap)
    answer = act(loaded.config, "skip", aggregate_id, gap, later=later)
    return _acted("skip", aggregate_id, answer, named, gap)


@gaps.command("cancel")
@click.argument("request_or_aggregate_id")
@reports
@configured("app.id", "app.state_dir", "ops.log")
def gaps_cancel(request: Request, request_or_aggregate_id: str) -> Report:
    """Withdraw requests kept by --later. One by its id, or all of an aggregate."""
    loaded = request.load()
    from eventpub.ops.gaps import cancel

    cancelled = [_request(r) for r in cancel(loaded.config, request_or_aggregate_id)]
    withdrawn = counted(len(cancelled), "request was withdrawn", "requests were withdrawn")
    done = withdrawn if cancelled else "no request waits"
    summary = f"{request_or_aggregate_id}: {done}"
    return Report("gaps cancel", bool(cancelled), summary, {"cancelled": cancelled})


def _request(request: Any) -> dict[str, Any]:
    return {
        "id": request.id,
        "action": request.action,
        "aggregate_id": request.aggregate_id,
        "from_version": request.version,
        "to_version": request.to_version,
    }


def _acted(
    action: Literal["retry", "skip"],
    aggregate_id: str,
    answer: Any,
    named: str,
    gap: tuple[int, int] | None = None,
) -> Report:
    wait = f"gaps cancel {answer.request.id}" if answer.request else ""
    words = {
        "skipped": f"skipped, {named}" if named else "skipped",
        "changed": f"not done: more is missing by now than {named}",
        "kept": f"kept for the next publisher that runs; eventpub {wait} withdraws it",
        "not running": "not done: no publisher is running; --later keeps it for the next one",
        "not confirmed": f"not done: it would give up {named}; --yes does it",
        "no answer": "the publisher did not answer in time; the request was withdrawn, unless"
        " already under way: eventpub gaps list shows the outcome",
    }
    summary = f"{aggregate_id}: {words.get(answer.outcome, answer.outcome)}"
    result: dict[str, Any] = {"aggregate_id": aggregate_id, "outcome": answer.outcome}
    if gap is not None:
        result |= {"from_version": gap[0], "to_version": gap[1]}
    if answer.request is not None:
        result["request"] = answer.request.id
    return Report(f"gaps {action}", answer.is_done, summary, result)


@click.group()
def config() -> None:
    """Check the configuration, or show what is in effect."""


@config.command("check")
@reports
@configured()
def config_check(request: Request) -> Report:
    """Validate the configuration.

    It does not connect to the database or the brokers; with OIDC it requests a token.
    """
    loaded = request.load()
    from eventpub import settings, sink
    from eventpub.store.connection import connect_arguments

    url = connect_arguments(loaded.config.store)
    for name in ("ssl_ca", "ssl_cert", "ssl_key"):
        settings.check_files({"store.url": url.get(name)})
    of_channel = ("certificate_file", "key_file", "ca_file")
    channel = loaded.config.channel
    settings.check_files({f"channel.{name}": getattr(channel, name) for name in of_channel})
    sink.check_properties(loaded.config.sink, loaded.config.app.id)
    where = str(loaded.file) if loaded.file else "environment and flags"
    return Report("config check", True, f"the configuration ({where}) is valid")


@config.command("show")
@reports
@configured()
def config_show(request: Request) -> Report:
    """Show each value and where it came from. Secrets are masked."""
    loaded = request.load()
    from eventpub import settings

    values = settings.shown(loaded)
    result: dict[str, Any] = {
        key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()
    }
    return Report(
        "config show",
        True,
        counted(len(values), "key"),
        {"file": str(loaded.file) if loaded.file else None, "keys": result},
        text=lambda console: _show_keys(console, result),
    )


def _show_keys(console: Console, keys: dict[str, Any]) -> None:
    import json

    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("key", "value", "from"):
        table.add_column(heading, overflow="fold")
    for name, entry in keys.items():
        value = "" if entry["value"] is None else json.dumps(entry["value"], ensure_ascii=False)
        stated = entry["origin"] != "default"
        table.add_row(
            Text(name, style="bold" if stated else ""),
            Text(value),
            Text(entry["origin"], style="" if stated else "dim"),
        )
    console.print(table)


@click.command()
@click.option(
    "--seconds", type=click.FloatRange(1), help="Stop after so many seconds; default: at Ctrl-C."
)
@click.option(
    "--rate", type=click.IntRange(1), default=500, show_default=True, help="Events/s to write."
)
@click.option("--keep", type=click.Path(), metavar="DIR", help="Keep data and logs in this folder.")
@reports
def demo(seconds: float | None, rate: int, keep: str | None) -> Report:
    """See it work on this machine. Starts MariaDB, Kafka, writers and publisher; then verifies."""
    from eventpub.cli import demo_run

    sys.stdout.flush()
    return demo_run.run_demo(seconds=seconds, rate=rate, keep=keep)
