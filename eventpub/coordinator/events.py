"""What happens to the coordinator, and what it wants done: two closed sets.

Whatever takes time or may fail is a command; its outcome comes back as an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from eventpub.channel import Beginning, FromRunner, Lane, PartitionId, Request
from eventpub.coordinator.boundary import PollResult
from eventpub.errors import EventpubError
from eventpub.sources.base import NewRow
from eventpub.sources.mysql import Layout

Reply: TypeAlias = Callable[[dict[int, str] | EventpubError], None]
"""Called once, in the coordinator's thread: with the answers by shard, or with the error."""

# -- what happens ----------------------------------------------------------------------------------


class Happened:
    """An event that is not a runner's."""


@dataclass(frozen=True)
class Tick(Happened):
    """Time has passed."""


@dataclass(frozen=True)
class Polled(Happened):
    """The boundary was polled for what was created after `after`, µs."""

    after: int
    result: PollResult


@dataclass(frozen=True)
class Counted(Happened):
    """Rows of buckets, as the database has them at its time `now`, µs.

    Attributes:
        expected: how many the shards had accounted for when they were asked for.
        in_turn: as of `Recount.counted`.
    """

    now: int
    rows: Mapping[int, int]
    expected: Mapping[int, int]
    in_turn: bool


@dataclass(frozen=True)
class Sampled(Happened):
    """The rows with the newest ids.

    Attributes:
        ahead: by how much the newest time lies in the future, µs.
        rows_ahead: how many rows do, counted up to a limit.
    """

    rows: Sequence[NewRow]
    ahead: int
    above: int | None = None
    rows_ahead: int = 0


@dataclass(frozen=True)
class LagMeasured(Happened):
    """How far `position` is below the boundary `upper`, both µs."""

    position: int
    upper: int
    seconds: float
    events: int


@dataclass(frozen=True)
class TopicChecked(Happened):
    """The topic is the same, and no other publisher writes to it."""


@dataclass(frozen=True)
class TableChecked(Happened):
    """What the event table looks like now, and how many rows its times keep from being read."""

    layout: Layout
    never_read: int = 0


@dataclass(frozen=True)
class OpenChecked(Happened):
    """Whether what was published last is kept from consumers."""

    is_left_open: bool


@dataclass(frozen=True)
class Failed(Happened):
    command: Command
    error: EventpubError


@dataclass(frozen=True)
class RequestReceived(Happened):
    """A client requests something that shards carry out."""

    request: Request
    reply: Reply


@dataclass(frozen=True)
class Withdrawn(Happened):
    id: str


@dataclass(frozen=True)
class PauseAsked(Happened):
    """A client asks to pause publishing, or to resume it.

    Attributes:
        reply: called once that is durable, with the number of windows and requests that are still
            finished; or with the error that keeps it from being durable.
        by: who wants it, and since when.
    """

    is_paused: bool
    reply: Callable[[int | EventpubError], None]
    by: str = ""


@dataclass(frozen=True)
class Written(Happened):
    """What was to be remembered is."""

    what: Mapping[str, Any]


@dataclass(frozen=True)
class StopAsked(Happened):
    """The publisher is to stop."""


Event: TypeAlias = FromRunner | Happened


# -- what is to be done ----------------------------------------------------------------------------


class Command:
    """What a worker, a runner, the disk or the log is to do."""


@dataclass(frozen=True)
class Poll(Command):
    """Poll the boundary, as of `Boundary.poll`; `anew`: over new connections."""

    after: int
    next_due: int | None
    with_rows: bool
    anew: bool = False
    hidden_since: int | None = None
    page_rows: int | None = None


@dataclass(frozen=True)
class Count(Command):
    """Count the rows of buckets, each up to a position, µs; see `Counted`."""

    buckets: tuple[int, ...]
    position: int
    expected: Mapping[int, int]
    in_turn: bool


@dataclass(frozen=True)
class Sample(Command):
    """Read the rows with the newest ids; or all above one."""

    above: int | None = None


@dataclass(frozen=True)
class MeasureLag(Command):
    """Measure how far the position, µs, is below the boundary; `read`: rows so far."""

    position: int
    read: int


@dataclass(frozen=True)
class CheckTopic(Command):
    """Check whether the topic is the same, and whether others write past these ends."""

    ends: Mapping[PartitionId, int]


@dataclass(frozen=True)
class CheckTable(Command):
    """Read the event table's layout again."""


@dataclass(frozen=True)
class CheckOpen(Command):
    """Check whether consumers see all up to these ends."""

    ends: Mapping[PartitionId, int]


@dataclass(frozen=True)
class StartRunner(Command):
    """Start a runner of a shard."""

    shard: int
    lane: Lane
    beginning: Beginning


@dataclass(frozen=True)
class Reassign(Command):
    """Runners that start from now on read the table as it is now."""

    layout: Layout


@dataclass(frozen=True)
class ForgetFormer:
    """The indexes of former numbers of shards (None: the same) and partitions are taken over."""

    shards: int | None


@dataclass(frozen=True)
class Remember(Command):
    """Write down, for good, where the publisher is; then forget what is no longer needed."""

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
    """The run is over: why; None: it was asked for, or everything is published."""

    error: EventpubError | None = None


Do: TypeAlias = Callable[[Command], None]
