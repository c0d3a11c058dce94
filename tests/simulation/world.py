"""One simulated world: a database's clock, its transactions, processes that may die anywhere.

Everything that the real code touches comes here through `World.point`, named after what is about to
happen. A schedule arms points: at the n-th time that a process comes by, it dies, or stalls, or
somebody else commits in between. Nothing here is random and nothing takes real time, so that a
schedule always gives the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from greenlet import getcurrent, greenlet

from eventpub.channel import Request
from tests.simulation.forgotten import Forgotten

if TYPE_CHECKING:
    from tests.simulation.broker import Broker, Message
    from tests.simulation.channel import Link
    from tests.simulation.disk import Disk

START = 1_700_000_000_000_000
"""The database's time when a world begins, µs."""

SLACK = 3_000_000
"""More than a time bucket's width and the age at which it is counted first, µs."""

Order = Literal["", "prompt", "late"]
"""See `Setup.order`."""

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
    watermark: str = "off"
    """off: nobody asks for open transactions; auto: they are seen; denied: the account may not."""
    max_wait: int = 1_000_000
    is_down: bool = False
    """Whether the publisher may be down for longer than the horizon: see `World.started`."""
    allows_second: bool = False
    """Whether the table allows two rows of one version."""
    drops_key: bool = False
    """Whether it does so only from the first such row on."""
    is_replica: bool = False
    """Whether what commits is seen when a replica has applied it."""
    most_bytes: int = 0
    """Bytes of payloads in one transaction that the broker takes in time; 0: any."""
    most_fetched: int = 0
    """Rows that one question for versions may give; 0: any."""
    order: Order = ""
    """When the coordinator hears of what runners say: when they wait; prompt: at once; late: when
    all of them wait."""
    keeps: bool = False
    """Whether a runner outlives its step."""
    orphans: bool = False
    """Whether a publisher that crashes is only out of reach: its runners go on later."""

    @property
    def windows(self) -> int:
        """How many are planned in one step, but for those of holds that are due."""
        return 1 if self.batch_rows == 2 else 3


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
    committed_at: int = 0
    """The database's time then."""
    begun: int = 0
    """When its transaction began, by the database's clock."""
    seen: int = 0
    """When a fresh look at the open transactions has first shown it, by `World.moment`."""
    sought: bool = False
    """Whether it has to be found however old it is."""
    is_ahead: bool = False
    """Whether its time was in the future when it was written."""


class Process:
    """A process that runs the real code: the publisher, or one runner on an executor."""

    def __init__(self, executor: int = 0) -> None:
        self.executor = executor
        self.dead = False
        self.worker: Worker | None = None
        self.waited = 0.0
        """Seconds for which it has slept; that holds up no other."""
        self.looked = 0
        """When it last asked the store for missing versions, by `World.moment`."""


class Worker:
    """A runner with a stack of its own, so that it can wait or stall anywhere, and go on later.

    Only one of them ever runs: each hands over to another and waits.

    Attributes:
        link: to the coordinator; a runner that has stalled and comes to wait for work has recovered
            if that is there.
        budget: points that a stale one may pass; None: any number.
        stale: whether it has stalled; schedules do nothing more to it.
        waits: whether it waits for work.
    """

    link: Link

    def __init__(self, world: World, process: Process, work: Callable[[], Any]) -> None:
        self._world = world
        self._process = process
        self._work = work
        self._stack: greenlet | None = None
        self.budget: int | None = None
        self.stale = False
        self.waits = False
        self.done = False
        self.error: BaseException | None = None
        process.worker = self

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # handed to whoever waits
            self.error = error
        self.done = True

    def go_on(self, points: int | None = None) -> None:
        """Run it to its end, its next stall, until it waits, or past so many points."""
        before = self._world.process
        self._world.process = self._process
        self.budget = points
        self.waits = False
        if self._stack is None:
            self._stack = greenlet(self._run)
        self._stack.parent = getcurrent()
        self._stack.switch()
        self._world.process = before

    def hand_over(self) -> None:
        """Called on its own stack: let the others go on until `go_on` is called.

        Raises:
            Crash: the process was ended meanwhile.
        """
        assert self._stack is not None
        assert self._stack.parent is not None
        self._stack.parent.switch()
        if self._process.dead:
            raise Crash(whole=False)

    def stall(self) -> None:
        """The same until it is woken."""
        self.stale = True
        self.hand_over()

    def end(self) -> None:
        """Kill it where it stalls or waits."""
        self._process.dead = True
        if self._stack is None:
            self.done = True
        elif not self.done:
            self.go_on()


class World:
    """See the module. The store's rows are here; topics and disks are `broker` and `disk`."""

    broker: Broker
    disk: Disk

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = START
        self.monotonic = 1000.0
        self.moment = 0
        self.committed: dict[tuple[str, int], Row] = {}
        self.transactions: dict[int, list[Row]] = {}
        self.files: dict[str, str] = {}
        """By name: JSON; "" where nothing of it was on the disk when the machine crashed."""
        self.lasting: set[str] = set()
        """Those that a crash of the machine leaves as they are."""
        self.counts: Counter[str] = Counter()
        self.process = Process()
        self.stalled: list[Worker] = []
        self.faults: Counter[str] = Counter()
        self.damage: Callable[..., None] = lambda *_: None
        """See `damage`."""
        self.end_driver: Callable[[], None] = lambda: None
        """The publisher's machine is gone."""
        self.goes_on: Callable[[Worker], None] = lambda _: None
        """A runner that had stalled is over, or waits for work like any other."""
        self.unexpected: BaseException | None = None
        """What a runner has met that it does not know."""
        self.page_rows = 0
        """Rows that a page has at least, whatever is configured."""
        self.armed: dict[str, list[list[Any]]] = {}
        self.requests: list[Request] = []
        """What users ask for and nobody has answered."""
        self.asked: Counter[tuple[str, str, int | None]] = Counter()
        """How often each has been asked for: action, aggregate, and version where it was seen."""
        self.not_done: Counter[tuple[str, str, int | None]] = Counter()
        """How often of these the publisher has refused it."""
        self.promised: set[tuple[str, int | None]] = set()
        """Dead letters' rows of which users were told that they are on the topic."""
        self.accepts = False
        """Whether the broker takes what it has refused before: its limits were raised."""
        self.has_accepted = False
        """Whether it ever did."""
        self.reached = 0
        self.polled_at = self.clock_known = START
        """The clock at the last poll, and at the last before something was written down."""
        """The highest end of a window that was planned."""
        self.look: Callable[[], None] = lambda: None
        self.pause: Callable[[bool], None] = lambda _: None
        """The publisher counts again."""
        self.begun: dict[int, tuple[int, int]] = {}
        """Open transactions: InnoDB's id, and when it began."""
        self.prepared: set[int] = set()
        """Those that a restart of the database leaves (XA)."""
        self.stopped_at: int | None = None
        """The end of the last window that was planned before the publisher went down."""
        self.is_stale = False
        """Whether answers about open transactions are not fresh."""
        self.unapplied: list[list[Row]] = []
        """Committed, and not applied by the replica that is read."""
        self.undone: dict[tuple[str, int], list[Row]] = {}
        """What was committed, and is gone since the database was restored."""
        self.second: dict[tuple[str, int], list[Row]] = {}
        """Rows of versions that another row of `committed` has."""
        self.partition_counts = {setup.partitions}
        """How many partitions the topics have ever had."""
        self.is_cut = False
        """Whether retention has cut the topic."""
        self.lost: set[int] = set()
        """Executors whose indexes are lost, and not made anew since."""
        self.unrecorded: list[Message] = []
        """What the broker kept from readers when the index was lost that knew it as committed."""
        self.forgotten = Forgotten()
        self.shards: Callable[[], tuple[int, int]] = lambda: (setup.shards, 0)
        """How many there are by now, and up to where all is published, as the publisher knows."""
        self.has_lost_progress = False
        """Whether it ever was, and with it what open transactions were seen to hide."""
        self.repeats_after: int | None = None
        """What was created later may be published again where it was cut: that was said."""
        self.must_refuse = ""
        """Why the publisher must not go on, if so."""
        self.may_refuse: set[str] = set()
        """Codes with which the publisher may give up: what has happened makes them right."""
        self.too_much = ""
        """What was done at once and is bounded, if so."""
        self._rows = 0
        self._begun = 0

    # -- what the schedule does -------------------------------------------------------------------

    def act(self, step: Step) -> None:
        """One step that is not the publisher's own."""
        name, *arguments = step
        getattr(self, f"_do_{name}")(*arguments)

    def _do_write(self, transaction: int, aggregate: int, reuse: int, count: int) -> None:
        """Statements of a transaction; `reuse` takes the lowest version that nobody has."""
        rows = self._of(transaction)
        aggregate_id = f"a{aggregate}"
        for _ in range(count):
            taken = {v for a, v in self.committed if a == aggregate_id} | {
                row.version
                for open_rows in [*self.transactions.values(), *self.unapplied]
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

    def _of(self, transaction: int) -> list[Row]:
        """Its rows; it begins with the first."""
        if transaction not in self.transactions:
            self._begun += 1
            self.begun[transaction] = self._begun, self.clock
        return self.transactions.setdefault(transaction, [])

    def _do_commit(self, transaction: int) -> None:
        rows = self.transactions.pop(transaction, [])
        self.prepared.discard(transaction)
        if self.setup.is_replica:
            self.unapplied.append(rows)
        else:
            self._show(rows)

    def _show(self, rows: list[Row]) -> None:
        """A transaction's rows become visible."""
        for row in rows:
            row.committed = self.moment
            row.committed_at = self.clock
            row.sought = row.sought or bool(row.seen)
            row.sought = row.sought or self.setup.is_replica
            row.late = row.create_time <= self.reached
            key = (row.aggregate_id, row.version)
            if self.setup.allows_second and key in self.committed:
                self.second.setdefault(key, []).append(row)
                self.counts["second rows"] += 1
            else:
                self.committed[key] = row
            self.counts["rows"] += 1
            self.counts["late commits"] += row.late

    def rows_of(self, key: tuple[str, int]) -> list[Row]:
        """Those of one version."""
        first = self.committed.get(key)
        return [] if first is None else [first, *self.second.get(key, ())]

    @property
    def rows(self) -> list[Row]:
        """All that are committed."""
        second = (row for rows in self.second.values() for row in rows)
        return [*self.committed.values(), *second]

    def _do_double(self, transaction: int, number: int, is_alike: int) -> None:
        """A transaction inserts another row of a version, with the same event or with another."""
        open_rows = [row for rows in self.transactions.values() for row in rows]
        some = sorted([*self.committed.values(), *open_rows], key=lambda row: row.payload)
        if some:
            of = some[number % len(some)]
            self._rows += 1
            payload = of.payload if is_alike else of.payload + b"+%d" % self._rows
            self._of(transaction).append(Row(of.aggregate_id, of.version, self.clock, payload))

    def _do_spoil(self, transaction: int, how: str) -> None:
        """The last row of a transaction is one whose record is refused; see `broker`."""
        for row in self.transactions.get(transaction, [])[-1:]:
            row.refused = True
            row.payload += how.encode()

    def _do_zero(self, transaction: int, aggregate: int) -> None:
        """A row whose version lies below the first."""
        rows = self._of(transaction)
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

    def _do_publish(self, number: int) -> None:
        """A user wants the row of a dead letter published after all: as `ops.dead.retry` asks."""
        broker = self.broker
        main = broker.topics[0]
        dead = {
            (m.key() or b"", dict(m.headers())["ce_sequence"] or b"")
            for place in broker.log
            if place[0] == f"{main}.dead"
            for m in broker.read(place, 0)
        }
        some = sorted(key for key in dead if int(key[1]) > 0)
        if not some:
            return
        key = some[number % len(some)]
        places = [(main, partition) for partition in range(broker.partitions)]
        there = [m for place in places for m in broker.read(place, 0)]
        if any((m.key(), dict(m.headers())["ce_sequence"]) == key for m in there):
            self.counts["found by the user"] += 1
            return
        aggregate_id, version = key[0].decode(), int(key[1])
        self.asked["publish", aggregate_id, version] += 1
        self.counts["asked to publish"] += 1
        searched = tuple(map(broker.stable, places))
        request = Request(
            f"{self.asked.total()}", "publish", aggregate_id, version, searched=searched
        )
        self.requests.append(request)

    def _do_accept(self, accepts: int) -> None:
        """The broker's limits are raised, or are what they were."""
        self.accepts = bool(accepts)
        self.has_accepted = self.has_accepted or self.accepts

    def _do_rollback(self, transaction: int) -> None:
        self.prepared.discard(transaction)
        self.counts["rollbacks"] += bool(self.transactions.pop(transaction, ()))

    def _do_prepare(self, transaction: int) -> None:
        """It outlives restarts of the database, and its connection."""
        if transaction in self.transactions:
            self.prepared.add(transaction)

    def _do_recover(self) -> None:
        """The database restarts: it says of what was prepared that it begins now."""
        for number in sorted(self.transactions):
            if number in self.prepared:
                self.counts["recovered transactions"] += 1
                self.begun[number] = self.begun[number][0], self.clock
            else:
                self._do_rollback(number)

    def _do_apply(self, transactions: int) -> None:
        """The replica applies so many."""
        for rows in self.unapplied[:transactions]:
            self.counts["applied late"] += any(r.create_time <= self.reached for r in rows)
            self._show(rows)
        del self.unapplied[:transactions]

    def _do_ahead(self, transaction: int, micros: int) -> None:
        """The last row of a transaction has a time in the future."""
        for row in self.transactions.get(transaction, [])[-1:]:
            self.counts["rows in the future"] += 1
            row.create_time += micros
            row.is_ahead = True

    def _do_grow(self, transaction: int, size: int) -> None:
        """The last row of a transaction has at least so many bytes."""
        for row in self.transactions.get(transaction, [])[-1:]:
            row.payload = row.payload.ljust(size, b".")

    def _do_archive(self, aggregate: int, upto: int) -> None:
        """An aggregate's first versions were deleted from the store."""
        for version in range(upto + 1):
            self.counts["archived"] += bool(self.committed.pop((f"a{aggregate}", version), None))

    def _do_restore(self, micros: int) -> None:
        """The database is what it was so long ago, and its clock goes on."""
        self.counts["restores"] += 1
        for number in sorted(self.transactions):
            self._do_rollback(number)
        since = self.clock - micros
        for key, row in [*self.committed.items()]:
            if row.committed_at > since:
                self.undone.setdefault(key, []).append(self.committed.pop(key))

    def _do_stale(self, is_stale: int) -> None:
        """Somebody else reads the open transactions too often, or has ended."""
        self.counts["stale answers"] += is_stale
        self.is_stale = bool(is_stale)

    def _do_skip_blind(self, aggregate: int) -> None:
        """A user has a gap skipped of an aggregate that holds nothing, as far as is known."""
        aggregate_id = f"a{aggregate}"
        if aggregate_id in self.disk.held():
            return
        self.counts["asked to skip what is not held"] += 1
        number = self.counts["asked to skip what is not held"]
        self.requests.append(Request(f"blind {number}", "skip", aggregate_id, None))

    def _do_topic(self, how: str, *arguments: Any) -> None:
        """Something happens to topics: a function of `damage`."""
        self.damage(self, how, *arguments)

    def _do_time(self, micros: int) -> None:
        self.clock += micros
        self.monotonic += micros / 1e6

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
        if worker.done or not worker.stale:
            self.stalled.remove(worker)
            self.goes_on(worker)

    def _do_fault(self, name: str) -> None:
        self.faults[name] += 1

    def _do_lose(self, executor: int) -> None:
        self.counts["lost indexes"] += 1
        self.lost.add(executor)
        self.unrecorded += self.broker.kept_from_readers()
        self.disk.lose(executor)

    def _do_power(self, writes: int, is_cut: int) -> None:
        """The machine that runs the publisher crashes."""
        self.counts["power lost"] += 1
        self.end_driver()
        self.disk.lose_power(writes, bool(is_cut))

    def _do_forget(self, name: str, is_cut: int) -> None:
        """A file of the state is gone, or empty."""
        self.counts[f"{name} lost"] += name in self.files
        self.has_lost_progress = self.has_lost_progress or name == "progress.json"
        self.may_refuse |= {"state.start_lost"} if self.is_cut and self.has_lost_progress else set()
        self.disk.forget(name, bool(is_cut))

    def _do_older(self, executor: int, writes: int) -> None:
        self.counts["older indexes"] += 1
        self.lost.add(executor)  # what it lacks, if the topic is cut, too
        self.unrecorded += self.broker.kept_from_readers()
        self.disk.set_back(executor, writes)

    def _do_timeout(self) -> None:
        self.broker.time_out()

    def _do_pause(self, is_paused: int) -> None:
        self.pause(bool(is_paused))

    def _do_look(self) -> None:
        self.look()

    def _do_markers(self) -> None:
        self.broker.settle()

    def _do_late_end(self) -> None:
        self.broker.deliver_late_ends()

    # -- the publisher's life ---------------------------------------------------------------------

    def stopped(self) -> None:
        """The publisher is down."""
        if self.stopped_at is None:
            self.stopped_at = min(self.reached, self.clock_known)

    def started(self) -> None:
        """It runs again: what may have committed meanwhile, or just before, has to be found.

        As far as it was not older than the horizon when the publisher went down, by the clock that
        the database had then.
        """
        stopped_at, self.stopped_at = self.stopped_at, None
        setup = self.setup
        if not (setup.is_down and setup.horizon and stopped_at):
            return
        since = stopped_at - setup.horizon + SLACK
        for row in self.committed.values():
            row.sought = row.sought or row.create_time > since

    def polled(self, after: int) -> None:
        """Where the clock is behind what was read, rows may come that no window shows: what is
        open then is to be found, however late it commits."""
        self.polled_at = self.clock
        if self.setup.watermark == "auto" and not self.is_stale and self.clock < after:
            for row in (row for rows in self.transactions.values() for row in rows):
                row.seen = row.seen or self.moment

    def forget(self) -> None:
        """A runner begins, or retention cuts: an index that is lost is made anew from what is left.

        Where there are several executors, one of them may have none, or an older one.
        """
        if self.is_cut and (self.lost or self.setup.executors > 1):
            self.forgotten.note(self, self.shards()[1])

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
        """Points of the next step: name, how many times from now, step."""
        self.armed = {}
        for name, hit, step in points:
            self.armed.setdefault(name, []).append([hit, step])


class Current:
    """The world that the parts belong to which the real code is given."""

    world: World


def world() -> World:
    """The current one."""
    return Current.world


class Clock:
    """The machine's time in the current world."""

    def monotonic(self) -> float:
        """What a process has slept is its own."""
        return world().monotonic + world().process.waited

    def time(self) -> float:
        """About the database's."""
        return world().clock / 1e6

    def sleep(self, seconds: float) -> None:
        """In few steps: time passes for the broker, too."""
        world().process.waited += max(seconds, 2.0)
        world().broker.settle()
