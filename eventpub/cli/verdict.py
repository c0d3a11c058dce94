"""How `verify` shows what it found, here and at the end of the demo."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from eventpub.cli.output import Report, console
from eventpub.config import Config, format_time
from eventpub.ops import verify
from eventpub.ops.verify import KINDS, Verdict

if TYPE_CHECKING:
    from rich.console import Console

_MEANING = {
    "missing": "in the store, not on the topic",
    "repeated": "on the topic more than once",
    "out_of_order": "after a later version of the aggregate",
    "altered": "payload, headers, time or partition differ",
    "extra": "on the topic, not in the store",
}


def compare(config: Config, *, first: int | None = None, last: int | None = None) -> Verdict:
    """`ops.verify.verify`, which says on a terminal how far it is."""
    if not sys.stderr.isatty():
        return verify.verify(config, first=first, last=last)
    with console(stderr=True).status("comparing store and topic") as status:

        def show(side: str, rows: int) -> None:
            status.update(f"reading the {side}: {rows:,}")

        return verify.verify(config, first=first, last=last, on_progress=show)


def report(verdict: Verdict) -> Report:
    """The verdict as the command's answer."""
    return Report(
        "verify",
        verdict.ok,
        summary(verdict),
        verdict.to_dict(),
        text=lambda console: show(console, verdict),
    )


def summary(verdict: Verdict) -> str:
    """One sentence."""
    found = ", ".join(f"{verdict.counts[k]:,} {k.replace('_', ' ')}" for k in KINDS)
    return f"{verdict.events:,} events compared: {found}"


def show(console: Console, verdict: Verdict) -> None:
    """The table, the examples, the notes."""
    from rich.table import Table
    from rich.text import Text

    from eventpub.masking import mask

    first = format_time(verdict.first) if verdict.first > 1 else "the beginning"
    table = Table(
        title=f"store and topic from {first} to {format_time(verdict.last)}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("events", justify="right")
    table.add_column("")
    table.add_row("in the store", f"{verdict.events:,}", "")
    table.add_row("on the topic", f"{verdict.records:,}", "", end_section=True)
    for kind in KINDS:
        count = verdict.counts[kind]
        style = "bold red" if count else "green"
        name = kind.replace("_", " ")
        table.add_row(Text(name, style=style), Text(f"{count:,}", style=style), _MEANING[kind])
    more = {k: n for k, n in verdict.accounted.items() if n}
    if more or verdict.skips:
        table.add_section()
    for name, count in more.items():
        table.add_row(name, f"{count:,}", "accounted for", style="dim")
    if verdict.skips:
        table.add_row("skips", f"{verdict.skips:,}", "gaps given up for good", style="dim")
    console.print(table)
    for kind in KINDS:
        examples = verdict.examples[kind]
        if not examples:
            continue
        console.print(f"{kind.replace('_', ' ')}, the first {len(examples)}:", style="bold")
        for one in examples:
            data = one.to_dict()
            at = "" if one.offset is None else f" partition {one.partition} offset {one.offset}"
            line = f"  {one.aggregate_id}/{one.version} {data['create_time'] or ''}{at}: {one.note}"
            console.print(Text(mask(line)))
    for note in verdict.notes:
        console.print(Text(mask(f"note: {note}")))
    console.print(
        Text("nothing differs" if verdict.ok else summary(verdict)),
        style="bold green" if verdict.ok else "bold red",
    )
