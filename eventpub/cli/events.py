"""Commands about single events: `eventpub dead` (refused rows), `publish` (rows that were never
published) and `trace` (where one is)."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

import click

from eventpub.cli.options import Request, configured, reads_topics
from eventpub.cli.output import Part, Report, Span, Table, notes
from eventpub.terminal import counted

if TYPE_CHECKING:
    from eventpub.ops.dead import Letter
    from eventpub.ops.lookup import Stored
    from eventpub.ops.trace import Trace, Traced

_KEYS = (
    "app.id", "app.state_dir", "store.url", "store.table",
    "sink.bootstrap_servers", "sink.topic", "ops.log",
)  # fmt: skip


@click.group()
def dead() -> None:
    """List refused rows, or publish one after all."""


@dead.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="Number of letters to show.",
)
@reads_topics
@configured(*_KEYS)
def dead_list(request: Request, limit: int, timeout: float) -> Report:
    """List dead letters, newest first. Exit status 1 while any of them is unpublished."""
    loaded = request.load()
    from eventpub.ops import dead as letters

    found = letters.find(loaded.config, limit=limit, timeout=timeout)
    summary = counted(found.count, "dead letter")
    if found.rows != found.count:
        summary += f" of {counted(found.rows, 'row')}"
    if found.count > len(found.newest):
        summary += f", of the newest {len(found.newest)}"
    if found.newest:
        published = sum(letter.is_last and letter.published is not None for letter in found.newest)
        rows = counted(published, "row") if found.rows != found.count else f"{published:,}"
        summary += f", {rows} published since"
    said = _notes(found.is_whole, found.newest, loaded.config.sink.dead_topic)
    shown = [letter.to_dict() for letter in found.newest]
    result = {"count": found.count, "rows": found.rows, "letters": shown, "notes": said}
    parts: list[Part] = [*([_table(shown)] if shown else []), *notes(said)]
    is_done = found.is_whole and all(letter.published for letter in found.newest)
    return Report("dead list", is_done, summary, result, parts)


def _notes(is_whole: bool, letters: list[Letter], topic: str) -> list[str]:
    found = []
    if not is_whole:
        found.append(f"{topic} was not read to its end; see --timeout")
    elif not all(letter.is_searched for letter in letters if letter.key is not None):
        found.append("the topic was not searched to its end: some may be published; see --timeout")
    return found


def _table(letters: list[dict[str, Any]]) -> Table:
    rows = [
        [
            str(entry["aggregate_id"] or "-"),
            "-" if entry["version"] is None else str(entry["version"]),
            "last" if entry["is_last"] else "earlier",
            entry["created"],
            _size(entry["payload_bytes"]),
            _IN_STORE[entry["in_store"]],
            _where(entry),
            entry["reason"],
        ]
        for entry in letters
    ]
    names = ("aggregate id", "version", "letter", "created", "bytes", "in the store", "published")
    return Table((*names, "reason"), rows)


_IN_STORE = {True: "yes", False: "no", None: "-"}


def _where(shown: dict[str, Any]) -> str:
    if shown["published"] is None:
        return "no" if shown["is_searched"] else "not known"
    return "partition {partition}, offset {offset}".format(**shown["published"])


def _size(payload_bytes: int | None) -> str:
    return "NULL" if payload_bytes is None else f"{payload_bytes:,}"


@dead.command("show")
@click.argument("aggregate_id", metavar="ID")
@click.argument("version", type=int)
@reads_topics
@configured(*_KEYS)
def dead_show(request: Request, aggregate_id: str, version: int, timeout: float) -> Report:
    """Show the newest dead letter of a row: reason, place, headers, the payload's first bytes."""
    loaded = request.load()
    from eventpub.ops import dead as letters

    config = loaded.config
    found = letters.find(config, only=(aggregate_id, version), limit=1, timeout=timeout)
    said = _notes(found.is_whole, found.newest, config.sink.dead_topic)
    name = f"{aggregate_id}/{version}"
    if not found.newest:
        return Report("dead show", False, f"{name}: no dead letter", {"notes": said})
    [letter] = found.newest
    shown = letter.to_dict() | {
        "letters": found.count,
        "headers": letter.headers,
        "first_bytes": _printable(letter.first_bytes),
        "notes": said,
    }
    return Report("dead show", True, f"{name}: {letter.reason}", shown, _parts_of(shown))


def _printable(payload: bytes) -> str:
    r"""Text as it is, other bytes as ``\xNN``: nothing that a terminal would obey."""
    text = payload.decode("utf-8", errors="backslashreplace")
    plain = set(string.printable) - set("\r\x0b\x0c\t\n")
    return "".join(c if c in plain or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _parts_of(shown: dict[str, Any]) -> list[Part]:
    of = f" (the newest of {shown['letters']})" if shown["letters"] > 1 else ""
    facts = {
        "event": f"{shown['aggregate_id']}/{shown['version']}",
        "created": shown["created"],
        "dead letter": f"partition {shown['partition']}, offset {shown['offset']}{of}",
        "in the store": _IN_STORE[shown["in_store"]],
        "published": _where(shown),
        "payload": f"{_size(shown['payload_bytes'])} bytes",
        "begins with": shown["first_bytes"],
    }
    rows = [(name, value) for name, value in facts.items() if value]
    headers = shown["headers"].items()
    rows += [("header", f"{name}: {_printable(value.encode())}") for name, value in headers]
    return [Table(("", ""), rows), *notes(shown["notes"])]


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
    "not in the store": "not done: the row is no longer in the store",
    "versions below it are missing": "not done: versions below it are missing in the store",
    "held": "not done: it waits for a version below it, see eventpub gaps list",
    "refused again": "not done: it was refused again, and is a dead letter again",
    "no answer": "the publisher did not answer: `eventpub trace` shows the outcome",
}


@dead.command("retry")
@click.argument("aggregate_id", metavar="ID")
@click.argument("version", type=int)
@reads_topics
@configured(*_KEYS)
def dead_retry(request: Request, aggregate_id: str, version: int, timeout: float) -> Report:
    """Publish a refused row as it is in the table now, marked as late.

    Needs a running publisher that is not paused. Repeated requests publish the row once. Refused
    for a version under which another event was published, for one below store.first_version, and
    while gaps.late is divert or drop. Exit status 1 if the event is not on the topic.
    """
    loaded = request.load()
    from eventpub.ops import dead as letters

    outcome, letter = letters.retry(loaded.config, aggregate_id, version, timeout=timeout)
    words = _OUTCOMES.get(outcome, outcome)
    if outcome == "refused again" and letter is not None:
        words += f": {letter.reason}"
    result: dict[str, Any] = {
        "aggregate_id": aggregate_id,
        "version": version,
        "outcome": outcome,
        "letter": letter and letter.to_dict(),
    }
    summary = f"{aggregate_id}/{version}: {words}"
    return Report("dead retry", outcome in letters.PUBLISHED, summary, result)


@click.command()
@click.argument("aggregate_id", metavar="ID")
@click.argument("version", type=int)
@reads_topics
@configured(*_KEYS)
def publish(request: Request, aggregate_id: str, version: int, timeout: float) -> Report:
    """Publish a row that is not on the topic, whatever its create_time says.

    For rows that `eventpub verify` reports as missing, such as those of a writer in another time
    zone, the lowest version first. Needs a running publisher that is not paused. A row below the
    last published version is published marked as late. Exit status 1 if the event is not on the
    topic.
    """
    loaded = request.load()
    from eventpub.ops import dead as letters

    outcome = letters.publish(loaded.config, aggregate_id, version, timeout=timeout)
    result = {"aggregate_id": aggregate_id, "version": version, "outcome": outcome}
    words = "published" if outcome == "published" else _OUTCOMES.get(outcome, outcome)
    summary = f"{aggregate_id}/{version}: {words}"
    return Report("publish", outcome in letters.PUBLISHED, summary, result)


_VERDICTS = {
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
@reads_topics
@configured(*_KEYS)
def trace(
    request: Request, aggregate_id: str, version: int | None, limit: int, timeout: float
) -> Report:
    """Show where an event is: stored, published, held, dead.

    Without a version, the aggregate's last versions. Exit status 0 if each version shown is
    published, late, from before the start, or skipped and not in the table; 1 if any is not, or
    none is known.
    """
    loaded = request.load()
    from eventpub.ops import trace as tracing

    found = tracing.trace(loaded.config, aggregate_id, version, limit=limit, timeout=timeout)
    parts: list[Part] = [*([_versions(found)] if found.versions else []), *notes(found.notes)]
    return Report("trace", found.ok, found.summary(version), found.to_dict(), parts)


def _versions(found: Trace) -> Table:
    rows: list[list[Span]] = []
    for traced in found.versions:
        verdict = (traced.verdict, _VERDICTS[traced.verdict])
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

    created = "no time" if stored.create_time is None else format_time(stored.create_time)
    return [created, stored.event_type, _size(stored.payload_bytes)]
