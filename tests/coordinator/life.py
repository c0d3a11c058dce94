"""A coordinator's life that a test plays: runners that keep what they were sent, and a clock by
hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from eventpub.admission.model import EVENTS, Counts, topic_partition
from eventpub.channel import (
    Comparison,
    Ended,
    Lane,
    Report,
    Request,
    Stop,
    Window,
    Work,
)
from eventpub.config import App, Config, Run, Sink, Store
from eventpub.coordinator import events as e
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.coordinator import Coordinator
from eventpub.coordinator.position import StartState
from eventpub.errors import EventpubError
from eventpub.sources.mysql import Layout
from eventpub.sources.mysql.values import Identity, IdPart

T = TypeVar("T")

SECOND = 1_000_000
NOW = 5_000 * SECOND
"""The database's time when a run begins, µs."""

RUN = 7
PARTITIONS = 4

NO_ROWS = EVENTS.empty_table()


class Runner:
    """Keeps what it was sent.

    Args:
        command: has started it.
    """

    def __init__(self, command: e.StartRunner) -> None:
        self.shard, self.beginning = command.shard, command.beginning
        self.lane: Lane = command.lane
        self._sent: list[Work] = []

    @property
    def sent(self) -> list[Work]:
        """What it was sent so far."""
        while not self.lane._sent.empty():
            message = self.lane.receive()
            assert message is not None
            self._sent.append(message)
        return self._sent

    def of(self, kind: type[T]) -> list[T]:
        """What was sent of a kind."""
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def windows(self) -> list[Window]:
        return self.of(Window)

    @property
    def comparisons(self) -> list[Comparison]:
        return self.of(Comparison)

    @property
    def requests(self) -> list[Request]:
        return self.of(Request)

    @property
    def is_told_to_stop(self) -> bool:
        return bool(self.of(Stop))


def layout(**changes: Any) -> Layout:
    """An event table as most are."""
    usual: dict[str, Any] = {
        "table": "`events`",
        "id": "`id`",
        "identity": Identity((IdPart("`aggregate_id`", "text", "utf8mb4", "utf8mb4_bin"),)),
        "version": "`version`",
        "event_type": "`event_type`",
        "payload": "`payload`",
        "metadata": "`metadata`",
        "create_time": "`create_time`",
        "time_index": "`time`",
        "key_index": "`key`",
        "key_columns": ("`aggregate_id`", "`version`"),
        "key_is_unique": True,
        "unit": 1,
        "zone": None,
        "slice": None,
        "id_is_nullable": False,
        "where": "table events",
        "id_index": "`PRIMARY`",
    }
    return Layout(**{**usual, **changes})


def config(shards: int = 2, **sections: dict[str, Any]) -> Config:
    """A publisher's configuration."""
    data: dict[str, Any] = {
        "app": App(id="orders", state_dir=Path("/nowhere")),
        "store": Store.model_validate({"url": "mysql+pymysql://u@h:1/d"}),
        "sink": Sink(topic="events"),
        "run": Run(shards=shards),
    }
    return Config.model_validate({**data, **sections})


@dataclass
class Life:
    """See the module.

    Attributes:
        said: all commands so far.
        new: those of the last event.
        now: the machine's time, s.
        database: the database's, µs.
    """

    coordinator: Coordinator
    said: list[e.Command] = field(default_factory=list)
    new: list[e.Command] = field(default_factory=list)
    now: float = 1_000.0
    database: int = NOW
    _runners: dict[int, Runner] = field(default_factory=dict)
    _is_over: bool = False

    def on(self, event: e.Event) -> list[e.Command]:
        """Something happens now."""
        self.new = self.coordinator.on(event, self.now)
        for command in self.new:
            if isinstance(command, e.StartRunner):
                self._runners[id(command)] = Runner(command)
        self.said += self.new
        self._is_over = self._is_over or any(isinstance(c, e.Finish) for c in self.new)
        return self.new

    def waits(self, seconds: float) -> None:
        """Time passes on both clocks; the loop's ticks come when it wants them."""
        until = self.now + seconds
        while not self._is_over:
            next_at = self.now + self.coordinator.next_tick(self.now)
            if next_at >= until:
                break
            self._at(next_at)
            self.on(e.Tick())
        self._at(until)
        self.on(e.Tick())

    def _at(self, now: float) -> None:
        self.database += round((now - self.now) * 1e6)
        self.now = now

    # -- runners ----------------------------------------------------------------------------------

    def runner(self, shard: int) -> Runner:
        """The one of a shard that was started last."""
        return self.runners(shard)[-1]

    def runners(self, shard: int) -> list[Runner]:
        """Those of a shard, in the order in which they were started."""
        return [self._runners[id(c)] for c in self.all(e.StartRunner) if c.shard == shard]

    def reports(self, runner: Runner, **what: Any) -> None:
        """A runner reports."""
        self.on(Report(runner.shard, **what))

    def reports_done(self, runner: Runner, **what: Any) -> None:
        """A runner has done all windows that it was sent."""
        last = runner.windows[-1]
        at = {"done": last.number, "position": last.upto, "low": last.upto, **what}
        self.reports(runner, **at)

    def ends(self, runner: Runner, error: EventpubError | None = None) -> None:
        """A runner ends."""
        self.on(Ended(runner.shard, error))

    def next_runner(self, shard: int, within: float = 20.0) -> Runner:
        """The runner of a shard that has none, when it has been started."""
        began = self.now
        while self.coordinator.shards[shard].lane is None:
            assert self.now < began + within, "no runner was started"
            self.waits(within / 400)
        return self.runner(shard)

    # -- polls ------------------------------------------------------------------------------------

    def poll(self) -> e.Poll | None:
        """The poll that is asked for and has no answer yet."""
        return self.last(e.Poll) if self.coordinator.windows.polling.is_under_way else None

    def polled(self, end: int | None = None, **result: Any) -> None:
        """The boundary was polled; where nothing is asked for yet, its time is waited for."""
        if self.poll() is None:
            self.waits(0.4)
        poll = self.poll()
        assert poll is not None
        self.database = result.pop("now", self.database)
        given = {"now": self.database, "upper": self.database - SECOND, "end": end, **result}
        self.on(e.Done(poll, PollResult(**given)))

    def pages(self, end: int) -> None:
        """A full page was polled, and its rows were read."""
        rows = tuple(NO_ROWS for _ in self.coordinator.shards)
        self.polled(end, is_page=True, rows=rows)

    # -- what it wants ----------------------------------------------------------------------------

    def all(self, kind: type[T]) -> list[T]:
        """All commands of a kind so far."""
        return [command for command in self.said if isinstance(command, kind)]

    def last(self, kind: type[T]) -> T:
        """The last one."""
        return self.all(kind)[-1]

    def lines(self, part: str) -> list[e.Log]:
        """Lines for the log with some words."""
        return [line for line in self.all(e.Log) if part in line.text]

    @property
    def starts(self) -> list[int]:
        """The shards of which runners were started, in order."""
        return [command.shard for command in self.all(e.StartRunner)]

    @property
    def written(self) -> dict[str, Any]:
        """What was written down last."""
        return dict(self.last(e.Remember).what)

    def is_over(self) -> bool:
        """Whether it has finished."""
        return self._is_over

    def is_ending(self) -> bool:
        """Whether it has, or waits for its runners before it does."""
        return self._is_over or self.coordinator.runners.is_stopping

    def outcome(self) -> EventpubError | None:
        """What it ends with, when its runners have had a moment to leave."""
        self.waits(1.3)
        return self.last(e.Finish).error


def begin(
    shards: int = 2,
    sections: dict[str, dict[str, Any]] | None = None,
    **start_state: Any,
) -> Life:
    """A run that begins: behind 1000 s, of a former run unless told otherwise."""
    usual: dict[str, Any] = {
        "run": RUN,
        "now": NOW,
        "layout": layout(),
        "partitions": PARTITIONS,
        "start": 0,
        "low": 1_000 * SECOND,
        "position": 1_000 * SECOND,
        "server": "the server",
    }
    started = StartState(**{**usual, **start_state})
    life = Life(Coordinator(config(shards, **(sections or {})), started))
    life.on(e.Tick())
    return life


def begun(shards: int = 2, **given: Any) -> tuple[Life, list[Runner]]:
    """A run whose runners have all reported where they begin."""
    life = begin(shards, **given)
    runners = [life.runner(number) for number in range(shards)]
    at = 1_000 * SECOND
    for runner in runners:
        life.reports(runner, position=at, low=at, read_before=at)
    return life, runners


def streaming(shards: int = 2, **given: Any) -> tuple[Life, list[Runner]]:
    """A run that has done its first window, up to 2000 s, and is idle."""
    life, lanes = begun(shards, **given)
    life.polled(2_000 * SECOND)
    for lane in lanes:
        life.reports_done(lane)
    return life, lanes


def of_shard(shard: int, shards: int = 2) -> str:
    """An aggregate that belongs to a shard."""
    return next(_aggregates(lambda p: p % shards == shard))


def _aggregates(fits: Callable[[int], bool]) -> Iterator[str]:
    ids: Sequence[str] = [f"order-{number}" for number in range(100)]
    return (a for a in ids if fits(topic_partition(a, PARTITIONS)))


def some_rows(rows: int) -> Counts:
    """Counts of a report about so many rows."""
    return Counts(rows=rows, admitted=rows)


def at(second: float) -> int:
    """A time of the database, µs."""
    return round(second * SECOND)


def upto(lane: Runner) -> list[float]:
    """Where the windows end that a runner was sent, in seconds."""
    return [window.upto / SECOND for window in lane.windows]


def counted_with(life: Life, differs: set[int] = frozenset()) -> set[int]:  # type: ignore[assignment]
    """All counts that are wanted are made; these buckets are found to have a row more.

    They are noted first, as where rows have come behind the reader.
    """
    life.coordinator._recounting.recount.note(sorted(differs))
    found: set[int] = set()
    answered = life.coordinator.__dict__.setdefault("answered", [])
    for _ in range(8):
        life.waits(1.0)
        for count in life.all(e.Count):
            if any(count is other for other in answered):
                continue
            answered.append(count)
            rows = {b: count.expected[b] + (b in differs) for b in count.buckets}
            found.update(count.buckets)
            life.on(e.Done(count, e.Counted(life.database, rows)))
    return found
