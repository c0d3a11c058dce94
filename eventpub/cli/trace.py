"""`eventpub trace`: where one event is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from eventpub.cli.options import Request, configured, reading_timeout, reports
from eventpub.cli.output import Report

if TYPE_CHECKING:
    from rich.console import Console

    from eventpub.ops.trace import Trace, Traced

_STYLES = {
    "published": "green",
    "late": "green",
    "baseline": "dim",
    "skipped": "yellow",
    "waiting": "cyan",
    "held": "yellow",
    "dead": "red",
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

    with waiting("reading the topics", timeout):
        found = tracing.trace(loaded.config, aggregate_id, version, limit=limit, timeout=timeout)
    counts = tracing.words(found.versions)
    if not found.versions:
        summary = f"{aggregate_id}: nothing is known of it, in the store or on the topics"
    elif version is not None:
        [only] = found.versions
        summary = f"{aggregate_id}/{version}: {only.verdict}"
    else:
        shown = ", ".join(f"{count} {word}" for word, count in counts.items())
        summary = f"{aggregate_id}: {shown}"
    result = {
        "aggregate_id": aggregate_id,
        "versions": [traced.to_dict() for traced in found.versions],
        "counts": counts,
        "publisher_is_running": found.is_running,
        "position": _time(found.position),
        "notes": found.notes,
    }
    return Report(
        "trace", found.ok, summary, result, text=lambda console: _show(console, found, summary)
    )


def _time(micros: int | None) -> str | None:
    from eventpub.config import format_time

    return None if micros is None else format_time(micros)


def _show(console: Console, found: Trace, summary: str) -> None:
    from rich.text import Text

    from eventpub.cli.terminal import Rows
    from eventpub.masking import mask

    if found.versions:
        rows: list[list[str | Text]] = [
            [str(t.version), Text(t.verdict, style=_STYLES[t.verdict]), *_cells(t)]
            for t in found.versions
        ]
        console.print(Rows(("version", "", "created", "type", "bytes", "where", ""), rows))
    for note in found.notes:
        console.print(Text(mask(f"note: {note}")))
    console.print(mask(summary), markup=False)


def _cells(traced: Traced) -> list[str]:
    """When created, type, bytes, where, and the note."""
    stored = traced.stored
    created, event_type, size = "not in the store", "", ""
    if stored is not None:
        created = _time(stored.create_time) or ""
        event_type = stored.event_type
        size = "NULL" if stored.payload_bytes is None else f"{stored.payload_bytes:,}"
    where = ", ".join(f"{f.topic}[{f.partition}] offset {f.offset}" for f in traced.found)
    return [created, event_type, size, where, traced.note]
