"""The commands: what each takes from the command line and how it shows its answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import click

from eventpub.cli.options import Request, configured, reports
from eventpub.cli.output import DONE, NO, Report

if TYPE_CHECKING:
    from rich.console import Console

    from eventpub.errors import Check

_STORE = ("store.url", "store.table")
_SINK = ("sink.bootstrap_servers", "sink.topic")


@click.command()
@click.option("--sql", is_flag=True, help="Print the statements instead of running them.")
@reports
@configured(*_STORE, "ops.log")
def migrate(request: Request, sql: bool) -> Report:
    """Create the event table, or what is missing of it."""
    loaded = request.load()
    from eventpub import store

    statements = store.migrate(loaded.config.store, sql=sql)
    result = {"table": loaded.config.store.table, "statements": statements}
    if not statements:
        return Report("migrate", True, "the event table lacks nothing", result)
    if sql:
        return Report("migrate", True, "\n".join(statements), result)
    done = f"done: {len(statements)} statements, the event table is ready"
    return Report("migrate", True, done, result)


@click.command()
@reports
@configured("app.id", "app.state_dir", *_STORE, *_SINK, "spark.shards", "ops.log")
def doctor(request: Request) -> Report:
    """Check everything that `run` needs, and say how to mend what is wrong."""
    loaded = request.load()
    from eventpub.ops import doctor as examination

    checks = examination.examine(loaded.config)
    wrong = [c for c in checks if c.status == "wrong"]
    warned = sum(c.status == "warn" for c in checks)
    if wrong:
        summary = f"{len(wrong)} of {len(checks)} checks are wrong: " + ", ".join(
            c.name for c in wrong
        )
    else:
        summary = f"{len(checks)} checks, nothing wrong" + (
            f", {warned} worth a look" if warned else ""
        )
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

    from eventpub.masking import mask

    styles = {"ok": "green", "warn": "yellow", "wrong": "bold red"}
    for check in checks:
        line = Text(f"{check.status:>5}  ", style=styles[check.status])
        line.append(mask(f"{check.name}: {check.message}"), style="default")
        if check.code and check.status != "ok":
            line.append(f"  [{check.code}]", style="dim")
        console.print(line)
        if check.suggestion and check.status != "ok":
            for row in mask(check.suggestion).splitlines():
                console.print(Text(f"       {row}", style="cyan"))
    console.print(summary, markup=False)


@click.command()
@click.option(
    "--available-now", is_flag=True, help="Publish what there is at the start, then stop."
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
    """Publish, until a signal asks to stop."""
    loaded = request.load()
    from eventpub.cli import live

    return live.publish(loaded.config, available_now=available_now)


@click.command()
@click.option("--from", "from_", metavar="TIME", help="Events created at or after, RFC 3339.")
@click.option("--to", metavar="TIME", help="Events created at or before; default: as published.")
@reports
@configured("app.id", "app.state_dir", *_STORE, *_SINK, "read.start", "read.delay", "ops.log")
def verify(request: Request, from_: str | None, to: str | None) -> Report:
    """Compare store and topic: missing, repeated, out of order, altered, extra."""
    first = _time(from_, "--from")
    last = _time(to, "--to")
    loaded = request.load()
    from eventpub.cli import verdict

    return verdict.report(verdict.compare(loaded.config, first=first, last=last))


def _time(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    from eventpub.config import parse_time

    try:
        return parse_time(text)
    except ValueError as e:
        raise click.UsageError(f"{flag} {text}: it must be {e}") from None


@click.group()
def gaps() -> None:
    """Versions that are missing: open holds and recorded skips."""


@gaps.command("list")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Of each.")
@reports
@configured("app.id", "app.state_dir", *_SINK, "ops.log")
def gaps_list(request: Request, limit: int) -> Report:
    """Show the open holds, longest first, and the recorded skips, latest first."""
    loaded = request.load()
    from eventpub.ops.gaps import find

    found = find(loaded.config)
    missing = sum(still for _, still in found.skipped)
    summary = (
        f"{len(found.open)} aggregates are held, {len(found.skipped)} skips are recorded"
        f" ({missing} still missing)"
    )
    held = [vars(hold) for hold in found.open[:limit]]
    skipped = [vars(gap) | {"still_missing": still} for gap, still in found.skipped[:limit]]
    result = {
        "open": [_with_times(hold) for hold in held],
        "open_count": len(found.open),
        "skipped": [_with_times(gap) for gap in skipped],
        "skipped_count": len(found.skipped),
    }
    return Report(
        "gaps list",
        not found.open,
        summary,
        result,
        text=lambda console: _show_gaps(console, result, summary),
    )


def _with_times(fields: dict[str, Any]) -> dict[str, Any]:
    from eventpub.config import format_time

    times = {"first_seen", "next_attempt", "since", "skipped_at"}
    return {k: format_time(v) if k in times else v for k, v in fields.items()}


def _show_gaps(console: Console, result: dict[str, Any], summary: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from eventpub.masking import mask

    columns = {
        "open": ("aggregate_id", "first_missing", "seen", "first_seen", "attempts", "next_attempt"),
        "skipped": (
            "aggregate_id", "from_version", "to_version", "skipped_at", "reason", "still_missing",
        ),
    }  # fmt: skip
    for kind, names in columns.items():
        if not result[kind]:
            continue
        table = Table(title=kind, title_justify="left", box=None, pad_edge=False)
        for name in names:
            table.add_column(name.replace("_", " "), overflow="fold")
        for entry in result[kind]:
            table.add_row(*(Text(mask(str(entry[name]))) for name in names))
        console.print(table)
    console.print(summary, markup=False)


@gaps.command("retry")
@click.argument("aggregate_id")
@reports
@configured("app.id", "app.state_dir", "ops.log")
def gaps_retry(request: Request, aggregate_id: str) -> Report:
    """Look now for what an aggregate misses: a held version, or one that was skipped."""
    return _act(request, "retry", aggregate_id)


@gaps.command("skip")
@click.argument("aggregate_id")
@reports
@configured("app.id", "app.state_dir", "ops.log")
def gaps_skip(request: Request, aggregate_id: str) -> Report:
    """Give an open gap up now; it is recorded, and what waited for it is published."""
    return _act(request, "skip", aggregate_id)


def _act(request: Request, action: Literal["retry", "skip"], aggregate_id: str) -> Report:
    loaded = request.load()
    from eventpub.ops.gaps import act

    outcome = act(loaded.config, action, aggregate_id)
    done = outcome in {None, "found", "skipped"}
    summary = (
        f"{aggregate_id}: {outcome}"
        if outcome
        else f"{aggregate_id}: no publisher has answered; the next one that runs will do it"
    )
    result = {"aggregate_id": aggregate_id, "outcome": outcome or "asked"}
    return Report(f"gaps {action}", done, summary, result)


@click.group()
def config() -> None:
    """The configuration: is it right, what is in effect."""


@config.command("check")
@reports
@configured()
def config_check(request: Request) -> Report:
    """Say whether the configuration is right; nothing is connected to."""
    loaded = request.load()
    where = str(loaded.file) if loaded.file else "environment and flags"
    return Report("config check", True, f"the configuration ({where}) is right")


@config.command("show")
@reports
@configured()
def config_show(request: Request) -> Report:
    """Show each key's effective value and where it came from; secrets are masked."""
    loaded = request.load()
    from eventpub import settings

    values = settings.shown(loaded)
    result: dict[str, Any] = {
        key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()
    }
    return Report(
        "config show",
        True,
        f"{len(values)} keys",
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
@click.option("--seconds", type=click.FloatRange(1), help="Stop after so long; default: Ctrl-C.")
@click.option("--rate", type=click.IntRange(1), default=500, show_default=True, help="Events/s.")
@click.option("--keep", type=click.Path(), metavar="DIR", help="Keep servers' data and logs here.")
@reports
def demo(seconds: float | None, rate: int, keep: str | None) -> Report:
    """Everything on this machine, with nothing to set up: see it find what commits late."""
    from eventpub.cli import stage

    sys.stdout.flush()
    return stage.play(seconds=seconds, rate=rate, keep=keep)
