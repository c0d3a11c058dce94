"""Commands about events: `eventpub dead`, `publish`, `trace`, `verify` and `replay`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eventpub.cli.options import Command, configured, limited, reads_topics, time
from eventpub.cli.output import Part, Report, Table, end_if_asked, facts, notes, printable, table
from eventpub.errors import counted
from eventpub.times import format_time

if TYPE_CHECKING:
    from eventpub.config import Config
    from eventpub.ops.dead import Letters
    from eventpub.ops.sides import Verdict

_KEYS = (
    "app.id", "app.state_dir", "store.url", "store.table",
    "sink.bootstrap_servers", "sink.topic", "ops.log",
)  # fmt: skip


def _of_event(command: Command) -> Command:
    command = reads_topics(configured(*_KEYS)(command))
    command = click.argument("version", type=int)(command)
    return click.argument("aggregate_id", metavar="ID")(command)


@click.group()
def dead() -> None:
    """List refused rows, or publish one after all."""


@dead.command("list")
@limited("Number of letters to show.", default=50, most=10_000)
@reads_topics
@configured(*_KEYS)
def dead_list(config: Config, limit: int, timeout: float) -> Report:
    """List dead letters, newest first. Exit status 1 while any of them is unpublished."""
    from eventpub.ops import dead as letters

    found = letters.find(config, limit=limit, timeout=timeout)
    summary = counted(found.count, "dead letter")
    if found.rows != found.count:
        summary += f" of {counted(found.rows, 'row')}"
    if found.count > len(found.newest):
        summary += f", of the newest {len(found.newest)}"
    if found.newest:
        published = sum(letter.is_last and letter.published is not None for letter in found.newest)
        rows = counted(published, "row") if found.rows != found.count else f"{published:,}"
        summary += f", {rows} published since"
    said = _notes(found, config)
    shown = [letter.to_dict() for letter in found.newest]
    result = {"count": found.count, "rows": found.rows, "letters": shown, "notes": said}
    names = "aggregate_id version letter created payload_bytes in_store published reason"
    parts = table([one | _in_words(one) for one in shown], names)
    is_done = found.is_whole and all(letter.published for letter in found.newest)
    return Report(is_done, summary, result, [*parts, *notes(said)])


def _notes(found: Letters, config: Config) -> list[str]:
    if not found.is_whole:
        return [f"{config.sink.dead_topic} was not read to its end; see --timeout"]
    if all(letter.is_searched for letter in found.newest if letter.key is not None):
        return []
    return ["the topic was not searched whole: some may be published; see --timeout, and retention"]


def _in_words(letter: dict[str, Any]) -> dict[str, str]:
    where = "no" if letter["is_searched"] else "not known"
    if letter["published"] is not None:
        where = "partition {partition}, offset {offset}".format(**letter["published"])
    return {"letter": "last" if letter["is_last"] else "earlier", "published": where}


@dead.command("show")
@_of_event
def dead_show(config: Config, aggregate_id: str, version: int, timeout: float) -> Report:
    """Show the newest dead letter of a row: reason, place, headers, the payload's first bytes."""
    from eventpub.ops import dead as letters

    found = letters.find(config, only=(aggregate_id, version), limit=1, timeout=timeout)
    said = _notes(found, config)
    name = f"{aggregate_id}/{version}"
    if not found.newest:
        return Report(False, f"{name}: no dead letter", {"notes": said})
    [letter] = found.newest
    shown = letter.to_dict() | {
        "letters": found.count,
        "headers": letter.headers,
        "first_bytes": printable(letter.first_bytes.decode("utf-8", errors="backslashreplace")),
        "notes": said,
    }
    names = "letters created partition offset in_store published payload_bytes first_bytes"
    rows = {key: (shown | _in_words(shown))[key] for key in names.split()}
    headers = {f"header {key}": value for key, value in letter.headers.items()}
    parts: list[Part] = [facts(rows | headers), *notes(said)]
    return Report(True, f"{name}: {letter.reason}", shown, parts)


_OUTCOMES = {
    "published": "published, marked as late (header eventpub_late)",
    "published before": "it is on the topic already; nothing was done",
    "no dead letter": "not done: it has no dead letter",
    "another event has its version": "not done: another event was published under this version",
    "below the first version": "not done: the version is below store.first_version",
    "late events are not published": 'not done: it would be late, and gaps.late is not "publish"',
    "not running": "not done: no publisher is running",
    "not searched": "not done: the topics were not read to their ends; see --timeout",
    "not known": "not done: it may have been published, in records that retention has removed",
    "not in the store": "not done: the store has no such row",
    "versions below it are missing": "not done: versions below it are missing in the store",
    "held": "not done: it waits for a version below it, see eventpub gaps list",
    "refused again": "not done: it was refused again, and is a dead letter again",
    "no answer": "the publisher did not answer: `eventpub trace` shows the outcome",
}


@dead.command("retry")
@_of_event
def dead_retry(config: Config, aggregate_id: str, version: int, timeout: float) -> Report:
    """Publish a refused row as it is in the table now, marked as late.

    Needs a running publisher that is not paused. Repeated requests publish the row once. Refused
    for a version under which another event was published, for one below store.first_version, and
    while gaps.late is divert or drop. Exit status 1 if the event is not on the topic.
    """
    from eventpub.ops import dead as letters

    outcome, letter = letters.retry(config, aggregate_id, version, timeout=timeout)
    words = _OUTCOMES.get(outcome, outcome)
    if outcome == "refused again" and letter is not None:
        words += f": {letter.reason}"
    result = {"aggregate_id": aggregate_id, "version": version, "outcome": outcome}
    result |= {"letter": letter and letter.to_dict()}
    return Report(outcome in letters.PUBLISHED, f"{aggregate_id}/{version}: {words}", result)


@click.command()
@_of_event
def publish(config: Config, aggregate_id: str, version: int, timeout: float) -> Report:
    """Publish a row that is not on the topic, whatever its create_time says.

    For rows that `eventpub verify` reports as missing, such as those of a writer in another time
    zone, the lowest version first. Needs a running publisher that is not paused. A row below the
    last published version is published marked as late. Exit status 1 if the event is not on the
    topic.
    """
    from eventpub.ops import dead as letters

    outcome = letters.publish(config, aggregate_id, version, timeout=timeout)
    result = {"aggregate_id": aggregate_id, "version": version, "outcome": outcome}
    words = "published" if outcome == "published" else _OUTCOMES.get(outcome, outcome)
    return Report(outcome in letters.PUBLISHED, f"{aggregate_id}/{version}: {words}", result)


@click.command()
@click.argument("aggregate_id", metavar="ID")
@click.argument("version", type=int, required=False)
@limited("Without VERSION: number of versions to show.", default=20, most=1000)
@reads_topics
@configured(*_KEYS)
def trace(
    config: Config, aggregate_id: str, version: int | None, limit: int, timeout: float
) -> Report:
    """Show where an event is: stored, published, held, dead.

    Without a version, the aggregate's last versions. Exit status 0 if each version shown is
    published, late, from before the start, or skipped and not in the table; 1 if any is not, or
    none is known.
    """
    from eventpub.ops import trace as tracing

    found = tracing.trace(config, aggregate_id, version, limit=limit, timeout=timeout)
    result = found.to_dict()
    parts: list[Part] = [*_versions(result["versions"]), *notes(found.notes)]
    return Report(found.ok, found.summary(version), result, parts)


def _versions(versions: list[dict[str, Any]]) -> list[Table]:
    rows: list[dict[str, Any]] = []
    for one in versions:
        stored = one["stored"] or {"create_time": "not in the store", "others": []}
        where = ["{topic}[{partition}] offset {offset}".format(**found) for found in one["records"]]
        rows.append(stored | one | {"where": ", ".join(where)})
        rows += stored["others"]
    return table(rows, "version verdict create_time event_type payload_bytes where note")


_log = logging.getLogger("eventpub.verify")


@click.command()
@click.option(
    "--from",
    "first",
    type=time,
    help="Compare, and read, only events created at or after this (RFC 3339); default: the"
    " publisher's start.",
)
@click.option(
    "--to",
    "last",
    type=time,
    help="Compare events created at or before this; default: the publisher's position.",
)
@click.option(
    "--differences",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write all differences to a file, one JSON object per line.",
)
@configured(*_KEYS[:-1], "read.start", "ops.log")
def verify(config: Config, **what: Any) -> Report:
    """Compare table and topic. Counts events missing, repeated, out of order, altered, extra.

    Also counts second rows of a version ("doubled") and, without --to, events that should be
    published by now and are not ("behind"). Exit status 1 if it counts any.
    """
    return report(compare(config, **what))


def compare(config: Config, **what: Any) -> Verdict:
    from eventpub.cli.terminal import progress
    from eventpub.ops import verify as comparing

    with progress(_log) as show:

        def see(doing: str, done: float) -> None:
            end_if_asked()
            show(doing, done)

        return comparing.verify(config, **what, on_progress=see)


def report(verdict: Verdict) -> Report:
    return Report(verdict.ok, _summary(verdict), verdict.to_dict(), _parts(verdict))


def _summary(verdict: Verdict) -> str:
    found = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in verdict.counts.items())
    text = f"{counted(verdict.events, 'event')} compared: {found}"
    if not verdict.behind:
        if verdict.ok and not (verdict.events or verdict.records):
            return "nothing to compare: no event of this range is in the store or on the topic"
        held = verdict.counts["held"]
        wait = f"; {counted(held, 'event')} held: not published yet" if held else ""
        return f"nothing differs: {text}{wait}" if verdict.ok else text
    upto = f"nothing differs up to {format_time(verdict.last)}, but" * verdict.is_equal
    return (
        f"{text}; {upto or 'and'} events after the range, the oldest {verdict.behind:,.0f} seconds"
        " old, are not published yet, according to the publisher's last recorded position"
    )


def _parts(verdict: Verdict) -> list[Part]:
    counts = {"in the store": verdict.events, "on the topic": verdict.records, **verdict.counts}
    others = {**verdict.accounted, "skips": verdict.skips}
    shown = {name: f"{n:,}" for name, n in counts.items()}
    shown |= {name: f"{n:,}" for name, n in others.items() if n}
    begin = format_time(verdict.first) if verdict.first > 1 else "the beginning"
    parts = [facts(shown, f"store and topic from {begin} to {format_time(verdict.last)}")]
    for kind, examples in verdict.examples.items():
        rows = [{"event": one.name} | one.to_dict() for one in examples]
        title = f"{kind.replace('_', ' ')}, the first {len(rows)}"
        parts += table(rows, "event create_time partition offset note", title)
    return [*parts, *notes(verdict.notes)]


@click.command()
@click.option(
    "--from",
    "first",
    type=time,
    required=True,
    help="Events created at or after this (RFC 3339).",
)
@click.option(
    "--to", "last", type=time, required=True, help="Events created at or before this (RFC 3339)."
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
    any, or any is left out since an earlier run has published a later version.
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
        summary += f", {done.refused:,} refused by the broker"
    if done.left_out:
        summary += f", {done.left_out:,} left out (to publish the whole range: another --id)"
    summary += ": " * bool(done.examples) + "; ".join(done.examples)
    return Report(not done.examples, summary, {"topic": topic, **vars(done)})
