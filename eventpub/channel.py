"""What the coordinator and the shards' runners say to each other.

Runners are threads of the same process. A shard has one at a time: the next one is started when
`Ended` of the last has come.

    coordinator → runner   any number of Window, Comparison, Request; Stop
    runner → coordinator   any number of Report, Folding; Ended, which is the last

A runner is started with a `Beginning`. It does its work in order and reports after each committed
transaction, and after each window, comparison and request. It may end at any moment: the next one
reads the topic back. So a report carries the present state (position, offsets, holds) as a whole,
and what happened since the report before. All times are µs on the database's clock.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter

from eventpub.admission import Counts
from eventpub.errors import EventpubError

PartitionId: TypeAlias = tuple[str, int]

LATENCY_BOUNDS = (
    0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip
"""Seconds: inclusive upper bounds; a last bucket is for all above."""


# -- to a runner -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beginning:
    """What a runner knows of its shard when it is started.

    Attributes:
        low: the shard's position, or just before its oldest hold; of all shards until it has
            reported. Without an index it reads from there, minus the horizon.
        position: up to where all shards have accounted for everything.
        acknowledged: next offsets that shards have ever reported.
        is_placed: whether all that is on the topic was written with this number of partitions.
        uncounted_since: nothing that is to be counted out of turn was created at or before.
        hidden_since: nothing that may be unpublished below `low` was created at or before.
        former_shards: the number of shards of the run before, if it differs.
        former_indexes: folders of the indexes of another number of partitions.
    """

    low: int
    position: int
    acknowledged: dict[PartitionId, int] = field(default_factory=dict)
    is_placed: bool = False
    uncounted_since: int | None = None
    hidden_since: int | None = None
    former_shards: int | None = None
    former_indexes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Window:
    """How far the shard may read. It begins where the one before ended.

    One that ends where the one before did is for holds that are due.

    Attributes:
        number: counts the windows of a runner; a report names the last that is done.
        upto: events created at or before belong to it.
        open_since: when the oldest open transaction began; None: there is none, or it is unknown. A
            gap that was seen after it is not skipped.
        hidden_since: nothing that open transactions hide was created at or before; None: unknown.
        uncounted_since: as of `Beginning`.
        after: where the rows begin, if they come along.
        rows: the shard's rows of ``after < create_time <= upto``, schema `EVENTS`; None: the runner
            reads them itself.
    """

    number: int
    upto: int
    open_since: int | None = None
    hidden_since: int | None = None
    uncounted_since: int | None = None
    after: int = 0
    rows: pa.Table | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Comparison:
    """Buckets (seconds of `create_time`) whose keys all shards compare with their indexes.

    Each has a higher number; a shard reports the last that it has done.
    """

    number: int = 0
    buckets: tuple[int, ...] = ()


Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]


@dataclass(frozen=True)
class Request:
    """What a client asks the publisher to do with one aggregate, or to show.

    Attributes:
        action: "retry" looks for what is missing now; "skip" gives the open gap up now; "list"
            shows open holds and what is missing of skips; "publish" publishes a row that is not on
            the topic.
        aggregate_id: whose; "" for a list of all.
        version: the first to give up, without which none is; of "publish": the row's.
        to_version: the last to give up; None: all up to the first one that is there.
        searched: of "publish": by partition of the topic, up to which offset it does not have the
            event. The shard searches the rest: it is published once, however often it is asked for.
        most: of "list": so many holds, those that were seen first.
        about: of "list": also the holds of these aggregates, and what is missing of their skips.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    id: str
    action: Literal["retry", "skip", "list", "publish"]
    aggregate_id: str = ""
    version: Int64 | None = None
    to_version: Int64 | None = None
    searched: tuple[Int64, ...] = ()
    most: Int64 = 0
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stop:
    """Finish the transaction in work and leave."""


Work: TypeAlias = Window | Comparison | Request | Stop


_IDLE_AFTER = 60.0
"""Seconds without work after which a runner may do what is due now and then."""


class Lane:
    """The queue of one runner's work; what is left in it when the runner has ended is dropped.

    Attributes:
        is_stopping: whether the runner is to leave; asked wherever something may take long.
    """

    def __init__(self) -> None:
        self.is_stopping = False
        self._sent: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

    def send(self, message: Work) -> None:
        """Have it done, after what was sent before; neither waits nor raises."""
        if isinstance(message, Stop):
            self.is_stopping = True
        self._sent.put(message)

    def receive(self) -> Work | None:
        """Wait for the next work; None: `wake` was called, or nothing has come for a while."""
        try:
            return self._sent.get(timeout=_IDLE_AFTER)
        except queue.Empty:
            return None

    def wake(self) -> None:
        self._sent.put(None)


# -- from a runner ---------------------------------------------------------------------------------


@dataclass
class Report:
    """What a shard has done since its last report, and where it is now.

    Attributes:
        done: number of the last window that is done.
        position: everything created at or before is accounted for.
        low: the position, or just before the shard's oldest hold; see `Beginning`.
        hidden_since: as of the last `Window`.
        next_due: when the next hold is due; None: nothing is held.
        offsets: next offset of each of the shard's partitions.
        counts, published: rows, and records of events made visible, since the last report; so are
            all that follow.
        folded: records that another process, or an earlier one, had published.
        replaced: producers that were given up after an indefinite answer or an abort.
        restored: records republished because their transaction's marker was lost.
        recount_found: events published that only a recount has found.
        begin_above: aggregates seen for the first time, whose first version is missing.
        skipped: gaps that were given up, as `admission.SkippedGap`; the first ones of very many.
        dead: rows that were dead-lettered: `aggregate_id`, `version`, `reason`.
        buckets: rows accounted for by bucket, where that has changed; in the first report all.
        read_before: position of the index when the runner began; None: a later report, or a new
            index.
        compared, unfinished: the last `Comparison` that was done, and its buckets with something
            left.
        answers: by id of the request.
        not_ours: records on the topics that this publisher has not written.
        jumps: versions on the topic that cannot have been published there in order.
        made_again: topics that were deleted and created again since the index was written.
        is_placed: whether all partitions were read from their beginnings, and all records are where
            they would be written today.
        baseline: events created at or before count as published: index and topic have forgotten
            them.
        repeats_after: events created later may be published again, for the same reason.
        rebuilt: why its index is rebuilt from the topic; None: it is not.
        took: seconds of a micro-batch from its begin until it was decided.
        latency, latency_sum: ages of published events at their commit, by `LATENCY_BOUNDS`; and s.
        index_bytes: size of the index; None: not measured this time.
    """

    shard: int
    done: int = 0
    position: int = 0
    low: int = 0
    hidden_since: int | None = None
    holds: int = 0
    next_due: int | None = None
    offsets: dict[PartitionId, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    published: int = 0
    folded: int = 0
    replaced: int = 0
    restored: int = 0
    recount_found: int = 0
    begin_above: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    dead: list[dict[str, Any]] = field(default_factory=list)
    buckets: dict[int, int] = field(default_factory=dict)
    read_before: int | None = None
    compared: int = 0
    unfinished: list[int] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    not_ours: int = 0
    jumps: list[dict[str, Any]] = field(default_factory=list)
    made_again: list[str] = field(default_factory=list)
    is_placed: bool = False
    baseline: int | None = None
    repeats_after: int | None = None
    rebuilt: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    took: float = 0.0
    latency: list[int] = field(default_factory=list)
    latency_sum: float = 0.0
    index_bytes: int | None = None


@dataclass(frozen=True)
class Folding:
    """How far a shard has read its topics back: records so far, and offsets left."""

    shard: int
    read: int
    left: int


@dataclass(frozen=True)
class Ended:
    """A shard's runner has ended, without an error where it was asked to."""

    shard: int
    error: EventpubError | None = None


FromRunner: TypeAlias = Report | Folding | Ended
Post: TypeAlias = Callable[[FromRunner], None]


# -- what is kept or comes from elsewhere ----------------------------------------------------------


class MalformedError(ValueError):
    """No message of this version."""


def fields_of(report: Report) -> dict[str, Any]:
    """A report's fields, for JSON."""
    offsets = [[*place, offset] for place, offset in report.offsets.items()]
    return vars(report) | {"counts": vars(report.counts), "offsets": offsets}


def report_of(given: dict[str, Any]) -> Report:
    """The report of which these are the `fields_of`.

    Raises:
        MalformedError: there is none.
    """
    try:
        offsets = {(topic, partition): end for topic, partition, end in given["offsets"]}
        buckets = {int(bucket): rows for bucket, rows in given["buckets"].items()}
        counts = Counts(**given["counts"])
        return Report(**{**given, "offsets": offsets, "buckets": buckets, "counts": counts})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"not a report of this version: {_short(error)}") from error


def request_of(given: Any) -> Request:
    """The request whose fields these are.

    Raises:
        MalformedError: it is none.
    """
    try:
        return _requests().validate_json(json.dumps(given))
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedError(f"not a request of this version: {_short(error)}") from error


@cache
def _requests() -> TypeAdapter[Request]:
    return TypeAdapter(Request)


def _short(error: Exception) -> str:
    text = repr(error)
    return text if len(text) <= 200 else f"{text[:200]}…"
