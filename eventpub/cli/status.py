"""`eventpub status`, `pause` and `resume`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from eventpub.cli.options import Request, configured, is_json_wanted, reports
from eventpub.cli.output import Report, end_if_asked
from eventpub.cli.parts import Part, Span, Table
from eventpub.terminal import counted, for_people

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eventpub.ops.status import Standing

KINDS = {
    "running": "a publisher runs",
    "starting": "a publisher is starting",
    "silent": "a publisher runs, but does not answer: its process is frozen, or waits for a disk or"
    " for CPU; this is what was kept",
    "stopped": "no publisher runs; this is what the last one has left",
    "never": "no publisher has run on this state directory",
}
_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red", "unknown": "yellow"}


@click.command()
@click.option(
    "--watch",
    is_flag=True,
    help="Show it again every second, until Ctrl-C; where stdout is no terminal, the last line of"
    " it. Not with --json.",
)
@reports
@configured("app.id", "app.state_dir", "ops.log")
def status(request: Request, watch: bool) -> Report:
    """Show what the publisher does: its lag, its checks and each shard.

    When none runs: what ended the last one. Exit status 1 if none runs, or a check is wrong.
    """
    if watch and is_json_wanted():
        raise click.UsageError("--watch does not go with --json, which prints one object")
    loaded = request.load()
    from eventpub.ops.status import find

    if watch:
        return _watch(lambda: find(loaded.config))
    standing = find(loaded.config)
    parts = _parts(standing)
    return Report("status", standing.is_well, _summary(standing), _result(standing), parts)


def _watch(find: Callable[[], Standing]) -> Report:
    """Show it anew every second until Ctrl-C, which is how it ends.

    On a terminal in one place; elsewhere, where a pipe's reader waits for lines, the summary.
    """
    from eventpub.cli.console import drawn
    from eventpub.cli.terminal import in_place
    from eventpub.terminal import can_redraw

    class Panel:
        standing = find()

        def __rich__(self) -> RenderableType:
            from rich.console import Group

            return Group(*map(drawn, _parts(self.standing)), _summary(self.standing))

    panel = Panel()
    is_drawn = sys.stdout.isatty() and can_redraw()
    try:
        with in_place(panel, stays=True) if is_drawn else nullcontext():
            while True:
                if not is_drawn:
                    line = " ".join(_summary(panel.standing).split())
                    sys.stdout.write(for_people(line) + "\n")
                    sys.stdout.flush()
                time.sleep(1.0)
                end_if_asked()
                panel.standing = find()
    except KeyboardInterrupt:
        summary, is_well = _summary(panel.standing), panel.standing.is_well
        result = _result(panel.standing)
        return Report("status", is_well, summary, result, text=lambda _: None, status=130)


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
    if standing.kind == "stopped" and found is None:
        return "no publisher runs, and how the last one ended is not known"
    if standing.kind != "running" or found is None:
        if standing.kind == "silent" and found and found["state"] == "not answering":
            return f"{words}; {found['checks'][0]['message'].partition(':')[0]}"
        if found is None or standing.kind != "stopped":
            return words
        if found["state"] == "killed":
            return (
                f"{words}; it was killed, its machine went down, or it could not write down why it"
                " ended (state directory full or read-only)"
            )
        ago = f"{_age(time.time() - found['stopped_at'])} ago"
        why = f"by {found['stopped_by']}" if found["stopped_by"] else "when it was asked to stop"
        return f"{words}; it ended {ago} {why}"
    wrong = [check["name"] for check in found["checks"] if check["state"] == "error"]
    words = f"{found['state']}, {_behind(found)}, {counted(found['holds_open'], 'hold')} open"
    return f"{words}; wrong: {', '.join(wrong)}" if wrong else words


def _behind(found: dict[str, Any]) -> str:
    """Of what is held nobody knows how many events it is."""
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
@reports
@configured("app.id", "app.state_dir", "ops.log")
def pause(request: Request) -> Report:
    """Publish nothing until `eventpub resume`.

    Not even after a restart. Returns when the transactions under way are published. Without a
    running publisher the next one starts paused.
    """
    return _set_paused(request, "pause", is_paused=True)


@click.command()
@reports
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
        "no answer": "the publisher is starting, or does not answer; it may do it later: see"
        " eventpub status",
        "not written": outcome.error,
        "in work": "paused, but what was under way is not finished yet: see eventpub status",
    }
    result = {"outcome": outcome.outcome}
    return Report(command, outcome.is_done, words[outcome.outcome], result)
