"""What happens to the coordinator, and what it wants done: two closed sets.

Whatever takes time or may fail (the database, the broker, the disk, a runner that is started) is a
command. Its outcome comes back as an event, some time later.
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
"""Called once with what came of a request: the answers by shard, or why there are none. From the
coordinator's thread."""

# -- what happens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Polled:
    """The boundary was polled for what was created after `after`, µs."""

    after: int
    result: PollResult


@dataclass(frozen=True)
class Counted:
    """Rows of buckets, as the database has them.

    Attributes:
        now: the database's time, µs.
        rows: by bucket.
        expected: how many the shards had accounted for when they were asked for.
        in_turn: as of `Recount.counted`.
    """

    now: int
    rows: Mapping[int, int]
    expected: Mapping[int, int]
    in_turn: bool


@dataclass(frozen=True)
class Sampled:
    """The rows with the newest ids.

    Attributes:
        ahead: by how much the newest time lies in the future, µs.
        rows_ahead: how many rows do; not all are counted.
        above: as of `Sample`.
    """

    rows: Sequence[NewRow]
    ahead: int
    above: int | None = None
    rows_ahead: int = 0


@dataclass(frozen=True)
class LagMeasured:
    """How far the position is below the boundary.

    Attributes:
        position: when it was asked for, µs.
        upper: the boundary, µs.
    """

    position: int
    upper: int
    seconds: float
    events: int


@dataclass(frozen=True)
class TopicChecked:
    """The topic is the same, and no other publisher writes to it."""


@dataclass(frozen=True)
class TableChecked:
    """What the event table looks like now.

    Attributes:
        never_read: rows that are never read, for the time that they have.
    """

    layout: Layout
    never_read: int = 0


@dataclass(frozen=True)
class OpenChecked:
    """Whether what was published last is kept from consumers."""

    is_left_open: bool


@dataclass(frozen=True)
class Failed:
    command: Command
    error: EventpubError


@dataclass(frozen=True)
class RequestReceived:
    """A client requests something that shards carry out.

    Attributes:
        reply: as of `Reply`.
    """

    request: Request
    reply: Reply


@dataclass(frozen=True)
class Withdrawn:
    id: str


@dataclass(frozen=True)
class PauseAsked:
    """A client asks to pause publishing, or to resume it.

    Attributes:
        reply: called once it is written down, so that a crash does not undo it, with how many
            windows and requests are on their way, which are finished; or with the error because
            of which it is not written down.
        by: who wants it, and since when.
    """

    is_paused: bool
    reply: Callable[[int | EventpubError], None]
    by: str = ""


@dataclass(frozen=True)
class Written:
    """What was to be remembered is.

    Attributes:
        what: as of `Remember`.
    """

    what: Mapping[str, Any]


@dataclass(frozen=True)
class StopAsked:
    """The publisher is to stop."""


Event: TypeAlias = (
    FromRunner
    | Tick
    | Polled
    | Counted
    | Sampled
    | LagMeasured
    | TopicChecked
    | TableChecked
    | OpenChecked
    | Failed
    | RequestReceived
    | Withdrawn
    | PauseAsked
    | Written
    | StopAsked
)


# -- what is to be done ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Poll:
    """Poll the boundary.

    Attributes:
        after: the end of the last window, µs.
        next_due: when a hold is due, µs; None: none is.
        with_rows: read the rows of a full page, too, and of the window after one.
        anew: over new connections, since the address may lead to another server.
    """

    after: int
    next_due: int | None
    with_rows: bool
    anew: bool = False
    hidden_since: int | None = None


@dataclass(frozen=True)
class Count:
    """Count the rows of buckets, each up to a position, µs; see `Counted`."""

    buckets: tuple[int, ...]
    position: int
    expected: Mapping[int, int]
    in_turn: bool


@dataclass(frozen=True)
class Sample:
    """Read the rows with the newest ids; or all above one."""

    above: int | None = None


@dataclass(frozen=True)
class MeasureLag:
    """Measure how far the position is below the boundary.

    Attributes:
        position: everything created at or before is read, µs.
        read: rows read so far.
    """

    position: int
    read: int


@dataclass(frozen=True)
class CheckTopic:
    """Check whether the topic is the same, and whether others have written.

    Attributes:
        ends: of partitions in which nothing was written for a while.
    """

    ends: Mapping[PartitionId, int]


@dataclass(frozen=True)
class CheckTable:
    """Read the event table's layout again."""


@dataclass(frozen=True)
class CheckOpen:
    """Check whether consumers see all up to these ends."""

    ends: Mapping[PartitionId, int]


@dataclass(frozen=True)
class StartRunner:
    """Start a runner of a shard.

    Attributes:
        lane: brings its work.
    """

    shard: int
    lane: Lane
    beginning: Beginning


@dataclass(frozen=True)
class Reassign:
    """Runners that start from now on read the table as it is now."""

    layout: Layout


@dataclass(frozen=True)
class ForgetFormer:
    """The indexes of former numbers of shards and partitions are taken over: remove them.

    Attributes:
        shards: the former number of shards; None: it was the same.
    """

    shards: int | None


@dataclass(frozen=True)
class Remember:
    """Write down, for good, where the publisher is.

    Attributes:
        then: what is no longer needed once that is written.
    """

    what: Mapping[str, Any]
    then: ForgetFormer | None = None


@dataclass(frozen=True)
class Show:
    """Show the progress."""


@dataclass(frozen=True)
class Log:
    level: Literal["info", "warning"]
    text: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Finish:
    """The run is over.

    Attributes:
        error: why; None: it was asked for, or everything is published.
    """

    error: EventpubError | None = None


Command: TypeAlias = (
    Poll
    | Count
    | Sample
    | MeasureLag
    | CheckTopic
    | CheckTable
    | CheckOpen
    | StartRunner
    | Reassign
    | Remember
    | Show
    | Log
    | Finish
)

Do: TypeAlias = Callable[[Command], None]
"""Takes what is to be done, in order."""
