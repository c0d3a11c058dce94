"""`eventpub dead`: rows that were refused; `eventpub publish`: rows that were never published."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

import click

from eventpub.cli.options import Request, agrees, configured, reading_timeout, reports
from eventpub.cli.output import Report
from eventpub.cli.parts import Line, Part, Table, notes
from eventpub.terminal import counted

if TYPE_CHECKING:
    from eventpub.ops.dead import Letter

_KEYS = (
    "app.id", "app.state_dir", "store.url", "store.table",
    "sink.bootstrap_servers", "sink.topic", "ops.log",
)  # fmt: skip
_READING = "reading the topics"
_timeout = reading_timeout()


@click.group()
def dead() -> None:
    """List refused rows, or publish one after all."""


@dead.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="Show the newest so many.",
)
@_timeout
@reports
@configured(*_KEYS)
def dead_list(request: Request, limit: int, timeout: float) -> Report:
    """List dead letters, the newest first. Exit status 1 while any of these is not published."""
    loaded = request.load()
    from eventpub.cli.terminal import waiting
    from eventpub.ops import dead as letters

    with waiting(_READING, timeout):
        found = letters.find(loaded.config, limit=limit, timeout=timeout)
    open_letters = sum(letter.published is None for letter in found.newest)
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
    is_done = not open_letters and found.is_whole
    return Report("dead list", is_done, summary, result, parts)


def _notes(is_whole: bool, letters: list[Letter], topic: str) -> list[str]:
    found = []
    if not is_whole:
        found.append(f"{topic} was not read to its end; see --timeout")
    elif not all(letter.is_searched for letter in letters if letter.key is not None):
        found.append("the topic was not searched to its end: some may be published; see --timeout")
    return found


def _table(letters: list[dict[str, Any]]) -> Table:
    rows = []
    has_earlier = not all(entry["is_last"] for entry in letters)
    for entry in letters:
        row = [
            str(entry["aggregate_id"] or "-"),
            "-" if entry["version"] is None else str(entry["version"]),
            entry["created"],
            _size(entry["payload_bytes"]),
            _IN_STORE[entry["in_store"]],
            _where(entry),
            entry["reason"],
        ]
        if has_earlier:
            row.insert(2, "last" if entry["is_last"] else "earlier")
        rows.append(row)
    names = ["aggregate id", "version", "created", "bytes", "in the store", "published", "reason"]
    if has_earlier:
        names.insert(2, "letter")
    return Table(names, rows)


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
@_timeout
@reports
@configured(*_KEYS)
def dead_show(request: Request, aggregate_id: str, version: int, timeout: float) -> Report:
    """Show the newest dead letter of a row: reason, place, headers, the payload's first bytes."""
    loaded = request.load()
    from eventpub.cli.terminal import waiting
    from eventpub.ops import dead as letters

    config = loaded.config
    with waiting(_READING, timeout):
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
    lines = {
        "event": f"{shown['aggregate_id']}/{shown['version']}",
        "created": shown["created"],
        "dead letter": f"partition {shown['partition']}, offset {shown['offset']}"
        + (f" (the newest of {shown['letters']})" if shown["letters"] > 1 else ""),
        "in the store": _IN_STORE[shown["in_store"]],
        "published": _where(shown),
        "payload": f"{_size(shown['payload_bytes'])} bytes",
    }
    if shown["first_bytes"]:
        lines["begins with"] = shown["first_bytes"]
    parts: list[Part] = [Line((f"{name:>12}  ", "bold"), lines[name]) for name in lines]
    for name, value in shown["headers"].items():
        parts.append(Line(("      header  ", "dim"), f"{name}: {_printable(value.encode())}"))
    return [*parts, *notes(shown["notes"])]


_OUTCOMES = {
    "published": "published, marked as late (header eventpub_late)",
    "published before": "it is on the topic already; nothing was done",
    "no dead letter": "not done: there is no dead letter of it",
    "another event has its version": "not done: another event was published under this version",
    "below the first version": "not done: the version is below store.first_version",
    "late events are not published": "not done: it would be late; gaps.late says not to publish it",
    "not running": "not done: no publisher is running",
    "not searched": "not done: the topics were not read to their ends; see --timeout",
    "not known": "not done: it may have been published, in records that retention has removed",
    "not in the store": "not done: the row is no longer in the store",
    "versions below it are missing": "not done: versions below it are missing in the store",
    "held": "not done: it waits for a version below it, see eventpub gaps list",
    "not confirmed": "not done: --yes does it",
    "refused again": "not done: it was refused again, and is a dead letter again",
    "no answer": "the publisher has not answered: `eventpub trace` says what came of it",
}


@dead.command("retry")
@click.argument("aggregate_id", metavar="ID")
@click.argument("version", type=int)
@_timeout
@reports
@configured(*_KEYS)
def dead_retry(request: Request, aggregate_id: str, version: int, timeout: float) -> Report:
    """Publish a refused row after all, as it is in the store now, marked as late.

    Needs a running publisher that is not paused. It publishes the row once, however often you ask.
    Not possible for a version under which another event was published, for one below
    store.first_version, and while gaps.late is divert or drop. Exit status 1 if the event is not on
    the topic.
    """
    loaded = request.load()
    from eventpub.cli.terminal import waiting
    from eventpub.ops import dead as letters

    with waiting(_READING, timeout):
        answer = letters.retry(loaded.config, aggregate_id, version, timeout=timeout)
    words = _OUTCOMES.get(answer.outcome, answer.outcome)
    if answer.outcome == "refused again" and answer.letter is not None:
        words += f": {answer.letter.reason}"
    result: dict[str, Any] = {
        "aggregate_id": aggregate_id,
        "version": version,
        "outcome": answer.outcome,
        "letter": None if answer.letter is None else answer.letter.to_dict(),
    }
    summary = f"{aggregate_id}/{version}: {words}"
    return Report("dead retry", answer.is_done, summary, result)


@click.command()
@click.argument("aggregate_id", metavar="ID")
@click.argument("version", type=int, required=False)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_timeout
@reports
@configured(*_KEYS)
def publish(
    request: Request, aggregate_id: str, version: int | None, yes: bool, timeout: float
) -> Report:
    """Publish rows that are not on the topic, whatever their create_time says.

    Such as rows of a writer in another time zone, which `eventpub verify` names as missing. Without
    VERSION: all of the last 1,000 rows of the aggregate that are not on the topic. Needs a running
    publisher that is not paused. A row above the last published version goes out in order; one
    below as a late event, marked as such. Exit status 1 if one of them is not on the topic.
    """
    loaded = request.load()
    from eventpub.cli.terminal import waiting
    from eventpub.ops import unpublished

    with waiting(_READING, timeout):
        rows = unpublished.unpublished(loaded.config, aggregate_id, version, timeout=timeout)
    done, outcome = 0, rows.outcome
    if not outcome:
        name = ", ".join(map(str, rows.versions[:10])) + ", …" * (len(rows.versions) > 10)
        if yes or agrees(f"{aggregate_id}: publish {counted(len(rows.versions), 'row')}: {name}?"):
            done, outcome = unpublished.publish(loaded.config, aggregate_id, rows, timeout=timeout)
        else:
            outcome = "not confirmed"
    words = _OUTCOMES.get(outcome, outcome)
    if done:
        left = f"; the next: {words}" if done < len(rows.versions) else ""
        words = f"{done} of {counted(len(rows.versions), 'row')} published{left}"
    is_done = outcome in {"published", "published before"}
    result = {"aggregate_id": aggregate_id, "version": version, "outcome": outcome}
    result |= {"published": done, "unpublished": len(rows.versions) - done}
    return Report("publish", is_done, f"{aggregate_id}: {words}", result)
