"""The range of `create_time` to compare: what was asked for, or what the publisher has done."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from eventpub.config import Config, format_time, parse_time
from eventpub.errors import ConfigError

if TYPE_CHECKING:
    from eventpub.sources.mysql import EventStore
    from eventpub.sources.mysql.zones import Zone


def whole_hours(
    config: Config, zone: Zone | None, first: int | None, last: int | None
) -> tuple[int | None, int | None, list[str]]:
    """A range that neither begins nor ends within an hour that is lived twice, and notes about it.

    The table cannot tell which of two instants a row of it is of, so what lies on one side of a
    bound within it cannot be compared. It never becomes wider than what the publisher has done.
    """
    if zone is None or (first is not None and last is not None and last < first):
        return first, last, []
    notes: list[str] = []
    if first is not None and (hours := zone.lived_twice(first)):
        start = _start(config)
        begin = min(first, max(hours[0], 0 if start is None else start + 1))
        notes += _widened("--from", "from", first, begin)
        first = begin
    if last is not None and (hours := zone.lived_twice(last)):
        position = int(state(config, "progress.json").get("position", last))
        end = max(last, min(hours[1] - 1, position))
        notes += _widened("--to", "up to", last, end)
        last = end
    return first, last, notes


def _widened(option: str, direction: str, asked: int, bound: int) -> list[str]:
    if bound == asked:
        return []
    when = format_time(bound)
    return [f"{option} lies within an hour that the clocks repeat: compared {direction} {when}"]


def _start(config: Config) -> int | None:
    """The position at which the publisher began; None where that is not known."""
    start = state(config, "start.json").get("position")
    if start is not None:
        return int(start)
    if config.read.start == "now":
        return None
    return 0 if config.read.start == "beginning" else parse_time(config.read.start)


def compared_range(
    config: Config, store: EventStore, first: int | None, last: int | None
) -> tuple[int, int, list[str]]:
    notes: list[str] = []
    if first is not None:
        after = first - 1
    elif (start := _start(config)) is not None:
        after = start
    else:
        raise ConfigError(
            "verify.start_unknown",
            "read.start is 'now' and the publisher's state does not say when that was",
            where="app.state_dir",
            suggestion="give --from, or run this where the publisher's app.state_dir is",
        )
    progress = state(config, "progress.json")
    if last is not None:
        upto = last
    elif "position" in progress:
        upto = int(progress["position"])
        if holds := progress.get("holds"):
            notes.append(f"{holds} aggregates are held: their events are not published yet")
    else:
        upto = store.now() - config.read.delay
        is_there = os.path.exists(config.app.state_dir / "progress.json")
        lacking = "no state that can be read" if is_there else "no publisher's state"
        notes.append(f"{lacking} in {config.app.state_dir}: compared up to the boundary")
    if upto <= after and last is None and first is not None:
        # nobody has written since, or the publisher is behind, which is found afterwards
        last = store.now() - config.read.delay
        notes.append("the publisher has not reached any event created since --from")
    if last is not None and last <= after:
        raise ConfigError(
            "verify.empty_range",
            f"nothing lies between {format_time(after + 1)} and {format_time(last)}",
            where="--from, --to",
            suggestion="give a --from that is before --to, and in the past, and a --to after the"
            " publisher's start",
        )
    return after, max(upto, after), notes


def state(config: Config, name: str) -> dict[str, Any]:
    """One of the publisher's own notes; empty where there is none that can be read."""
    try:
        data = json.loads((config.app.state_dir / name).read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
