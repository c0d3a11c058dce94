"""The `eventstore` source for Spark Structured Streaming: the dynamic boundary.

    spark.dataSource.register(EventStoreDataSource)
    spark.readStream.format("eventstore").option("url", "mysql+pymysql://…").load()

One row an event: `aggregate_id string, version bigint, event_type string, payload binary, metadata
string, create_time timestamp`, in windows of `create_time` that end at *database now − delay*, or
at the `page_rows`-th row while the store is ahead. Rows that commit behind the window are not seen
by this source alone: the publisher finds them by their versions.

Options: the keys of `[store]` (`url`, `password`, `password_file`, `table`, `first_version`,
`time_zone`, `columns.aggregate_id` …) and of `[read]` (`start`, `delay`, `page_rows`, `watermark`,
`max_wait`), by the names that they have in `eventpub.toml`, and `shards` (default 1), the number of
Spark partitions; `partitions` (default: `shards`) is the number of Kafka partitions that they are
shards of.

The offset is ``{"position": µs, "tick": n}``: the upper bound of the last window in database time,
UTC, and a count of batches that were asked for without any time having passed.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from eventpub.admission import Shard
from eventpub.config import Read, Store
from eventpub.errors import ConfigError, EventpubError, StoreError
from eventpub.spark.boundary import BatchOver, Bounds, MovingBoundary, edition_of
from eventpub.spark.failpoint import failpoint
from eventpub.spark.page_files import PageFiles
from eventpub.spark.passed import Passed
from eventpub.store import EventStore, Poll, Watermark

ROWS = (
    "aggregate_id string, version bigint, event_type string, payload binary, metadata string, "
    "create_time timestamp"
)
WINDOWS = (
    "shard int, after bigint, upto bigint, moves boolean, more boolean, open_since bigint, "
    "watermark string, passed bigint, hidden_since bigint"
)

_BEFORE_IT_SHOWS = 100_000
"""µs in which a statement that has begun shows among the open transactions, with a wide margin."""

_SHOWS_AT_LAST = 3_000_000
"""µs in which it does, whatever it does before the engine knows of it: an INSERT shows in the list
of processes from two seconds on. Nobody waits for that, but what it hides is older by so much."""

_LOOKS_FOR = 0.5
"""Seconds for which the source itself looks for new rows; a stop may have to wait for its end."""

_LOOKS_RESTING = 0.3
"""Where nothing has come for a while, the next look is after that part of the delay, at most after
so many seconds. Rows that are seen when a third of their delay has passed are not read later than
others."""

_LOOKS_COMING = 0.05
"""Seconds between two looks where rows are seen whose delay will have passed soon."""

_SOON = 1_000_000
"""µs; `read.max_wait` where that is more."""

_LONGEST_BATCH = 3.0
"""Seconds that a micro-batch may take: pages grow up to that while the reader is far behind."""

_MOST_PAGES = 20

_MOST_PAGES_AHEAD = 4
"""Full pages that are announced and that not all shards have published."""

BEGINNING = 0
"""The position before every event: 1970."""

Offset = dict[str, int]


class SourceError(RuntimeError):
    """Carries an `EventpubError` through Spark, which keeps only the text of an exception."""


@dataclass
class Window(InputPartition):
    """One shard's part of a window: ``after < create_time <= upto``, in µs.

    `moves`: whether the next windows are looked for while this one is published; `more` and
    `hidden_since`, as in `boundary.Bounds`. `open_since`, `watermark` and `passed` are what
    `store.Watermark` said last.
    """

    shard: int
    after: int
    upto: int
    moves: bool = False
    more: bool = False
    open_since: int | None = None
    watermark: str = "off"
    passed: int = 0
    hidden_since: int | None = None


class EventStoreDataSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """`eventstore`"""
        return "eventstore"

    def schema(self) -> str:
        """Rows of events; with the publisher's own option `windows`, one row a shard."""
        return WINDOWS if "windows" in self.options else ROWS

    def streamReader(self, schema: Any) -> EventStoreStreamReader:  # noqa: N802 (Spark's name)
        """The reader of one streaming query."""
        return EventStoreStreamReader(dict(self.options))


class Pages:
    """How many pages the publisher's next window has: one, and more while it is far behind.

    What a micro-batch costs beyond its rows is the same for a page and for ten, and the shards keep
    only a chunk of the window in memory. So each window that is full and was done in half of the
    time that a batch may take is followed by one of twice the pages.
    """

    def __init__(self) -> None:
        self.count = 1
        self._since: float | None = None

    def asked(self, full: bool, now: float) -> None:
        """The next window was looked for: whether it is full, and when, in seconds."""
        took = None if self._since is None else now - self._since
        self._since = now if full else None
        if not full:
            self.count = 1
        elif took is not None and took < _LONGEST_BATCH / 2:
            self.count = min(2 * self.count, _MOST_PAGES)
        elif took is not None and took > _LONGEST_BATCH:
            self.count = max(1, self.count // 2)


class EventStoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans windows in Spark's driver and reads them in its tasks.

    Eleven options are the publisher's own: `windows` yields each shard's bounds instead of its
    rows, which the publishing task then reads itself; `until` is the last position; `wake_file`
    names a file with ``{"next_due": µs, "position": µs}``, the time at which a batch is wanted
    without any new row, and how far all shards have come; `boundary_file` is for `MovingBoundary`,
    which reads in `live_dir` how far the shards are, and leaves pages for them in `page_dir`;
    `passed_file` takes where rows have become visible behind the windows, for `passed.told`;
    `hidden_since` is as of `store.Watermark`, and `horizon` its `unknown_for`, both µs; with
    `looks_every`, µs, it goes on looking for new rows for a while before it says that there are
    none, since to be asked again costs Spark more than a look; and with `rests_in_tasks` it then
    has a batch begun without rows, whose tasks wait for the boundary to move.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._store_config, self._read = _parse(options)
        self._shards = int(options.get("shards", "1"))
        self._partitions = int(options.get("partitions", str(self._shards)))
        self._windows = "windows" in options
        self._looks_every = int(options.get("looks_every", "0")) / 1e6
        self._wake_file = Path(options["wake_file"]) if "wake_file" in options else None
        self._until = int(options["until"]) if "until" in options else None
        self._initial = int(options["position"]) if "position" in options else None
        self._first = self._windows
        self._pages = Pages()
        self._rests_in_tasks = "rests_in_tasks" in options
        self._moves = self._more = self._was_blind = False
        self._rows_come = self._has_rows = False
        self._ticked: list[tuple[int, str]] = []
        self._dues_of: tuple[list[tuple[int, int]], list[tuple[int, str]]] = [], []
        self._boundary: MovingBoundary | None = None
        self._live_dir = Path(options["live_dir"]) if "live_dir" in options else None
        self._pages_ahead: deque[int] = deque()
        self._left: dict[int, int] = {}
        self._page_files: PageFiles | None = None
        if "page_dir" in options:
            folder = Path(options["page_dir"])
            self._page_files = PageFiles(folder, self._shards, self._partitions)
        self._passed = Passed(Path(options["passed_file"])) if "passed_file" in options else None
        if "boundary_file" in options:
            file = Path(options["boundary_file"])
            resting = _LOOKS_RESTING * min(self._read.delay / 1e6, 1.0)
            self._boundary = MovingBoundary(
                file, self._next_window, self._next_look, max(self._looks_every, resting)
            )
        self._store: EventStore | None = None
        self._server: str | None = None
        self._watermark: Watermark | None = None
        self._hidden_since: int | None = None
        if self._read.watermark == "auto":
            since = options.get("hidden_since")
            self._watermark = Watermark(
                self._store_config,
                self._read.max_wait,
                unknown_for=int(options.get("horizon", "0")),
                hidden_since=None if since is None else int(since),
            )
            self._note_hidden(self._watermark)

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs, which is sent a copy of this: nothing that is open here."""
        return self.__dict__ | {
            "_store": None,
            "_watermark": None,
            "_passed": None,
            "_boundary": None,
        }

    def _connected(self) -> EventStore:
        if self._store is None:
            self._store = EventStore(self._store_config, EventStore.discover(self._store_config))
        return self._store

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where a query without a checkpoint starts."""
        if self._initial is None:
            with _errors_through_spark():
                self._initial = start_position(self._read, self._connected().now)
        return {"position": self._initial, "tick": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Pages of `page_rows`."""
        return ReadMaxRows(self._read.page_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Everything up to the boundary as it is now."""
        with _errors_through_spark():
            self._until = self._connected().now() - self._read.delay

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the next window, or `start` where no batch is wanted."""
        self._moves = self._more = False
        if self._boundary is not None:
            self._boundary.rest()
            self._pages_ahead.clear()
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._read.page_rows
        if self._windows:
            rows *= self._pages.count
        began = time.monotonic()
        while True:
            known = self._progress()
            after = max(start["position"], known.get("position") or 0)
            with _errors_through_spark():
                poll = self._poll(after, rows, known)
            end = poll.upper if poll.page_end is None else poll.page_end
            if self._until is not None:
                end = min(end, self._until)
            asked = self._first or _is_due(known, poll.now)
            last = self._until is not None and poll.upper >= self._until
            found = end > after and (poll.has_rows or asked or last)
            goes_on = self._looks_every and self._until is None and not found and not asked
            if not goes_on or time.monotonic() - began + self._looks_every > _LOOKS_FOR:
                break
            time.sleep(self._looks_every)
        self._pages.asked(poll.page_end is not None, time.monotonic())
        if found:
            self._first = False
            failpoint("before_offset_log")
            self._more = poll.page_end is not None
            if poll.has_rows:
                self._go(end)
            return {"position": end, "tick": 0}
        if asked:
            self._first = False
            return {"position": start["position"], "tick": start["tick"] + 1}
        if self._until is not None or not self._rests_in_tasks:
            return start
        if self._watermark is not None:  # a task may find a gap that is due
            with _errors_through_spark():
                self._look(self._watermark, after)
        self._go(after)
        return {"position": after, "tick": start["tick"] + 1}

    def _go(self, end: int) -> None:
        """Let the boundary move on behind a window."""
        if self._boundary is not None:
            self._was_blind = self._is_blind()
            self._moves = True
            self._boundary.go(end)

    def _next_window(self, after: int) -> Bounds | None:
        """The end of the window behind the one that is being published.

        None without rows where tasks have nothing else to do, and where some pages are waiting for
        the shards.

        Raises:
            BatchOver: whether open transactions are seen has changed, or there are no more rows and
                there is an end.
        """
        if len(self._pages_ahead) >= _MOST_PAGES_AHEAD:
            told = self._told()
            while self._pages_ahead and self._pages_ahead[0] <= told:
                self._pages_ahead.popleft()
            self._left = {start: end for start, end in self._left.items() if end > told}
            if self._page_files is not None:
                self._page_files.forget(told)
            if len(self._pages_ahead) >= _MOST_PAGES_AHEAD:
                return None
        poll, end = self._poll_behind(after, {})
        if not poll.has_rows or end <= after:
            if self._until is not None:
                raise BatchOver
            dues = self._dues()
            known = {"next_due": min((due for due, _ in dues), default=None)}
            if dues == self._ticked or not _is_due(known, poll.now):
                return None
            self._ticked = dues
            poll, end = self._poll_behind(after, known)
        if poll.page_end is not None:
            self._pages_ahead.append(end)
            self._leave_page(after, end)
        open_since = self._watermark.open_since if self._watermark else None
        more = poll.page_end is not None
        return Bounds(end, open_since, more, hidden_since=self._hidden_since)

    def _poll_behind(self, after: int, known: dict[str, Any]) -> tuple[Poll, int]:
        """What is behind a window, and where the next one ends; not before `after`."""
        poll = self._poll(after, self._read.page_rows, known)
        self._rows_come = self._comes_soon(poll)
        self._has_rows = poll.has_rows
        if self._is_blind() != self._was_blind:
            raise BatchOver
        end = poll.upper if poll.page_end is None else poll.page_end
        if self._until is not None:
            end = min(end, self._until)
        return poll, max(end, after)

    def _comes_soon(self, poll: Poll) -> bool:
        """Whether a row's delay will have passed before all that is open now is not waited for any
        more, or after a few looks of a source that rests."""
        row, soon = poll.next_row, max(self._read.max_wait, _SOON)
        return row is not None and row + self._read.delay - poll.now <= soon

    def _is_blind(self) -> bool:
        """Whether open transactions should be seen, and are not."""
        return self._watermark is not None and self._watermark.state in {"denied", "stale"}

    def _next_look(self) -> float | None:
        """Seconds until it is of use to look again, where that may be soon; None: it may not."""
        if not (self._rows_come or self._has_rows):
            return None  # for the end of a transaction that stays open no look comes sooner
        wait = self._watermark.next_look if self._watermark else None
        return wait or (_LOOKS_COMING if self._rows_come else None)

    def _look(self, watermark: Watermark, reached: int) -> None:
        """Poll the open transactions; report the ends of those no longer waited for."""
        watermark.look(reached)
        if watermark.server is not None:
            self._require_same_server(watermark.server)
        self._tell(watermark.take_ended())
        self._note_hidden(watermark)

    def _tell(self, ended: Sequence[tuple[int, int]] = ()) -> None:
        """Report what has ended, until the driver has read it."""
        if self._passed is not None and (ended or self._passed.since is not None):
            heard = self._progress().get("heard", 0)
            self._passed.add([(after - _SHOWS_AT_LAST, upto) for after, upto in ended], heard)

    def _note_hidden(self, watermark: Watermark) -> None:
        """`boundary.Bounds.hidden_since` after a look: all of it at once, since another thread may
        ask for it at any moment."""
        if self._passed is not None:
            since = watermark.hidden_since
            hidden = [None if since is None else since - _SHOWS_AT_LAST, self._passed.since]
            self._hidden_since = min((at for at in hidden if at is not None), default=None)

    @property
    def _shows(self) -> int:
        """µs in which a statement may have begun before a look that does not show it."""
        return min(self._read.delay, _BEFORE_IT_SHOWS)

    def _leave_page(self, after: int, upto: int) -> None:
        """Read a page for all shards, where they see the files."""
        boundary = self._boundary
        if self._page_files is None or boundary is None:
            return
        if self._left.get(after) == upto:
            return  # for the batch before, which did not come to it
        with closing(self._connected().window(after, upto, None)) as rows:
            left = self._page_files.leave(after, upto, rows, lambda: boundary.rests)
        if left:
            self._left[after] = upto
        elif not boundary.rests:
            self._page_files = None  # too large, or no space: tasks read for themselves

    def _told(self) -> int:
        """The position that all shards have reported; 0 until each has."""
        found = [report["position"] for report, _ in self._live()]
        return min(found) if len(found) == self._shards else 0

    def _dues(self) -> list[tuple[int, str]]:
        """When each shard has something to do without rows, µs, and what it reported last.

        That is when its next hold is due; 0 where the recount wants something compared.
        """
        files = [self._wake_file, *self._live_files()]
        editions = [edition_of(file) for file in files if file is not None]
        if editions == self._dues_of[0]:
            return self._dues_of[1]
        wanted = self._progress().get("comparison", {"number": 0, "buckets": []})
        number = wanted["number"] if wanted["buckets"] else 0
        dues = []
        for report, text in self._live():
            due = 0 if report.get("compared", number) < number else report.get("next_due")
            if due is not None:
                dues.append((due, text))
        self._dues_of = editions, dues
        return dues

    def _live(self) -> list[tuple[dict[str, Any], str]]:
        """What shards reported last, in this batch or one before; never twice in the same words,
        since they say how long it took."""
        found = []
        for file in self._live_files():
            with suppress(FileNotFoundError, ValueError):
                text = file.read_text()
                found.append((json.loads(text)["report"], text))
        return found

    def _live_files(self) -> list[Path]:
        folder = self._live_dir
        return [] if folder is None else [folder / f"{n}.json" for n in range(self._shards)]

    def _poll(self, after: int, rows: int, known: dict[str, Any]) -> Poll:
        """How far the next window may reach; open transactions hold it back where they show."""
        store, delay = self._connected(), self._read.delay
        if self._watermark is None:
            return self._of_one_server(store.poll(after, delay, rows))
        self._tell()
        poll = self._of_one_server(
            store.poll(after, delay, 1)  # the rows of a page are counted only up to the boundary
        )
        asked = self._first or self._until is not None or _is_due(known, poll.now)
        # Not only when the delay of the first rows has passed: whatever is open at the first look
        # may hide any row, and what is seen to come and go hides but its own. And not only while
        # rows come: those of a transaction no longer waited for show when it ends.
        if poll.has_rows or self._comes_soon(poll) or asked or self._watermark.has_open:
            self._look(self._watermark, after)
        if not (poll.has_rows or asked):
            return poll
        upto = self._watermark.upto
        if upto is not None:
            # what began its statement just before a look does not show in it yet
            upto -= self._shows
        most = poll.upper if upto is None else min(upto, poll.upper)
        return self._of_one_server(store.poll(after, delay, rows, max(most, after)))

    def _of_one_server(self, poll: Poll) -> Poll:
        """What was polled, if it is of the server that answered first.

        Where the address leads to another one, the open transactions are looked at, and windows are
        read, by connections to the former: a new source, and new tasks, make new ones.

        Raises:
            StoreError: store.moved
        """
        self._require_same_server(poll.server)
        return poll

    def _require_same_server(self, server: str) -> None:
        self._server = self._server or server
        if server != self._server and not self._store_config.allow_replica:
            raise StoreError(
                "store.moved",
                "another database server answers than before; everything connects again",
                where="store.url",
                retriable=True,
            )

    def _progress(self) -> dict[str, Any]:
        """What the publisher has written after its last batch."""
        if self._wake_file is None:
            return {}
        try:
            known: dict[str, Any] = json.loads(self._wake_file.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return known

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One per shard, even of a window that holds nothing.

        Spark runs its first batch again from `initialOffset`, which a publisher that had finished
        that batch has moved to its end.
        """
        watermark = self._watermark
        seen: tuple[Any, ...] = ()
        if watermark is not None:
            seen = watermark.open_since, watermark.state, watermark.passed, self._hidden_since
        return [
            Window(
                n,
                start["position"],
                end["position"],
                self._moves,
                self._more,
                *seen,
            )
            for n in range(self._shards)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one shard's window, as Arrow batches."""
        assert isinstance(partition, Window)
        if self._windows:
            yield pa.RecordBatch.from_pydict(
                {
                    "shard": pa.array([partition.shard], pa.int32()),
                    "after": pa.array([partition.after], pa.int64()),
                    "upto": pa.array([partition.upto], pa.int64()),
                    "moves": pa.array([partition.moves], pa.bool_()),
                    "more": pa.array([partition.more], pa.bool_()),
                    "open_since": pa.array([partition.open_since], pa.int64()),
                    "watermark": pa.array([partition.watermark], pa.string()),
                    "passed": pa.array([partition.passed], pa.int64()),
                    "hidden_since": pa.array([partition.hidden_since], pa.int64()),
                }
            )
            return
        with _errors_through_spark(), self._connected() as store:
            shard = Shard(partition.shard, self._shards, self._partitions)
            for batch in store.window(partition.after, partition.upto, shard):
                *others, created = batch.columns
                # Named anew: Spark wants every column nullable.
                yield pa.RecordBatch.from_arrays(
                    [*others, created.cast(pa.timestamp("us", tz="UTC"))], batch.schema.names
                )

    def commit(self, end: Offset) -> None:
        """Spark has committed everything up to `end`; nothing to do, the index knows its own."""
        del end
        failpoint("source_commit")

    def stop(self) -> None:
        """Close the connections."""
        if self._boundary is not None:
            self._boundary.rest()
        if self._store is not None:
            self._store.close()
        if self._watermark is not None:
            self._watermark.close()


def _is_due(known: dict[str, Any], now: int) -> bool:
    due = known.get("next_due")
    return due is not None and due <= now


class _errors_through_spark:  # noqa: N801 (a context manager, used as a function)
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EventpubError):
            raise SourceError(error.marked()) from error


def start_position(read: Read, now: Callable[[], int]) -> int:
    """The position before the first event, µs: events created at or before it are baseline."""
    if read.start == "beginning":
        return BEGINNING
    if read.start == "now":
        return now()
    started = datetime.fromisoformat(read.start) - datetime(1970, 1, 1, tzinfo=UTC)
    return started // timedelta(microseconds=1)


def _parse(options: Mapping[str, str]) -> tuple[Store, Read]:
    """The sections `[store]` and `[read]` of flat options."""
    own = {"shards", "partitions", "path"}
    # and the publisher's
    own |= {"windows", "wake_file", "boundary_file", "live_dir", "page_dir", "until", "position"}
    own |= {"passed_file", "hidden_since", "horizon", "looks_every", "rests_in_tasks"}
    store: dict[str, Any] = {}
    read: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for key, value in options.items():
        if key in Store.model_fields and key != "columns":
            store[key] = value
        elif key.startswith("columns."):
            columns[key.removeprefix("columns.")] = value
        elif key in Read.model_fields:
            read[key] = value
        elif key not in own:
            raise ConfigError(
                "config.unknown_key",
                f"the eventstore source has no option '{key}'",
                where=f"option {key}",
                suggestion="the options are the keys of [store] and [read]",
            )
    if columns:
        store["columns"] = columns
    return Store(**store), Read(**read)


def options_of(config_store: Store, config_read: Read) -> dict[str, str]:
    """The options that say what these sections say."""
    options: dict[str, str] = {}
    for name, value in config_store.model_dump(exclude_defaults=True).items():
        if name == "columns":
            options |= {f"columns.{k}": "" if v is None else str(v) for k, v in value.items()}
        elif name in {"url", "password"}:
            options[name] = value.get_secret_value()
        elif name == "connect_timeout":
            options[name] = f"{value}us"
        else:
            options[name] = str(value)
    options["delay"] = f"{config_read.delay}us"
    options["page_rows"] = str(config_read.page_rows)
    options["watermark"] = config_read.watermark
    options["max_wait"] = f"{config_read.max_wait}us"
    return options
