"""`eventpub gaps`: missing versions, and what to do about them."""

from __future__ import annotations

from typing import Any, Literal

import click

from eventpub.cli.options import Request, agrees, configured
from eventpub.cli.output import Report, Table
from eventpub.terminal import counted, named_versions

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
    from eventpub.cli.status import KINDS
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
        parts=[_table(kind, result[kind]) for kind in _COLUMNS if result[kind]],
        status=None if found.unread is None else found.unread.exit_status,
        error=found.unread,
    )


def _table(kind: str, entries: list[dict[str, Any]]) -> Table:
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
