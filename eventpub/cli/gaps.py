"""`eventpub gaps`: missing versions, and what to do about them."""

from __future__ import annotations

from typing import Any, Literal

import click

from eventpub.cli.options import Request, agrees, configured, reports
from eventpub.cli.output import Report
from eventpub.cli.parts import Table
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

    A hold is an aggregate that waits for a missing version. A skip is a gap that was given up.
    """


@gaps.command("list")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="Show at most so many holds, and so many skips.",
)
@reports
@configured("app.id", "app.state_dir", "sink.bootstrap_servers", "sink.topic", "ops.log")
def gaps_list(request: Request, limit: int) -> Report:
    """List aggregates that wait for a version (holds), and versions that were given up (skips).

    When no publisher runs: as the last one has left them. Exit status 1 while any aggregate waits.
    """
    loaded = request.load()
    from eventpub.cli.status import KINDS
    from eventpub.ops.gaps import find, with_times

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
@reports
@configured("app.id", "app.state_dir", "ops.log")
def gaps_retry(request: Request, aggregate_id: str, later: bool) -> Report:
    """Look up an aggregate's missing versions now, whether they are waited for or were skipped.

    Exit status 1 if they are still missing, or nobody has looked; 0 if none is missing any more.
    """
    loaded = request.load()
    from eventpub.ops.gaps import act

    answer = act(loaded.config, "retry", aggregate_id, later=later)
    return _acted("retry", aggregate_id, answer, "")


@gaps.command("skip")
@click.argument("aggregate_id")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_later
@reports
@configured("app.id", "app.state_dir", "ops.log")
def gaps_skip(request: Request, aggregate_id: str, yes: bool, later: bool) -> Report:
    """Skip an aggregate's missing versions now. Records the skip; later versions are published."""
    loaded = request.load()
    from eventpub.ops.gaps import Answer, act, given_up
    from eventpub.state import StateDir

    gap = given_up(loaded.config, aggregate_id)
    if gap is None:
        return _acted("skip", aggregate_id, Answer("nothing is held"), "")
    named = named_versions(*gap)
    if not (later or StateDir(loaded.config.app.state_dir).is_running()):
        return _acted("skip", aggregate_id, Answer("not running"), named, gap)
    if not (yes or agrees(f"{aggregate_id}: give up {named}?")):
        return _acted("skip", aggregate_id, Answer("not confirmed"), named, gap)
    answer = act(loaded.config, "skip", aggregate_id, gap, later=later)
    return _acted("skip", aggregate_id, answer, named, gap)


@gaps.command("cancel")
@click.argument("request_or_aggregate_id")
@reports
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
    answer: Any,
    named: str,
    gap: tuple[int, int] | None = None,
) -> Report:
    wait = f"gaps cancel {answer.request.id}" if answer.request else ""
    words = {
        "skipped": f"skipped, {named}" if named else "skipped",
        "changed": f"not done: more is missing by now than {named}",
        "kept": f"kept for the next publisher that runs; eventpub {wait} withdraws it",
        "not running": "not done: no publisher is running; --later keeps it for the next one",
        "not confirmed": f"not done: it would give up {named}; --yes does it",
        "no answer": "the publisher did not answer in time; the request was withdrawn, unless"
        " already under way: eventpub gaps list shows the outcome",
    }
    summary = f"{aggregate_id}: {words.get(answer.outcome, answer.outcome)}"
    result: dict[str, Any] = {"aggregate_id": aggregate_id, "outcome": answer.outcome}
    if gap is not None:
        result |= {"from_version": gap[0], "to_version": gap[1]}
    if answer.request is not None:
        result["request"] = answer.request.id
    return Report(f"gaps {action}", answer.is_done, summary, result)
