"""The commands that read a range of the table: `eventpub verify` and `eventpub replay`.

The demo shows at its end what `verify` found, too.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eventpub.cli.options import Time, configured
from eventpub.cli.output import Line, Part, Report, Span, Table, end_if_asked, notes
from eventpub.terminal import counted
from eventpub.times import format_time

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
@configured(
    "app.id", "app.state_dir", "store.url", "store.table", "sink.bootstrap_servers", "sink.topic",
    "read.start", "ops.log",
    texts={
        "read.start": "As for run: start of the publisher's range, if its state does not say."
    },
)  # fmt: skip
def verify(config: Config, **what: Any) -> Report:
    """Compare table and topic. Counts events missing, repeated, out of order, altered, extra.

    Also counts second rows of a version ("doubled") and, without --to, events that should be
    published by now and are not ("behind"). Exit status 1 if it counts any.
    """
    return report(compare(config, **what))


def compare(config: Config, **what: Any) -> Verdict:
    """As `ops.verify.verify`, which has the arguments; shows how far it is."""
    from eventpub.cli.terminal import progress
    from eventpub.ops import verify as comparing

    with progress(_log) as show:

        def see(done: Progress) -> None:
            end_if_asked()
            show(f"{done.doing}: {done.rows:,} rows, {done.records:,} records", done.done)

        return comparing.verify(config, **what, on_progress=see)


def report(verdict: Verdict) -> Report:
    return Report(verdict.ok, _summary(verdict), verdict.to_dict(), _parts(verdict))


def _summary(verdict: Verdict) -> str:
    found = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in verdict.counts.items())
    text = f"{counted(verdict.events, 'event')} compared: {found}"
    behind = verdict.behind
    if behind is None or not verdict.is_behind:
        held = verdict.counts["held"]
        wait = f"; {counted(held, 'event')} held: not published yet" if held else ""
        return f"nothing differs: {text}{wait}" if verdict.ok else text
    after = f"and {behind.count} events after the range"
    if verdict.is_equal:
        upto = format_time(verdict.last)
        after = f"nothing differs up to {upto}, but {behind.count} events after that"
    paused = "; the publisher is paused" if behind.is_paused else ""
    return (
        f"{text}; {after}, the oldest {behind.seconds:,.0f} seconds old, are not published yet, by"
        f" what the publisher has written down{paused}"
    )


def _parts(verdict: Verdict) -> list[Part]:
    from eventpub.ops.verdict import NO_TIME

    rows: list[list[Span]] = [
        ["in the store", f"{verdict.events:,}", ""],
        ["on the topic", f"{verdict.records:,}", ""],
    ]
    for kind, count in verdict.counts.items():
        style = ("yellow" if kind == "held" else "bold red") if count else "green"
        rows.append([(kind.replace("_", " "), style), (f"{count:,}", style), _MEANING[kind]])
    others = {**verdict.accounted, "skips": verdict.skips}
    rows += [[n.replace("_", " "), f"{c:,}", "accounted for"] for n, c in others.items() if c]
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
    return [*shown, *notes(verdict.notes)]


@click.command()
@click.option(
    "--from",
    "first",
    type=Time(),
    required=True,
    help="Events created at or after this (RFC 3339).",
)
@click.option(
    "--to", "last", type=Time(), required=True, help="Events created at or before this (RFC 3339)."
)
@click.option("--topic", metavar="NAME", required=True, help="Target topic; created if missing.")
@click.option(
    "--id",
    "id_",
    metavar="NAME",
    default="",
    help="Name of this replay, for the header eventpub_replay; by default derived from app.id,"
    " range and topic, so the same command continues an interrupted replay. Another name"
    " publishes the same range a second time.",
)
@configured("app.id", "store.url", "store.table", "sink.bootstrap_servers", "ops.log")
def replay(config: Config, *, first: int, last: int, topic: str, id_: str) -> Report:
    """Publish a range once more, to another topic.

    Records have the header eventpub_replay. Each aggregate's events are published in version order,
    each once, even if the command is interrupted and repeated. Exit status 1 if the broker refused
    any.
    """
    from eventpub.cli.terminal import progress
    from eventpub.ops import replay as replaying

    what = replaying.Range(first, last, topic, id_)
    has_begun = False
    with progress(logging.getLogger("eventpub.replay")) as show:

        def published(events: int, total: int) -> None:
            nonlocal has_begun
            if not has_begun:
                resumes = "if it is interrupted, the same command resumes it"
                sys.stderr.write(f"replay {what.named(config.app.id)}: {resumes}\n")
                has_begun = True
            end_if_asked()
            done = min(events / max(total, 1), 1.0)
            show(f"publishing again: {events:,} of {total:,} events", done)

        done = replaying.replay(config, what, published)
    before = f" ({done.before:,} were there before)" if done.before else ""
    summary = f"replay {done.id}: {counted(done.events, 'event')} published to {topic}{before}"
    if done.refused:
        summary += f", {done.refused:,} refused by the broker: " + "; ".join(done.examples)
    return Report(not done.refused, summary, {"topic": topic, **vars(done)})
