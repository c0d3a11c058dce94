"""Messages between the coordinator and the shards' runners, which are threads of one process.

A shard has one runner at a time: the next starts after the `Ended` of the last. It starts with a
`Beginning`, works in order, and reports after each committed transaction, window, comparison and
request. It may end at any moment, and the next one reads the topic back: so a report carries the
full state (position, offsets, holds) and what happened since the previous report. All times are µs
on the database's clock.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter

from eventpub.admission.model import Counts
from eventpub.errors import EventpubError

PartitionId: TypeAlias = tuple[str, int]

LATENCY_BOUNDS = (
    0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip
"""Upper bounds, s, inclusive; the last bucket counts all above."""


def latencies(created: npt.NDArray[np.int64], now: float) -> tuple[list[int], float]:
    """Counts of events by age, and the sum of their ages in s; times in µs."""
    ages = np.maximum((now - created) / 1e6, 0.0)
    counts = np.bincount(np.searchsorted(LATENCY_BOUNDS, ages), minlength=len(LATENCY_BOUNDS) + 1)
    return counts.tolist(), float(ages.sum())


# -- to a runner -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beginning:
    """What a runner knows of its shard when it starts.

    Attributes:
        low: the shard's position, or just before its oldest hold; the minimum of all shards until
            it has reported. Without an index the runner reads from there, minus the horizon.
        position: all shards have accounted for everything created up to here.
        is_placed: everything on the topic was written with this number of partitions.
        uncounted_since: rows to be counted out of turn were created after this.
        hidden_since: rows below `low` that may be unpublished were created after this.
        former_shards: of the previous run, if different.
        former_indexes: folders of indexes for another number of partitions.
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
    """How far the shard may read, from the end of the previous window.

    Attributes:
        upto: inclusive end; the previous one if the window is for holds that are due.
        open_since: start of the oldest open transaction; None: none, or unknown. A gap first seen
            later is not skipped.
        hidden_since: rows hidden by open transactions were created after this; None: unknown.
        after: exclusive start of `rows`.
        rows: the shard's, schema `EVENTS`; None: the runner reads them itself.
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
    """Buckets (seconds of `create_time`) whose keys all shards compare with their indexes."""

    number: int = 0
    buckets: tuple[int, ...] = ()


Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]


@dataclass(frozen=True)
class Request:
    """A client's request.

    Attributes:
        action: "retry" looks for missing versions now; "skip" gives up the open gap; "list" shows
            holds and versions missing from skips; "publish" publishes a row not on the topic.
        aggregate_id: of all but "list".
        version: the row's to publish, or the first to skip; None: skips none.
        to_version: the last to skip; None: up to the first present one.
        searched: of "publish": per partition, the offset up to which the event was not found. The
            shard searches the rest, so repeated requests publish it once.
        most, about: of "list": limit of holds, first seen first; aggregates to include in any case.
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
    """Finish the current transaction and exit."""


Work: TypeAlias = Window | Comparison | Request | Stop


_IDLE_AFTER = 60.0
"""Seconds without work after which `Lane.receive` returns, so that periodic work can run."""


class Lane:
    """A runner's queue of work; what is left when the runner ends is dropped."""

    def __init__(self) -> None:
        self.is_stopping = False
        self._sent: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

    def send(self, message: Work) -> None:
        """Enqueue work; never blocks or raises."""
        if isinstance(message, Stop):
            self.is_stopping = True
        self._sent.put(message)

    def receive(self) -> Work | None:
        """Wait for the next work; None: `wake` was called, or none came in time."""
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
        done, compared: numbers of the last window and comparison done.
        position: everything created up to here is accounted for.
        low: the position, or just before the shard's oldest hold.
        next_due: when the next hold is due; None: nothing is held.
        offsets: next offset of each of the shard's partitions.
        counts, published: rows, and event records made visible, since the last report, like all
            below.
        folded: records found on the topic that another or an earlier process published.
        replaced: producers replaced after an indefinite answer or an abort.
        restored: records republished because their transaction's marker was lost.
        begin_above: new aggregates whose first version is missing.
        skipped: gaps given up, as `admission.SkippedGap`; the first ones of very many.
        dead: `aggregate_id`, `version` and `reason` of dead-lettered rows.
        buckets: rows accounted for, by changed bucket; all buckets in the first report.
        read_before: the index's position at the start; None: not the first report, or a new index.
        unfinished: buckets of the comparison with something left.
        answers: by request id.
        not_ours: records on the topics that this publisher has not written.
        jumps: versions on the topic that cannot have been published in order.
        made_again: topics recreated since the index was written.
        is_placed: all partitions were read from their beginnings, and every record is where it
            would be written today.
        baseline: events created up to here count as published: index and topic have forgotten them.
        repeats_after: events created later may be published again, for the same reason.
        rebuilt: why the index is rebuilt from the topic; None: it is not.
        took: seconds to decide a micro-batch.
        latency, latency_sum: ages of events at commit, by `LATENCY_BOUNDS`; their sum in s.
        oldest: `create_time` of the oldest published event, of a micro-batch; None: it has none.
        rows_in: the last micro-batch with rows to publish, up to this one; 0: none.
        journal, follows: random names of a micro-batch's journal and of the one before.
        index_bytes: None: not measured this time.
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
    oldest: int | None = None
    rows_in: int = 0
    journal: str = ""
    follows: str = ""
    index_bytes: int | None = None


@dataclass(frozen=True)
class Folding:
    """Progress of reading the topics back: records read, offsets left."""

    shard: int
    read: int
    left: int


@dataclass(frozen=True)
class Ended:
    shard: int
    error: EventpubError | None = None


FromRunner: TypeAlias = Report | Folding | Ended
Post: TypeAlias = Callable[[FromRunner], None]


# -- what is kept or comes from elsewhere ----------------------------------------------------------


class MalformedError(ValueError):
    """Not a message of this version."""


def fields_of(report: Report) -> dict[str, Any]:
    """A report's fields as JSON-serializable values."""
    offsets = [[*place, offset] for place, offset in report.offsets.items()]
    return vars(report) | {"counts": vars(report.counts), "offsets": offsets}


def report_of(given: dict[str, Any]) -> Report:
    """Inverse of `fields_of`; raises `MalformedError`."""
    try:
        offsets = {(topic, partition): end for topic, partition, end in given["offsets"]}
        buckets = {int(bucket): rows for bucket, rows in given["buckets"].items()}
        counts = Counts(**given["counts"])
        return Report(**{**given, "offsets": offsets, "buckets": buckets, "counts": counts})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"not a report of this version: {_short(error)}") from error


def request_of(given: Any) -> Request:
    """Validate a request; raises `MalformedError`."""
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
