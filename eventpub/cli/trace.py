"""`eventpub trace`: where one event is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from eventpub.cli.options import Request, configured, reading_timeout, reports
from eventpub.cli.output import Part, Report, Span, Table, notes

if TYPE_CHECKING:
    from eventpub.ops.trace import Trace, Traced
    from eventpub.ops.trace_lookup import Stored

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
    help="Without VERSION: number of versions to show.",
)
@reading_timeout
@reports
@configured(
    "app.id", "app.state_dir", "store.url", "store.table",
    "sink.bootstrap_servers", "sink.topic", "ops.log",
)  # fmt: skip
def trace(
    request: Request, aggregate_id: str, version: int | None, limit: int, timeout: float
) -> Report:
    """Show where an event is: stored, published, held, dead.

    Without a version, the aggregate's last versions. Exit status 0 if each version shown is
    published, late, from before the start, or skipped and not in the table; 1 if any is not, or
    none is known.
    """
    loaded = request.load()
    from eventpub.cli.terminal import waiting
    from eventpub.ops import trace as tracing

    with waiting("reading the topics", timeout):
        found = tracing.trace(loaded.config, aggregate_id, version, limit=limit, timeout=timeout)
    parts: list[Part] = [*([_table(found)] if found.versions else []), *notes(found.notes)]
    return Report("trace", found.ok, found.summary(version), found.to_dict(), parts)


def _table(found: Trace) -> Table:
    rows: list[list[Span]] = []
    for traced in found.versions:
        verdict = (traced.verdict, _STYLES[traced.verdict])
        rows.append([str(traced.version), verdict, *_cells(traced)])
        others = traced.stored.others if traced.stored else ()
        rows += [["", "", *_of_row(other), "", ""] for other in others]
    return Table(("version", "", "created", "type", "bytes", "where", ""), rows)


def _cells(traced: Traced) -> list[str]:
    stored = traced.stored
    row = ["not in the store", "", ""] if stored is None else _of_row(stored)
    where = ", ".join(f"{f.topic}[{f.partition}] offset {f.offset}" for f in traced.found)
    return [*row, where, traced.note]


def _of_row(stored: Stored) -> list[str]:
    from eventpub.times import format_time

    size = "NULL" if stored.payload_bytes is None else f"{stored.payload_bytes:,}"
    created = "no time" if stored.create_time is None else format_time(stored.create_time)
    return [created, stored.event_type, size]
