"""The coordinator's events and commands: what is slow or may fail is a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from eventpub.channel import Beginning, FromRunner, Lane, PartitionId, Request
from eventpub.coordinator.boundary import PAGE_BYTES
from eventpub.errors import EventpubError
from eventpub.sources.base import NewRow
from eventpub.sources.mysql import Layout

Reply: TypeAlias = Callable[[dict[int, str] | EventpubError], None]
"""Called once, in the coordinator's thread, with the answers by shard or an error."""

# -- what happens ----------------------------------------------------------------------------------


class Happened:
    """An event that does not come from a runner."""


@dataclass(frozen=True)
class Tick(Happened):
    """Time has passed."""


@dataclass(frozen=True)
class Done(Happened):
    """A command was carried out; `result`: what it has found, see there."""

    command: Command
    result: Any = None


@dataclass(frozen=True)
class Failed(Happened):
    command: Command
    error: EventpubError


@dataclass(frozen=True)
class RequestReceived(Happened):
    request: Request
    reply: Reply


@dataclass(frozen=True)
class Withdrawn(Happened):
    id: str


@dataclass(frozen=True)
class PauseAsked(Happened):
    """See `state.StateDir.pause`."""

    is_paused: bool
    by: str


@dataclass(frozen=True)
class StopAsked(Happened):
    """The publisher is to stop."""


Event: TypeAlias = FromRunner | Happened


# -- what is to be done ----------------------------------------------------------------------------


class Command:
    """Work for a worker, a runner, the disk or the log."""


@dataclass(frozen=True)
class Poll(Command):
    """Poll the boundary; `reconnect`: over new connections. Result: see `Boundary.poll`."""

    after: int
    next_due: int | None
    with_rows: bool
    reconnect: bool = False
    hidden_since: int | None = None
    page_rows: int | None = None
    page_bytes: int = PAGE_BYTES


@dataclass(frozen=True)
class Count(Command):
    """Count the rows of buckets, each up to a position, µs; `expected`: accounted for by shards."""

    buckets: tuple[int, ...]
    position: int
    expected: Mapping[int, int]
    in_turn: bool


@dataclass(frozen=True)
class Counted:
    """Rows by bucket at database time `now`, µs."""

    now: int
    rows: Mapping[int, int]


@dataclass(frozen=True)
class Sample(Command):
    """Read the rows with the newest ids, or all ids above one."""

    above: int | None = None


@dataclass(frozen=True)
class Sampled:
    """The newest ids; `ahead`: how far, µs, and `rows_ahead`: how many rows lie in the future."""

    rows: Sequence[NewRow]
    ahead: int
    above: int | None = None
    rows_ahead: int = 0


@dataclass(frozen=True)
class MeasureLag(Command):
    """Measure how far the position, µs, is below the boundary."""

    position: int


@dataclass(frozen=True)
class LagMeasured:
    """How far `position` is below the boundary `upper`, both µs."""

    position: int
    upper: int
    seconds: float
    events: int


@dataclass(frozen=True)
class CheckTopic(Command):
    """Check that the topic is the same, and whether others write past these ends."""

    ends: Mapping[PartitionId, int]


@dataclass(frozen=True)
class CheckTable(Command):
    """Read the event table's layout again."""


@dataclass(frozen=True)
class TableChecked:
    """The current layout, and the number of rows whose times keep them from being read."""

    layout: Layout
    never_read: int = 0


@dataclass(frozen=True)
class CheckOpen(Command):
    """Check whether consumers see everything up to these ends; the result: whether they do not."""

    ends: Mapping[PartitionId, int]


@dataclass(frozen=True)
class StartRunner(Command):
    shard: int
    lane: Lane
    beginning: Beginning


@dataclass(frozen=True)
class Reassign(Command):
    """Runners started from now on read the table with this layout."""

    layout: Layout


@dataclass(frozen=True)
class ForgetFormer:
    """After a takeover: remove indexes of former `shards` (None: unchanged) or partitions."""

    shards: int | None


@dataclass(frozen=True)
class Remember(Command):
    """Write the publisher's position durably; `then` clean up."""

    what: Mapping[str, Any]
    then: ForgetFormer | None = None


@dataclass(frozen=True)
class Show(Command):
    """Show the progress."""


@dataclass(frozen=True)
class Log(Command):
    level: Literal["info", "warning"]
    text: str
    facts: Mapping[str, Any]


def warning(text: str, **facts: object) -> Log:
    return Log("warning", text, facts)


@dataclass(frozen=True)
class Finish(Command):
    """The run is over; error None: requested, or everything is published."""

    error: EventpubError | None = None


Do: TypeAlias = Callable[[Command], None]
