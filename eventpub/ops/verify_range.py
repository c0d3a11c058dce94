"""The range of `create_time` to compare: what was asked for, or what the publisher has done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventpub.config import Config, format_time, parse_time
from eventpub.errors import ConfigError, StateError
from eventpub.state import StateDir

if TYPE_CHECKING:
    from eventpub.sources.mysql import EventStore
    from eventpub.sources.mysql.zones import Zone

_REPEATED = "{} lies within an hour that the clocks repeat: compared"


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
        if begin != first:
            notes.append(f"{_REPEATED.format('--from')} from {format_time(begin)}")
        first = begin
    if last is not None and (hours := zone.lived_twice(last)):
        position = int(read_state(config, "progress.json").get("position", last))
        end = max(last, min(hours[1] - 1, position))
        if end != last:
            notes.append(f"{_REPEATED.format('--to')} up to {format_time(end)}")
        last = end
    return first, last, notes


def read_state(config: Config, name: str) -> dict[str, Any]:
    """A file of the publisher's state; empty where it cannot be read: others may compare, too."""
    state = StateDir(config.app.state_dir)
    try:
        return state.read(state.root / name) or {}
    except StateError:
        return {}


def _start(config: Config) -> int | None:
    start = read_state(config, "start.json").get("position")
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
    progress = read_state(config, "progress.json")
    if last is not None:
        upto = last
    elif "position" in progress:
        upto = int(progress["position"])
        if holds := progress.get("holds"):
            notes.append(f"{holds} aggregates are held: their events are not published yet")
    else:
        upto = store.now() - config.read.delay
        lacking = f"no publisher's position in {config.app.state_dir}"
        notes.append(f"{lacking}: compared up to the boundary")
    if upto <= after and last is None and first is not None:
        # nothing was written since, or the publisher is behind, which is found afterwards
        last = store.now() - config.read.delay
        notes.append("the publisher has not reached any event created since --from")
    if last is not None and last <= after:
        raise ConfigError(
            "verify.empty_range",
            f"the range from {format_time(after + 1)} to {format_time(last)} is empty",
            where="--from, --to",
            suggestion="give a --from that is before --to, and in the past, and a --to after the"
            " publisher's start",
        )
    return after, max(upto, after), notes
