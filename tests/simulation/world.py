"""One simulated world: a database's clock, its transactions, processes that may die anywhere.

Everything that the real code touches comes here through `World.point`, named after what is about to
happen. A schedule arms points: at the n-th time that a process comes by, it dies, or stalls, or
somebody else commits in between. Nothing here is random and nothing takes real time, so that a
schedule always gives the same run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eventpub.spark.state import Request

if TYPE_CHECKING:
    from tests.simulation.broker import Broker
    from tests.simulation.disk import Disk

START = 1_700_000_000_000_000
"""The database's time when a world begins, µs."""

Step = list[Any]
"""A step of a schedule: its name and arguments, as JSON has them."""


class Crash(BaseException):
    """The process is gone. `whole`: the driver and all of its tasks; otherwise this task alone."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole


@dataclass(frozen=True)
class Setup:
    """What stays the same through a schedule; drawn from its seed. Times in µs."""

    partitions: int = 1
    shards: int = 1
    page_rows: int = 50
    chunk_rows: int = 50
    batch_rows: int = 50
    fetch: int = 50
    delay: int = 0
    start: str = "beginning"
    late: str = "publish"
    policy: str = "hold_aggregate"
    max_backoff: int = 2
    backoff_base: int = 250_000
    horizon: int = 60_000_000
    executors: int = 1
    lazy_markers: bool = False
    eager_send: bool = False
    slow_start: bool = False

    @property
    def follows(self) -> bool:
        """Whether tasks see the file of the moving boundary."""
        return self.batch_rows != 2


@dataclass(eq=False)
class Row:
    """A row of the event table."""

    aggregate_id: str
    version: int
    create_time: int
    payload: bytes
    committed: int = 0
    """When it was committed, by `World.moment`."""
    late: bool = False
    """Whether a window had been planned before that reached beyond it."""
    refused: bool = False
    """Whether the client or the broker will never take its record."""


class Process:
    """A process that runs the real code: the driver, or one task on an executor."""

    def __init__(self, executor: int = 0) -> None:
        self.executor = executor
        self.dead = False
        self.worker: Worker | None = None
        self.looked = 0
        """When it last asked the store for missing versions, by `World.moment`."""


class Worker:
    """A task in a thread of its own, so that it can stall at any point and wake up later.

    Only one thread ever runs: each hands over to the other and waits.
    """

    def __init__(self, world: World, process: Process, work: Callable[[], Any]) -> None:
        self._world = world
        self._process = process
        self._work = work
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.budget: int | None = None
        self.stale = False
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        process.worker = self
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._work()
        except BaseException as error:  # handed to the thread that waits
            self.error = error
        self.done = True
        self._back.release()

    def go_on(self, points: int | None = None) -> None:
        """Run it to its end, its next stall, or past so many points."""
        before = self._world.process
        self._world.process = self._process
        self.budget = points
        self._go.release()
        self._back.acquire()
        self._world.process = before
        if self.done:
            self._thread.join()

    def stall(self) -> None:
        """Called in its own thread: let the others go on until it is woken."""
        self.stale = True
        self._back.release()
        self._go.acquire()

    def end(self) -> None:
        """Kill it where it stalls."""
        self._process.dead = True
        self.go_on()


class World:
    """See the module. The store's rows are here; topics and disks are `broker` and `disk`."""

    broker: Broker
    disk: Disk

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = START
        self.monotonic = 0.0
        self.moment = 0
        self.committed: dict[tuple[str, int], Row] = {}
        self.transactions: dict[int, list[Row]] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.process = Process()
        self.stalled: list[Worker] = []
        self.faults: Counter[str] = Counter()
        self.armed: dict[str, list[list[Any]]] = {}
        self.requests: list[Request] = []
        """What users ask for and nobody has answered."""
        self.asked: Counter[tuple[str, str, int | None]] = Counter()
        """How often each has been asked for: action, aggregate, and version where it was seen."""
        self.reached = 0
        """The highest end of a window that was planned."""
        self.look: Callable[[], None] = lambda: None
        """The driver's recount."""
        self._rows = 0

    # -- what the schedule does -------------------------------------------------------------------

    def act(self, step: Step) -> None:
        """One step that is not the publisher's own."""
        name, *arguments = step
        getattr(self, f"_do_{name}")(*arguments)

    def _do_write(self, transaction: int, aggregate: int, reuse: int, count: int) -> None:
        """Statements of a transaction; `reuse` takes the lowest version that nobody has."""
        rows = self.transactions.setdefault(transaction, [])
        aggregate_id = f"a{aggregate}"
        for _ in range(count):
            taken = {v for a, v in self.committed if a == aggregate_id} | {
                row.version
                for open_rows in self.transactions.values()
                for row in open_rows
                if row.aggregate_id == aggregate_id
            }
            version = max(taken, default=0) + 1
            if reuse:
                free = min(set(range(1, version + 1)) - taken)
                if free < version:
                    self.counts["versions reused"] += 1
                version = free
            self._rows += 1
            payload = f"{aggregate_id}/{version}#{self._rows}".encode()
            rows.append(Row(aggregate_id, version, self.clock, payload))

    def _do_commit(self, transaction: int) -> None:
        for row in self.transactions.pop(transaction, ()):
            row.committed = self.moment
            row.late = row.create_time <= self.reached
            self.committed[row.aggregate_id, row.version] = row
            self.counts["rows"] += 1
            self.counts["late commits"] += row.late

    def _do_spoil(self, transaction: int, how: str) -> None:
        """The last row of a transaction is one whose record is refused; see `broker`."""
        for row in self.transactions.get(transaction, [])[-1:]:
            row.refused = True
            row.payload += how.encode()

    def _do_zero(self, transaction: int, aggregate: int) -> None:
        """A row whose version lies below the first."""
        rows = self.transactions.setdefault(transaction, [])
        row = Row(f"a{aggregate}", 0, self.clock, b"zero", refused=True)
        others = [*self.committed.values(), *(r for of in self.transactions.values() for r in of)]
        if all((r.aggregate_id, r.version) != (row.aggregate_id, 0) for r in others):
            rows.append(row)

    def _do_ask(self, action: Literal["retry", "skip"], number: int) -> None:
        """Of an aggregate that is listed as held, else of one that misses a version."""
        there = self.committed
        held = self.disk.held()
        some = sorted(held or {a for a, v in there if v > 1 and (a, v - 1) not in there} or {"a0"})
        aggregate_id = some[number % len(some)]
        version = held.get(aggregate_id) if action == "skip" else None
        self.asked[action, aggregate_id, version] += 1
        self.counts[f"asked to {action}"] += 1
        self.requests.append(Request(f"{self.asked.total()}", action, aggregate_id, version))

    def _do_rollback(self, transaction: int) -> None:
        self.counts["rollbacks"] += bool(self.transactions.pop(transaction, ()))

    def _do_time(self, micros: int) -> None:
        self.clock += micros

    def _do_clock(self, micros: int) -> None:
        self.counts["clock steps"] += 1
        self.clock += micros

    def _do_crash(self) -> None:
        self.process.dead = True
        raise Crash(whole=True)

    def _do_kill(self) -> None:
        self.process.dead = True
        raise Crash(whole=False)

    def _do_stall(self) -> None:
        worker = self.process.worker
        if worker is not None and not worker.stale:
            self.counts["stalled workers"] += 1
            worker.stall()

    def _do_resume(self, number: int, points: int | None) -> None:
        """A stalled worker wakes up, for so many points or to its end."""
        if not self.stalled:
            return
        worker = self.stalled[number % len(self.stalled)]
        if worker is self.process.worker:
            return
        worker.go_on(points)
        if worker.done:
            self.stalled.remove(worker)

    def _do_fault(self, name: str) -> None:
        self.faults[name] += 1

    def _do_lose(self, executor: int) -> None:
        self.counts["lost indexes"] += 1
        self.disk.lose(executor)

    def _do_older(self, executor: int, writes: int) -> None:
        self.counts["older indexes"] += 1
        self.disk.set_back(executor, writes)

    def _do_timeout(self) -> None:
        self.broker.time_out()

    def _do_look(self) -> None:
        self.look()

    def _do_markers(self) -> None:
        self.broker.settle()

    def _do_late_end(self) -> None:
        self.broker.deliver_late_ends()

    # -- what the real code comes by --------------------------------------------------------------

    def point(self, name: str) -> None:
        """A process is about to do, or has just done, what the name says."""
        self.moment += 1
        process = self.process
        if process.dead:
            raise Crash(whole=False)
        worker = process.worker
        if worker is not None and worker.stale:
            if worker.budget is not None:
                worker.budget -= 1
                if worker.budget < 0:
                    worker.stall()
                    if process.dead:
                        raise Crash(whole=False)
            return
        if name in self.armed:
            self._fire(name)
            if process.dead:
                raise Crash(whole=False)

    def _fire(self, name: str) -> None:
        armed = self.armed[name]
        for entry in list(armed):
            entry[0] -= 1
            if entry[0] == 0:
                armed.remove(entry)
                action = entry[1]
                if action[0] in {"crash", "kill", "stall"}:
                    self.counts[f"{action[0]} at {name}"] += 1
                self.act(action)

    def fault(self, name: str) -> bool:
        """Whether a fault of this name is pending; it happens once."""
        if not self.faults or not self.faults[name]:
            return False
        self.faults[name] -= 1
        self.counts[f"fault {name}"] += 1
        return True

    def arm(self, points: list[list[Any]]) -> None:
        """Points of the next batch: name, how many times from now, step."""
        self.armed = {}
        for name, hit, step in points:
            self.armed.setdefault(name, []).append([hit, step])


class Current:
    """The world that the replaced parts of the real code belong to."""

    world: World


def world() -> World:
    """The current one."""
    return Current.world
