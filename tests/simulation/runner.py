"""Runs schedules, and shrinks those that fail."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tests import cautions
from tests.simulation.broker import Broker
from tests.simulation.checker import ViolationError, check
from tests.simulation.damage import damage
from tests.simulation.disk import Disk
from tests.simulation.driver import TOPIC, Driver, Stopped
from tests.simulation.kinds import made
from tests.simulation.mutants import MUTANTS
from tests.simulation.parts import scaled
from tests.simulation.schedule import Schedule
from tests.simulation.world import SLACK, Current, Setup, Step, World

_MOST_ROUNDS = 60
"""Batches that a healed world may need until nothing is left to do."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run: what it contained, and what was violated (None: nothing)."""

    counts: Counter[str]
    kind: str | None = None
    text: str = ""


def run(schedule: Schedule) -> Outcome:
    """Run one schedule to its end, heal the world, let it settle, check. Needs `scaled()`."""
    setup = schedule.setup
    world = Current.world = World(setup)
    world.disk = Disk()
    world.broker = Broker(world, [TOPIC, *(f"{TOPIC}.{t}" for t in ("gaps", "dead", "late"))])
    driver = Driver(world)
    world.look = driver.look
    world.pause = driver.pause
    world.shards = lambda: (driver.shards, driver.low)
    world.damage = damage
    world.goes_on = driver.goes_on
    world.end_driver = driver.stop
    cautions.forget_all()
    kind, text = None, ""
    try:
        for step in schedule.steps:
            _step(world, driver, step)
        counted_from = _heal(world, driver)
        start = json.loads(world.files["start.json"])["position"]
        check(world, start, counted_from)
    except ViolationError as violation:
        kind, text = violation.kind, str(violation)
    except Stopped as stopped:
        code = str(stopped).split(":", 1)[0]
        if code in world.may_refuse:
            world.counts[f"refused {code}"] += 1
        else:
            kind, text = f"stopped: {code}", str(stopped)
    except Exception as error:
        kind, text = f"raised: {type(error).__name__}", repr(error)
    finally:
        world.armed = {}
        driver.stop()
        for worker in world.stalled:
            worker.end()
    return Outcome(world.counts, kind, text)


def _step(world: World, driver: Driver, step: Step) -> None:
    if step[0] == "batch":
        _, driver.shift, driver.turn, points = step
        world.arm(points)
        driver.batch()
        world.armed = {}
        world.faults.clear()
        world.broker.is_cut_off = False
    elif step[0] == "restart":
        shards = step[1]
        world.counts["restarts"] += 1
        world.counts["rescales"] += bool(shards and shards != driver.shards)
        driver.restart(shards)
    else:
        world.act(step)


def _heal(world: World, driver: Driver) -> int | None:
    """No more faults; whatever is open ends; time goes on until nothing is left to do.

    Returns:
        For the checker, what is `counted_from`.

    Raises:
        ViolationError: it does not come to rest.
    """
    driver.settles()
    if world.counts["commits that became aborts"]:
        driver.restart(0)  # the last one of a producer that is kept is found by the next one
    world.page_rows = 1000
    world.is_stale = False
    while world.stalled:
        world.act(["resume", 0, None])
    for transaction in sorted(world.transactions):
        world.act(["commit" if transaction % 2 else "rollback", transaction])
    world.act(["apply", len(world.unapplied)])
    world.broker.deliver_late_ends()
    world.broker.time_out()
    world.broker.settle()
    newest = max((row.create_time for row in world.committed.values()), default=0)
    # an index may have got further than the driver has written down
    world.act(["time", max(0, newest - world.clock, world.reached - world.clock) + 1])
    horizon = world.setup.horizon
    counted_from: int | None = world.clock - horizon + SLACK
    if not horizon:
        counted_from = None
        # Whatever committed behind the window shows when a later version arrives.
        for aggregate_id in sorted({a for a, _ in world.committed}):
            world.act(["write", 9, int(aggregate_id[1:]), 0, 1])
        world.act(["commit", 9])
    end = world.clock + horizon + SLACK
    age = 1_000_000
    world.act(["time", world.setup.delay])
    for _ in range(_MOST_ROUNDS):
        world.clock += 1
        if driver.batch():
            driver.look()
            continue
        due = driver.next_due
        if due is not None:
            world.act(["time", max(0, due - world.clock)])
        elif horizon and world.clock < end:
            age *= 2
            world.act(["time", min(age, end - world.clock)])
            driver.look()
        else:
            driver.look()
            if not driver.batch() and driver.next_due is None and driver.is_idle:
                world.broker.settle()
                return counted_from
    raise ViolationError("does not settle", f"{world.files.get('progress.json')}")


# -- many ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A seed whose schedule violates something.

    Attributes:
        of: the kind of the schedule.
        kind: of the violation.
    """

    of: str
    seed: int
    kind: str
    text: str


def sweep(
    first: int, count: int, mutant: str | None = None, kinds: Sequence[str] = ("any",)
) -> tuple[Counter[str], list[Failure]]:
    """Run the schedules of so many seeds: what they contained, and which failed.

    Args:
        kinds: in turn, one a seed.
    """
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    with scaled(), _own_collector(), MUTANTS[mutant]() if mutant else nullcontext():
        for seed in range(first, first + count):
            of = kinds[seed % len(kinds)]
            outcome = run(made(of, seed))
            del Current.world
            gc.collect(0)
            counts += outcome.counts
            if outcome.kind is not None:
                failures.append(Failure(of, seed, outcome.kind, outcome.text))
    return counts, failures


@contextmanager
def _own_collector() -> Iterator[None]:
    """The collector runs when asked: a world, full of cycles, leaves before it has grown old."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sweep_all(
    first: int,
    count: int,
    jobs: int,
    mutant: str | None = None,
    kinds: Sequence[str] = ("any",),
    chunk: int = 500,
) -> Iterator[tuple[int, Counter[str], list[Failure]]]:
    """`sweep` in so many processes; yields, chunk by chunk, how many schedules were run."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_tune_garbage_collector) as pool:
        sizes = {
            pool.submit(sweep, at, min(chunk, first + count - at), mutant, kinds): min(
                chunk, first + count - at
            )
            for at in range(first, first + count, chunk)
        }
        for done in as_completed(sizes):
            yield sizes.pop(done), *done.result()


def _tune_garbage_collector() -> None:
    """Let the collector look at less, less often: a world is small and gone at once."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


# -- shrinking -----------------------------------------------------------------------------------


def shrink(schedule: Schedule, kind: str, most: int = 3000) -> Schedule:
    """A small schedule that fails in the same way."""
    left = [most]

    def fails(candidate: Schedule) -> bool:
        left[0] -= 1
        return left[0] >= 0 and run(candidate).kind == kind

    while True:
        smaller = _smaller(schedule, fails)
        if smaller is None or left[0] < 0:
            return schedule
        schedule = smaller


def _smaller(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule | None:
    """One pass over everything that could be left out; None where nothing could."""
    setup, steps = schedule.setup, list(schedule.steps)
    changed = False
    size = max(1, len(steps) // 2)
    while size:
        at = 0
        while at < len(steps):
            rest = steps[:at] + steps[at + size :]
            if fails(Schedule(setup, rest)):
                steps, changed = rest, True
            else:
                at += size
        size //= 2
    for at in range(len(steps)):
        for simpler in _simpler_steps(steps[at]):
            rest = [*steps[:at], simpler, *steps[at + 1 :]]
            if fails(Schedule(setup, rest)):
                steps, changed = rest, True
                break
    default = Setup()
    for name in vars(default):
        for value in _simpler_values(getattr(setup, name), getattr(default, name)):
            simpler_setup = replace(setup, **{name: value})
            if simpler_setup.shards > simpler_setup.partitions:
                continue
            if fails(Schedule(simpler_setup, steps)):
                setup, changed = simpler_setup, True
                break
    return Schedule(setup, steps) if changed else None


def _simpler_steps(step: Step) -> Iterator[Step]:
    if step[0] == "batch":
        points = step[3]
        for at in range(len(points)):
            yield [*step[:3], points[:at] + points[at + 1 :]]
        if step[1] or step[2]:
            yield ["batch", 0, 0, points]
    elif step[0] == "write":
        for at, plain in ((3, 0), (4, 1), (2, 0)):
            if step[at] != plain:
                yield [*step[:at], plain, *step[at + 1 :]]


def _simpler_values(value: Any, default: Any) -> Iterator[Any]:
    if value != default:
        yield default
