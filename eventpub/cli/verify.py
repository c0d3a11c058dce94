"""`eventpub verify`, and how it shows what it found, here and at the end of the demo."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eventpub.cli.options import Request, Time, configured, reports
from eventpub.cli.output import Line, Part, Report, Table, end_if_asked, notes
from eventpub.cli.terminal import progress
from eventpub.terminal import counted

if TYPE_CHECKING:
    from eventpub.config import Config
    from eventpub.ops.verdict import Progress, Verdict

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


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and 0 < int(part) < 1_000_000 for part in parts):
        raise click.BadParameter("it must be numbers separated by commas, such as 4,6")
    return [int(part) for part in parts]


@click.command()
@click.option(
    "--from",
    "first",
    type=Time(),
    help="Compare, and read, only events created at or after this (RFC 3339); default: the"
    " publisher's start.",
)
@click.option(
    "--to",
    "last",
    type=Time(),
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
    help="Write all differences to a file, one JSON object per line.",
)
@click.option(
    "--former-partitions",
    metavar="N,N…",
    default="",
    callback=_numbers,
    help="Earlier partition counts of the topic, oldest first; default: from app.state_dir.",
)
@reports
@configured(
    "app.id", "app.state_dir", "store.url", "store.table", "sink.bootstrap_servers", "sink.topic",
    "read.start", "read.delay", "ops.log",
    texts={
        "read.start": "As for run: start of the publisher's range, if its state does not say."
    },
)  # fmt: skip
def verify(request: Request, **what: Any) -> Report:
    """Compare table and topic. Counts events missing, repeated, out of order, altered, extra.

    Also counts second rows of a version ("doubled") and, without --to, events that should be
    published by now and are not ("behind"). Exit status 1 if it counts any.
    """
    return report(compare(request.load().config, **what))


def compare(config: Config, **what: Any) -> Verdict:
    """As `ops.verify.verify`, which has the arguments; shows how far it is."""
    from eventpub.ops import verify as comparing

    with progress(_log) as show:

        def see(done: Progress) -> None:
            end_if_asked()
            show(f"{done.doing}: {done.rows:,} rows, {done.records:,} records", done.done)

        return comparing.verify(config, **what, on_progress=see)


def report(verdict: Verdict) -> Report:
    return Report("verify", verdict.ok, summary(verdict), verdict.to_dict(), parts(verdict))


def summary(verdict: Verdict) -> str:
    from eventpub.config import format_time

    of = "" if verdict.sample is None else f" of one aggregate in {verdict.sample.one_in:,}"
    found = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in verdict.counts.items())
    text = f"{counted(verdict.events, 'event')}{of} compared: {found}"
    behind = verdict.behind
    if behind is None or not verdict.is_behind:
        held = verdict.counts["held"]
        wait = f"; {counted(held, 'event')} held: not published yet" if held else ""
        return f"nothing differs: {text}{wait}" if verdict.ok else text
    after = "and {} events after the range"
    if verdict.is_equal:
        after = f"nothing differs up to {format_time(verdict.last)}, but {{}} events after that"
    paused = "; the publisher is paused" if behind.is_paused else ""
    return (
        f"{text}; {after.format(behind.count)}, the oldest {behind.seconds:,.0f} seconds old, are"
        f" not published yet, by what the publisher has written down{paused}"
    )


def parts(verdict: Verdict) -> list[Part]:
    from eventpub.config import format_time
    from eventpub.ops.records import NO_TIME

    rows: list[Any] = [
        ["in the store", f"{verdict.events:,}", ""],
        ["on the topic", f"{verdict.records:,}", ""],
    ]
    for kind, count in verdict.counts.items():
        style = ("yellow" if kind == "held" else "bold red") if count else "green"
        rows.append([(kind.replace("_", " "), style), (f"{count:,}", style), _MEANING[kind]])
    for name, count in verdict.accounted.items():
        if count:
            rows.append([name.replace("_", " "), f"{count:,}", "accounted for"])
    if verdict.skips:
        rows.append(["skips", f"{verdict.skips:,}", "gaps that were skipped"])
    if verdict.behind and verdict.is_behind:
        rows.append(["behind", verdict.behind.count, "after that range, not published yet"])
    begin = format_time(verdict.first) if verdict.first > 1 else "the beginning"
    title = f"store and topic from {begin} to {format_time(verdict.last)}"
    shown: list[Part] = [Table(("", "events", ""), rows, title)]
    for kind, examples in verdict.examples.items():
        if examples:
            heading = f"{kind.replace('_', ' ')}, the first {len(examples)}:"
            shown.append(Line((heading, "bold")))
        for one in examples:
            created = "" if one.create_time == NO_TIME else f" {format_time(one.create_time)}"
            at = "" if one.offset is None else f" partition {one.partition} offset {one.offset}"
            shown.append(Line(f"  {one.name}{created}{at}: {one.note}"))
    shown += notes(verdict.notes)
    if sample := verdict.sample:
        shown += notes(
            [
                f"a sample of {sample.share:.3%} of the aggregates, all events of each: if none of"
                f" them differs, then with 95% confidence at most {sample.may_have_missed:,} of all"
                " aggregates do"
            ]
        )
    return shown
