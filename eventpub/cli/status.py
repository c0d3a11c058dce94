"""Commands that ask the publisher: `eventpub status`, `pause`, `resume` and `gaps`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from eventpub.cli.options import agrees, configured, limited
from eventpub.cli.output import Part, Report, age, facts, table
from eventpub.errors import counted, named_versions

if TYPE_CHECKING:
    from eventpub.config import Config

_KEYS = "app.id", "app.state_dir", "ops.log"
KINDS = {
    "running": "a publisher runs",
    "starting": "a publisher is starting",
    "silent": "a publisher runs, but does not answer: its process is frozen, or waits for a disk or"
    " for CPU; this is its last known status",
    "stopped": "no publisher runs; this is what the last one recorded",
    "never": "no publisher has run on this state directory",
}


@click.command()
@configured(*_KEYS)
def status(config: Config) -> Report:
    """Show what the publisher does: its lag, its checks and each shard.

    If none runs, the last known status and why it ended. Exit status 1 if none runs or a check
    fails.
    """
    from eventpub.coordinator.status import is_ready
    from eventpub.ops.status import find
    from eventpub.state import WITHOUT_FILES

    found = find(config)
    summary = _standing(found["kind"], found["status"])
    if found["starts_paused"]:
        summary += "; the next one starts paused"
    if found["damaged"]:
        files = ", ".join(found["damaged"])
        summary += f"; cannot be read: {files}; to fix it: {WITHOUT_FILES}"
    is_well = found["running"] and is_ready(found["status"])
    return Report(is_well, summary, found, _parts(found["kind"], found["status"]))


def _standing(kind: str, found: dict[str, Any] | None) -> str:
    words = KINDS[kind]
    if found is None:
        unknown = "no publisher runs, and how the last one ended is not known"
        return unknown if kind == "stopped" else words
    match kind, found["state"]:
        case "silent", "not answering":
            return f"{words}; {found['checks'][0]['message'].partition(':')[0]}"
        case "stopped", "killed":
            return f"{words}; it was killed, or could not record why it ended"
        case "stopped", _:
            by = found["stopped_by"]
            why = f"by {by}" if by else "when it was asked to stop"
            return f"{words}; it ended {age(found['stopped_at'])} {why}"
        case (("starting" | "silent"), _):
            return words
    wrong = [check["name"] for check in found["checks"] if check["state"] == "error"]
    words = f"{found['state']}, {_behind(found)}, {counted(found['holds_open'], 'hold')} open"
    return f"{words}; wrong: {', '.join(wrong)}" if wrong else words


def _behind(found: dict[str, Any]) -> str:
    from eventpub.publisher.workers import MOST_EVENTS  # which imports the store

    lag, events = f"lag {found['lag']['seconds']:,.1f} s", found["lag"]["events"]
    if events is None:
        return f"{lag}, events to read not known"
    unread = events - found["holds_open"]
    or_more = " or more" if unread >= MOST_EVENTS else ""
    return f"{lag}, {counted(unread, 'event')}{or_more} to read"


def _parts(kind: str, found: dict[str, Any] | None) -> list[Part]:
    if found is None or "checks" not in found:  # the first start has failed
        return []
    known = {
        "publisher": f"{found['app']}: {found['table']} → {found['topic']}",
        "process": f"{found['pid']} on {found['host']}, {found['version']}",
        "started": found["started_at"],
        "as_of": found["at"],
        "position": found["position"],
    }
    if kind == "running":
        known["rate"] = f"{found['rates']['published'] or 0:,.0f} events/s"
    counts = {name: f"{number:,}" for name, number in found["counters"].items() if number}
    shards = "shard where position lag_seconds holds published last_error"
    # of one that ended as it was asked to, they say what its end interrupted
    is_over = (kind, found["state"]) == ("stopped", "stopped") and not found["stopped_by"]
    checks = [] if is_over else found["checks"]
    return [
        facts(known | counts),
        *table(checks, "name state since last_ok message"),
        *table(found["shards"], shards),
    ]


@click.command()
@configured(*_KEYS)
def pause(config: Config) -> Report:
    """Publish nothing until `eventpub resume`.

    Also after a restart. Returns when the transactions in progress are published. Without a running
    publisher the next one starts paused.
    """
    return _set_paused(config, is_paused=True)


@click.command()
@configured(*_KEYS)
def resume(config: Config) -> Report:
    """Publish again after `eventpub pause`."""
    return _set_paused(config, is_paused=False)


def _set_paused(config: Config, *, is_paused: bool) -> Report:
    from eventpub.ops import status as ops

    outcome = ops.pause(config, is_paused=is_paused)
    words = {
        "paused": "paused: nothing is published until eventpub resume",
        "resumed": "events are published again",
        "kept": "no publisher runs; the next one starts "
        + ("paused" if is_paused else "without a pause"),
        "no answer": "the publisher does not answer; it obeys when it can: see eventpub status",
        "in work": "paused, but transactions are still in progress: see eventpub status",
    }
    return Report(outcome in ops.PAUSED, words[outcome], {"outcome": outcome})


_COLUMNS = {
    "open": "aggregate_id first_missing seen first_seen attempts next_attempt",
    "skipped": "aggregate_id from_version to_version skipped_at reason still_missing",
    "requests": "id action aggregate_id from_version to_version",
}


@click.group()
def gaps() -> None:
    """List missing versions, or act on one.

    A hold is an aggregate that waits for a missing version. A skip ends a gap without it.
    """


@gaps.command("list")
@limited("Number of holds, and of skips, to show.", default=50, most=100_000)
@configured("app.id", "app.state_dir", "sink.bootstrap_servers", "sink.topic", "ops.log")
def gaps_list(config: Config, limit: int) -> Report:
    """List aggregates that wait for a version (holds), and skipped versions (skips).

    Without a running publisher, the last known ones. Exit status 1 while any aggregate waits.
    """
    from eventpub.ops.gaps import find

    found, unread = find(config, limit)
    summary = counted(found["open_count"], "aggregate is held", "aggregates are held") + ", "
    if unread is None:
        count, missing = found["skipped_count"], sum(s["still_missing"] for s in found["skipped"])
        of = "" if count <= limit else f" of the last {limit}"
        summary += counted(count, "skip is recorded", "skips are recorded")
        summary += f" ({missing}{of} still missing)"
    else:
        summary += f"the recorded skips cannot be read: {unread.code}: {unread.message}"
    if found["requests"]:
        waiting = counted(len(found["requests"]), "request waits", "requests wait")
        summary += f", {waiting} for a publisher"
    if not found["running"]:
        summary += f"; {KINDS[found['kind']]}"
    return Report(
        not found["open_count"] and unread is None,
        summary,
        found,
        [part for kind in _COLUMNS for part in table(found[kind], _COLUMNS[kind], kind)],
        status=None if unread is None else unread.exit_status,
        error=unread,
    )


_later = click.option(
    "--later", is_flag=True, help="If no publisher is running, keep the request for the next one."
)


@gaps.command("retry")
@click.argument("aggregate_id")
@_later
@configured(*_KEYS)
def gaps_retry(config: Config, aggregate_id: str, later: bool) -> Report:
    """Look up an aggregate's missing versions now, held or skipped.

    Exit status 0 if none is missing any more; 1 if any is, or no publisher has looked.
    """
    from eventpub.ops.gaps import act

    return _acted(aggregate_id, *act(config, "retry", aggregate_id, later=later))


@gaps.command("skip")
@click.argument("aggregate_id")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_later
@configured(*_KEYS)
def gaps_skip(config: Config, aggregate_id: str, yes: bool, later: bool) -> Report:
    """Skip an aggregate's missing versions now. Records the skip; later versions are published."""
    from eventpub.ops.gaps import act, given_up
    from eventpub.state import StateDir

    gap = given_up(config, aggregate_id)
    kept: Any = None
    if gap is None:
        outcome = "nothing is held"
    elif not (later or StateDir(config.app.state_dir).is_running()):
        outcome = "not running"
    elif not (yes or agrees(f"{aggregate_id}: skip {named_versions(*gap)}?")):
        outcome = "not confirmed"
    else:
        outcome, kept = act(config, "skip", aggregate_id, gap, later=later)
    return _acted(aggregate_id, outcome, kept, gap)


@gaps.command("cancel")
@click.argument("request_or_aggregate_id")
@configured(*_KEYS)
def gaps_cancel(config: Config, request_or_aggregate_id: str) -> Report:
    """Withdraw requests kept by --later. One by its id, or all of an aggregate."""
    from eventpub.ops.gaps import cancel, shown_request
    from eventpub.state import StateDir

    is_running = StateDir(config.app.state_dir).is_running()
    cancelled = [shown_request(r) for r in cancel(config, request_or_aggregate_id)]
    done = counted(len(cancelled), "request was withdrawn", "requests were withdrawn")
    if is_running:
        done += ", unless already under way"
    summary = f"{request_or_aggregate_id}: {done if cancelled else 'no request waits'}"
    return Report(bool(cancelled), summary, {"cancelled": cancelled})


def _acted(
    aggregate_id: str, outcome: str, request: Any, gap: tuple[int, int] | None = None
) -> Report:
    from eventpub.ops.gaps import DONE

    named = named_versions(*gap) if gap else "its gap"
    or_skipped = " or skipped" * (request is not None and request.action == "retry")
    words = {
        "nothing is held": f"nothing is held{or_skipped} for this aggregate",
        "skipped": f"skipped, {named}",
        "changed": f"not done: more versions are missing by now than {named}",
        "kept": "kept for the next publisher that runs; eventpub gaps cancel"
        f" {request and request.id} withdraws it",
        "not running": "not done: no publisher is running; --later keeps it for the next one",
        "not confirmed": f"not done: it would skip {named}; --yes confirms it",
        "no answer": "the publisher did not answer in time; the request was withdrawn, unless"
        " already under way: eventpub gaps list shows the outcome",
    }
    result: dict[str, Any] = {"aggregate_id": aggregate_id, "outcome": outcome}
    if gap is not None:
        result |= {"from_version": gap[0], "to_version": gap[1]}
    if request is not None:
        result["request"] = request.id
    return Report(outcome in DONE, f"{aggregate_id}: {words.get(outcome, outcome)}", result)
