"""How `verify` shows what it found, here and at the end of the demo."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from eventpub.cli.output import Report, end_if_asked
from eventpub.cli.terminal import progress
from eventpub.config import Config, format_time
from eventpub.ops import verify
from eventpub.ops.records import NO_TIME
from eventpub.ops.status import Behind
from eventpub.ops.verdict import KINDS, Progress, Sample, Verdict
from eventpub.terminal import counted

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger("eventpub.verify")

_MEANING = {
    "missing": "in the store, not on the topic",
    "repeated": "on the topic more than once",
    "out_of_order": "after a later version of the aggregate",
    "altered": "payload, headers, time or partition differ",
    "extra": "on the topic, not in the store",
    "held": "not published yet: wait for a version that is not in the store",
    "doubled": "in the store beside another row of their version",
}


def compare(config: Config, **what: Any) -> Verdict:
    """As `ops.verify.verify`, which has the arguments; shows how far it is."""
    with progress(_log) as show:

        def see(done: Progress) -> None:
            end_if_asked()
            show(_words(done), done.done)

        return verify.verify(config, **what, on_progress=see)


def _words(done: Progress) -> str:
    return f"{done.doing}: {done.rows:,} rows, {done.records:,} records"


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
    of = "" if verdict.sample is None else f" of one aggregate in {verdict.sample.one_in:,}"
    text = f"{counted(verdict.events, 'event')}{of} compared: {found}"
    if not (verdict.behind and verdict.is_behind):
        return text
    if verdict.is_equal:
        return f"{text}; {_equal_but_behind(verdict.last, verdict.behind)}"
    return f"{text}; and {_waiting('the range', verdict.behind)}"


def _equal_but_behind(last: int, behind: Behind) -> str:
    return f"nothing differs up to {format_time(last)}, but {_waiting('that', behind)}"


def _waiting(after: str, behind: Behind) -> str:
    why = "; the publisher is paused" if behind.is_paused else ""
    return (
        f"{behind.count} events after {after}, the oldest {behind.seconds:,.0f} seconds old,"
        f" are not published yet, by what the publisher has written down{why}"
    )


def _about(sample: Sample) -> str:
    """What a sample says of the aggregates that were not read."""
    return (
        f"a sample of {sample.share:.3%} of the aggregates, all events of each: if none of them"
        f" differs, then with 95% confidence at most {sample.may_have_missed:,} of all"
        " aggregates do"
    )


def show(console: Console, verdict: Verdict) -> None:
    """The table, the examples, the notes."""
    from rich.table import Table
    from rich.text import Text

    from eventpub.terminal import for_people

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
        style = ("yellow" if kind == "held" else "bold red") if count else "green"
        name = kind.replace("_", " ")
        table.add_row(Text(name, style=style), Text(f"{count:,}", style=style), _MEANING[kind])
    more = {k: n for k, n in verdict.accounted.items() if n}
    if more or verdict.skips:
        table.add_section()
    for name, count in more.items():
        table.add_row(name.replace("_", " "), f"{count:,}", "accounted for", style="dim")
    if verdict.skips:
        table.add_row("skips", f"{verdict.skips:,}", "gaps given up for good", style="dim")
    if verdict.behind and verdict.is_behind:
        table.add_section()
        cells = (Text(word, style="bold red") for word in ("behind", verdict.behind.count))
        table.add_row(*cells, "after that range, not published yet")
    console.print(table)
    for kind in KINDS:
        examples = verdict.examples[kind]
        if not examples:
            continue
        console.print(f"{kind.replace('_', ' ')}, the first {len(examples)}:", style="bold")
        for one in examples:
            created = "" if one.create_time == NO_TIME else f" {format_time(one.create_time)}"
            at = "" if one.offset is None else f" partition {one.partition} offset {one.offset}"
            line = f"  {one.name}{created}{at}: {one.note}"
            console.print(Text(for_people(line)))
    sample = [] if verdict.sample is None else [_about(verdict.sample)]
    for note in [*verdict.notes, *sample]:
        console.print(Text(for_people(f"note: {note}")))
    console.print(Text(_answer(verdict)), style="bold green" if verdict.ok else "bold red")


def _answer(verdict: Verdict) -> str:
    if verdict.ok:
        held = verdict.counts["held"]
        wait = f"; {counted(held, 'event')} held: not published yet" if held else ""
        return f"nothing differs{wait}"
    if verdict.is_equal and verdict.behind:
        return _equal_but_behind(verdict.last, verdict.behind)
    return summary(verdict)
