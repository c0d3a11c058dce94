"""Commands that ask the publisher: `eventpub status`, `pause`, `resume` and `gaps`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

import click

from eventpub.cli.options import Request, agrees, configured
from eventpub.cli.output import Part, Report, Span, Table
from eventpub.terminal import counted, named_versions

if TYPE_CHECKING:
    from eventpub.ops.status import Standing

KINDS = {
    "running": "a publisher runs",
    "starting": "a publisher is starting",
    "silent": "a publisher runs, but does not answer: its process is frozen, or waits for a disk or"
    " for CPU; this is its last known status",
    "stopped": "no publisher runs; this is what the last one recorded",
    "never": "no publisher has run on this state directory",
}
_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red", "unknown": "yellow"}


@click.command()
@configured("app.id", "app.state_dir", "ops.log")
def status(request: Request) -> Report:
    """Show what the publisher does: its lag, its checks and each shard.

    If none runs, the last known status and why it ended. Exit status 1 if none runs or a check
    fails.
    """
    loaded = request.load()
    from eventpub.ops.status import find

    standing = find(loaded.config)
    parts = _parts(standing)
    return Report("status", standing.is_well, _summary(standing), _result(standing), parts)


def _result(standing: Standing) -> dict[str, Any]:
    is_running = standing.kind == "running"
    return {
        "running": is_running,
        "kind": standing.kind,
        "starts_paused": standing.starts_paused,
        "damaged": list(standing.damaged),
        "status": standing.document,
    }


def _summary(standing: Standing) -> str:
    said = _standing(standing)
    if standing.starts_paused:
        said += "; the next one starts paused"
    if not standing.damaged:
        return said
    from eventpub.state import WITHOUT_FILES

    files = ", ".join(standing.damaged)
    return f"{said}; cannot be read: {files}; to fix it: {WITHOUT_FILES}"


def _standing(standing: Standing) -> str:
    words, found = KINDS[standing.kind], standing.document
    if found is None:
        unknown = "no publisher runs, and how the last one ended is not known"
        return unknown if standing.kind == "stopped" else words
    match standing.kind, found["state"]:
        case "silent", "not answering":
            return f"{words}; {found['checks'][0]['message'].partition(':')[0]}"
        case "stopped", "killed":
            return f"{words}; it was killed, or could not record why it ended"
        case "stopped", _:
            ago = f"{_age(time.time() - found['stopped_at'])} ago"
            by = found["stopped_by"]
            why = f"by {by}" if by else "when it was asked to stop"
            return f"{words}; it ended {ago} {why}"
        case (("starting" | "silent"), _):
            return words
    wrong = [check["name"] for check in found["checks"] if check["state"] == "error"]
    words = f"{found['state']}, {_behind(found)}, {counted(found['holds_open'], 'hold')} open"
    return f"{words}; wrong: {', '.join(wrong)}" if wrong else words


def _behind(found: dict[str, Any]) -> str:
    from eventpub.publisher.workers import MOST_EVENTS  # which imports the store

    if found["lag"]["events"] is None:
        return f"lag {found['lag']['seconds']:,.1f} s, events to read not known"
    unread = found["lag"]["events"] - found["holds_open"]
    or_more = " or more" if unread >= MOST_EVENTS else ""
    return f"lag {found['lag']['seconds']:,.1f} s, {counted(unread, 'event')}{or_more} to read"


def _parts(standing: Standing) -> list[Part]:
    found = standing.document
    if found is None or "checks" not in found:  # the first start has failed
        return []
    parts: list[Part] = [Table(("", ""), _facts(standing.kind, found))]
    if standing.kind != "stopped" or found["state"] != "stopped" or found["stopped_by"]:
        # of one that ended as it was asked to, they say what its end interrupted
        now = found["at"]
        checks = [_check(check, now) for check in found["checks"]]
        parts.append(Table(("check", "", "since", "last ok", ""), checks))
    names = ("shard", "where", "position", "lag", "holds", "published", "last error")
    shards = [_shard(shard, found["at"]) for shard in found["shards"]]
    return [*parts, Table(names, shards)]


def _facts(kind: str, found: dict[str, Any]) -> list[list[Span]]:
    from eventpub.cli.live import COUNTERS, LABELS

    now, counters = found["at"], found["counters"]
    done = [
        f"{counters[n]:,} {LABELS.get(n, n.replace('_', ' '))}" for n in COUNTERS if counters[n]
    ]
    where = f"process {found['pid']} on {found['host']}, {found['version']}"
    facts = {
        "publisher": f"{found['app']}: {found['table']} → {found['topic']}",
        "run": f"{where}, for {_age(now - found['started_at'])}",
        "kept": f"{_age(time.time() - now)} ago",
        "position": _time(found["position"]),
        "rate": f"{found['rates']['published'] or 0:,.0f} events/s",
        "since its start": ", ".join(done) or "nothing published",
    }
    del facts["kept" if kind == "running" else "rate"]
    return [[name, value] for name, value in facts.items()]


def _check(check: dict[str, Any], now: float) -> list[Span]:
    last = "never" if check["last_ok"] is None else f"{_age(now - check['last_ok'])} ago"
    return [
        check["name"],
        (check["state"], _STYLES[check["state"]]),
        _age(now - check["since"]),
        "" if check["state"] == "ok" else last,
        check["message"],
    ]


def _shard(shard: dict[str, Any], now: float) -> list[Span]:
    error, met = shard["last_error"], ""
    if error is not None:
        met = f"{error['code']} {_age(now - error['at'])} ago: {error['message']}"
    return [
        str(shard["shard"]),
        shard["where"] or "-",
        _time(shard["position"]),
        f"{shard['lag_seconds']:,.1f} s",
        f"{shard['holds']:,}",
        f"{shard['published']:,}",
        (met, "red"),
    ]


def _time(position: int | None) -> str:
    from eventpub.config import format_time

    return format_time(position) if position else "beginning"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


@click.command()
@configured("app.id", "app.state_dir", "ops.log")
def pause(request: Request) -> Report:
    """Publish nothing until `eventpub resume`.

    Also after a restart. Returns when the transactions in progress are published. Without a running
    publisher the next one starts paused.
    """
    return _set_paused(request, "pause", is_paused=True)


@click.command()
@configured("app.id", "app.state_dir", "ops.log")
def resume(request: Request) -> Report:
    """Publish again after `eventpub pause`."""
    return _set_paused(request, "resume", is_paused=False)


def _set_paused(request: Request, command: str, *, is_paused: bool) -> Report:
    loaded = request.load()
    from eventpub.ops import status as ops

    outcome = ops.pause(loaded.config, is_paused=is_paused)
    words = {
        "paused": "paused: nothing is published until eventpub resume",
        "resumed": "events are published again",
        "kept": "no publisher runs; the next one starts "
        + ("paused" if is_paused else "without a pause"),
        "no answer": "the publisher is starting, or does not answer; it may act on it later: see"
        " eventpub status",
        "not written": outcome.error,
        "in work": "paused, but transactions are still in progress: see eventpub status",
    }
    result = {"outcome": outcome.outcome}
    return Report(command, outcome.is_done, words[outcome.outcome], result)


_COLUMNS = {
    "open": ("aggregate_id", "first_missing", "seen", "first_seen", "attempts", "next_attempt"),
    "skipped": (
        "aggregate_id", "from_version", "to_version", "skipped_at", "reason", "still_missing",
    ),
    "requests": ("id", "action", "aggregate_id", "from_version", "to_version"),
}  # fmt: skip


@click.group()
def gaps() -> None:
    """List missing versions, or act on one.

    A hold is an aggregate that waits for a missing version. A skip ends a gap without it.
    """


@gaps.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="Number of holds, and of skips, to show.",
)
@configured("app.id", "app.state_dir", "sink.bootstrap_servers", "sink.topic", "ops.log")
def gaps_list(request: Request, limit: int) -> Report:
    """List aggregates that wait for a version (holds), and skipped versions (skips).

    Without a running publisher, the last known ones. Exit status 1 while any aggregate waits.
    """
    loaded = request.load()
    from eventpub.ops.gaps import find
    from eventpub.ops.lookup import with_times

    found = find(loaded.config, limit)
    missing = sum(still for _, still in found.skipped)
    summary = counted(found.open_count, "aggregate is held", "aggregates are held") + ", "
    if found.unread is None:
        recorded = counted(found.skipped_count, "skip is recorded", "skips are recorded")
        of = "" if found.skipped_count <= limit else f" of the last {limit}"
        summary += f"{recorded} ({missing}{of} still missing)"
    else:
        why = f"{found.unread.code}: {found.unread.message}"
        summary += f"the recorded skips cannot be read: {why}"
    if found.requests:
        waiting = counted(len(found.requests), "request waits", "requests wait")
        summary += f", {waiting} for a publisher"
    if found.kind != "running":
        summary += f"; {KINDS[found.kind]}"
    result: dict[str, Any] = {
        "running": found.kind == "running",
        "kind": found.kind,
        "open": [with_times(hold) for hold in found.open],
        "open_count": found.open_count,
        "skipped": found.skips(),
        "skipped_count": found.skipped_count,
        "requests": [_request(request) for request in found.requests],
    }
    return Report(
        "gaps list",
        not found.open_count and found.unread is None,
        summary,
        result,
        parts=[_gaps_table(kind, result[kind]) for kind in _COLUMNS if result[kind]],
        status=None if found.unread is None else found.unread.exit_status,
        error=found.unread,
    )


def _gaps_table(kind: str, entries: list[dict[str, Any]]) -> Table:
    names = _COLUMNS[kind]
    rows = [[_word(entry[name]) for name in names] for entry in entries]
    return Table([name.replace("_", " ") for name in names], rows, kind)


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


_later = click.option(
    "--later", is_flag=True, help="If no publisher is running, keep the request for the next one."
)


@gaps.command("retry")
@click.argument("aggregate_id")
@_later
@configured("app.id", "app.state_dir", "ops.log")
def gaps_retry(request: Request, aggregate_id: str, later: bool) -> Report:
    """Look up an aggregate's missing versions now, held or skipped.

    Exit status 0 if none is missing any more; 1 if any is, or no publisher has looked.
    """
    loaded = request.load()
    from eventpub.ops.gaps import act

    return _acted("retry", aggregate_id, *act(loaded.config, "retry", aggregate_id, later=later))


@gaps.command("skip")
@click.argument("aggregate_id")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_later
@configured("app.id", "app.state_dir", "ops.log")
def gaps_skip(request: Request, aggregate_id: str, yes: bool, later: bool) -> Report:
    """Skip an aggregate's missing versions now. Records the skip; later versions are published."""
    loaded = request.load()
    from eventpub.ops.gaps import act, given_up
    from eventpub.state import StateDir

    gap = given_up(loaded.config, aggregate_id)
    kept: Any = None
    if gap is None:
        outcome = "nothing is held"
    elif not (later or StateDir(loaded.config.app.state_dir).is_running()):
        outcome = "not running"
    elif not (yes or agrees(f"{aggregate_id}: skip {named_versions(*gap)}?")):
        outcome = "not confirmed"
    else:
        outcome, kept = act(loaded.config, "skip", aggregate_id, gap, later=later)
    return _acted("skip", aggregate_id, outcome, kept, gap)


@gaps.command("cancel")
@click.argument("request_or_aggregate_id")
@configured("app.id", "app.state_dir", "ops.log")
def gaps_cancel(request: Request, request_or_aggregate_id: str) -> Report:
    """Withdraw requests kept by --later. One by its id, or all of an aggregate."""
    loaded = request.load()
    from eventpub.ops.gaps import cancel

    cancelled = [_request(r) for r in cancel(loaded.config, request_or_aggregate_id)]
    withdrawn = counted(len(cancelled), "request was withdrawn", "requests were withdrawn")
    done = withdrawn if cancelled else "no request waits"
    summary = f"{request_or_aggregate_id}: {done}"
    return Report("gaps cancel", bool(cancelled), summary, {"cancelled": cancelled})


def _request(request: Any) -> dict[str, Any]:
    return {
        "id": request.id,
        "action": request.action,
        "aggregate_id": request.aggregate_id,
        "from_version": request.version,
        "to_version": request.to_version,
    }


def _acted(
    action: Literal["retry", "skip"],
    aggregate_id: str,
    outcome: str,
    request: Any,
    gap: tuple[int, int] | None = None,
) -> Report:
    from eventpub.ops.gaps import DONE

    named = named_versions(*gap) if gap else "its gap"
    words = {
        "nothing is held": "no gap has this id",
        "skipped": f"skipped, {named}",
        "changed": f"not done: more versions are missing by now than {named}",
        "kept": "kept for the next publisher that runs; eventpub gaps cancel"
        f" {request and request.id} withdraws it",
        "not running": "not done: no publisher is running; --later keeps it for the next one",
        "not confirmed": f"not done: it would skip {named}; --yes confirms it",
        "no answer": "the publisher did not answer in time; the request was withdrawn, unless"
        " already under way: eventpub gaps list shows the outcome",
    }
    summary = f"{aggregate_id}: {words.get(outcome, outcome)}"
    result: dict[str, Any] = {"aggregate_id": aggregate_id, "outcome": outcome}
    if gap is not None:
        result |= {"from_version": gap[0], "to_version": gap[1]}
    if request is not None:
        result["request"] = request.id
    return Report(f"gaps {action}", outcome in DONE, summary, result)
