"""`eventpub trace`: where one event is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from eventpub.cli.options import Request, configured, reading_timeout, reports
from eventpub.cli.output import Report

if TYPE_CHECKING:
    from rich.console import Console

    from eventpub.ops.trace_answer import Stored, Trace, Traced

_STYLES = {
    "published": "green",
    "late": "green",
    "baseline": "dim",
    "skipped": "yellow",
    "waiting": "cyan",
    "held": "yellow",
    "dead": "red",
    "invalid": "bold red",
    "missing": "bold red",
    "unknown": "bold red",
}


@click.command()
@click.argument("aggregate_id", metavar="ID")
@click.argument("version", type=int, required=False)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Without VERSION: show the last so many.",
)
@reading_timeout()
@reports
@configured(
    "app.id", "app.state_dir", "store.url", "store.table",
    "sink.bootstrap_servers", "sink.topic", "ops.log",
)  # fmt: skip
def trace(
    request: Request, aggregate_id: str, version: int | None, limit: int, timeout: float
) -> Report:
    """Say where one event is: stored, published, held, dead.

    Without a version: of the last versions of the aggregate. Exit status 0 if each version shown is
    published, late, from before the start, or skipped and not in the store; 1 if any is not, or
    none is known.
    """
    loaded = request.load()
    from eventpub.cli.terminal import waiting
    from eventpub.ops import trace as tracing
    from eventpub.ops.trace_answer import place, words

    with waiting("reading the topics", timeout):
        found = tracing.trace(loaded.config, aggregate_id, version, limit=limit, timeout=timeout)
    summary = f"{aggregate_id}: {_last(found)}{_waits(found)}"
    if not found.versions:
        summary = f"{aggregate_id}: {_nothing(found)}"
    elif version is not None:
        [only] = found.versions
        summary = f"{aggregate_id}/{version}: {only.verdict}"
    result = {
        "aggregate_id": aggregate_id,
        "versions": [traced.to_dict() for traced in found.versions],
        "counts": words(found.versions),
        "total": found.total,
        "waits_for": _range(found.waits_for),
        "others": [place(other) for other in found.others],
        "publisher_is_running": found.is_running,
        "position": _time(found.position),
        "notes": found.notes,
    }
    return Report(
        "trace", found.ok, summary, result, text=lambda console: _show(console, found, summary)
    )


def _last(found: Trace) -> str:
    """How many versions have each verdict, and which ones are meant if it is not all."""
    from eventpub.ops.trace_answer import words

    text = ", ".join(f"{count} {word}" for word, count in words(found.versions).items())
    shown = len(found.versions)
    if found.total is None:
        return f"the last {shown} versions: {text}"
    return text if found.total <= shown else f"the last {shown} of {found.total:,} versions: {text}"


def _waits(found: Trace) -> str:
    if found.waits_for is None:
        return ""
    first, last = found.waits_for
    return (
        f"; waits for version {first}"
        if first == last
        else f"; waits for versions {first} to {last}"
    )


def _nothing(found: Trace) -> str:
    """What is said where no version is known."""
    if found.others:
        from eventpub.ops.trace_answer import MOST_OTHERS

        count = len(found.others)
        records = "1 record" if count == 1 else f"{count} records"
        if count == MOST_OTHERS:
            records = f"{count} records or more"
        return f"not in the store; {records} of this key, not written by this publisher"
    if not found.is_whole:
        return "not in the store; the topics were not read to their ends"
    return "nothing is known of it, in the store or on the topics"


def _range(versions: tuple[int, int] | None) -> dict[str, int] | None:
    if versions is None:
        return None
    return {"from_version": versions[0], "to_version": versions[1]}


def _time(micros: int | None) -> str | None:
    from eventpub.config import format_time

    return None if micros is None else format_time(micros)


def _show(console: Console, found: Trace, summary: str) -> None:
    from rich.text import Text

    from eventpub.cli.terminal import Rows
    from eventpub.terminal import for_people

    if found.versions:
        rows: list[list[str | Text]] = []
        for t in found.versions:
            rows.append([str(t.version), Text(t.verdict, style=_STYLES[t.verdict]), *_cells(t)])
            others = t.stored.others if t.stored else ()
            rows += [["", "", *_of_row(other), "", ""] for other in others]
        console.print(Rows(("version", "", "created", "type", "bytes", "where", ""), rows))
    for note in found.notes:
        console.print(Text(for_people(f"note: {note}")))
    console.print(for_people(summary), markup=False)


def _cells(traced: Traced) -> list[str]:
    """When created, type, bytes, where, and the note."""
    stored = traced.stored
    row = ["not in the store", "", ""] if stored is None else _of_row(stored)
    where = ", ".join(f"{f.topic}[{f.partition}] offset {f.offset}" for f in traced.found)
    return [*row, where, traced.note]


def _of_row(stored: Stored) -> list[str]:
    size = "NULL" if stored.payload_bytes is None else f"{stored.payload_bytes:,}"
    return [_time(stored.create_time) or "no time", stored.event_type, size]
