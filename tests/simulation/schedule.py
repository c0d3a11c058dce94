"""Schedules: what happens, in which order. Everything about one follows from its seed.

A schedule is an explicit list of steps, made from the seed at once, so that a failing one can be
shrunk and kept without it:

    write T A REUSE N     transaction T inserts N events of aggregate A
    double T N ALIKE      it inserts another row of the n-th version, alike or not
    spoil T HOW           its last row is one whose record is refused, in one of three ways
    zero T A              it inserts version 0 of aggregate A, which lies below the first
    commit T, rollback T
    time µs, clock µs     the database's time goes on; its clock is set
    batch SHIFT TURN POINTS   runners of all shards, and some windows; at the n-th passing of a
                          point, a step happens in it
    restart SHARDS        the publisher stops and starts, perhaps with another number of shards
    lose E, older E N     the index of an executor is deleted, or set back by N writes
    look                  time passes for the publisher, which counts again what is due
    resume W N            a stalled runner goes on
    timeout, markers, late_end   what the broker does in its own time
    ask ACTION N          a user wants the gap of an aggregate retried or skipped: of the n-th
                          that misses a version, where there is one

and those of `kinds` alone:

    ahead T µs, grow T N  its last row has a time in the future; is larger by N bytes
    stale 1, stale 0      answers about open transactions are not fresh from now on, or are
    apply N               the replica that is read applies N transactions
    archive A N           versions up to N of an aggregate are deleted from the store
    restore µs            the database is what it was so long ago; its clock goes on
    power N CUT           the publisher's machine crashes: files that were not on the disk are gone
                          or empty, indexes are set back by N writes
    forget NAME CUT       a file of the state is gone, or empty
    pause 1, pause 0      a user wants nothing to be published from now on, or that to end
    publish N             a user wants the row of the n-th dead letter published after all, where
                          the topic does not have it
    accept 1, accept 0    the broker takes from now on what it would refuse, or refuses it
    skip_blind A          a user wants a gap skipped of an aggregate that holds nothing
    topic WHAT …          retention, deletion, …: a function of `damage`
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from random import Random
from typing import Any

from tests.simulation.broker import ALONE, BY_CLIENT, WITH_ITS_BATCH
from tests.simulation.world import Setup, Step

CRASH_POINTS = [
    "store.now",
    "store.poll",
    "store.window",
    "store.rows",
    "store.backtrack",
    "store.below",
    "index.open",
    "index.write",
    "index.written",
    "kafka.init",
    "kafka.taken",
    "kafka.offsets",
    "kafka.read",
    "kafka.flush",
    "kafka.flushed",
    "kafka.commit",
    "kafka.committed",
    "before_begin",
    "after_begin",
    "during_produce",
    "after_produce",
    "before_commit",
    "after_commit",
    "before_index",
    "after_index",
    "before_report",
    "planned",
    "task",
    "tasks done",
    "write progress.json",
    "remembered",
]
"""What a process can be stopped at, by the names that the points have."""

RUNNER_POINTS = [
    "before_report",
    "kafka.taken",
    "kafka.read",
    "index.written",
    "before_commit",
    "after_commit",
    "after_index",
    "store.now",
    "store.rows",
]
"""Where a runner loses its connection."""

TASK_POINTS = CRASH_POINTS[: CRASH_POINTS.index("before_report")]
FAULTS = [
    "commit refused",
    "commit lost",
    "commit unanswered",
    "commit times out",
    "commit sent twice",
    "record rejected",
    "report lost",
    "offsets away",
    "init slow",
    "store away",
    "disk full",
]


@dataclass(frozen=True)
class Schedule:
    """What is run."""

    setup: Setup
    steps: list[Step]

    def as_json(self) -> dict[str, Any]:
        """For keeping it; what is as by default is left out."""
        default = Setup()
        setup = {k: v for k, v in asdict(self.setup).items() if v != getattr(default, k)}
        return {"setup": setup, "steps": self.steps}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Schedule:
        """What `as_json` made."""
        known = {f.name for f in fields(Setup)}
        assert set(data["setup"]) <= known, data["setup"]
        return Schedule(Setup(**data["setup"]), data["steps"])


def make(seed: int) -> Schedule:
    """The schedule of a seed."""
    schedule = Maker(Random(seed)).make()
    # by draws of its own, so that the rest of a seed's schedule stays as it was
    steps = _with_users(schedule.steps, Random(f"{seed} users"))
    steps = _with_markers_left_out(steps, Random(f"{seed} markers"))
    steps = _with_unknown_offsets(steps, Random(f"{seed} offsets"))
    return with_channel(Schedule(schedule.setup, steps), Random(f"{seed} channel"))


def with_channel(schedule: Schedule, rng: Random, *, is_quiet: bool = False) -> Schedule:
    """When coordinator and runners hear of each other; in some schedules, runners fail or stall.

    Args:
        is_quiet: none does.
    """
    setup = replace(
        schedule.setup,
        order=rng.choice(["", "", "prompt", "late"]),
        keeps=rng.random() < 0.15,
        orphans=rng.random() < 0.5,
    )
    kills, stalls = (rng.random() < 0.2 and not is_quiet for _ in range(2))
    steps: list[Step] = []
    for step in schedule.steps:
        points: list[list[Any]] = []
        if step[0] == "batch":
            for drawn, action in ((kills, "kill"), (stalls, "stall")):
                if drawn and rng.random() < 0.5:
                    name, hit = rng.choice(RUNNER_POINTS), rng.choice([1, 1, 1, 2, 2, 3, 5])
                    points.append([name, hit, [action]])
            if stalls and rng.random() < 0.5:
                woken = ["resume", rng.randrange(2), rng.choice([None, None, 1, 3, 8, 15])]
                points.append([rng.choice([*RUNNER_POINTS, "planned", "task"]), 1, woken])
            step = [*step[:3], [*step[3], *points]]  # noqa: PLW2901
        steps.append(step)
    return Schedule(setup, steps)


def _with_unknown_offsets(steps: list[Step], rng: Random) -> list[Step]:
    """In some schedules the connection is lost under a question for offsets."""
    left_out = any("markers left out" in str(step) for step in steps)
    if rng.random() > (0.7 if left_out else 0.1):
        return steps
    made: list[Step] = []
    for step in steps:
        if step[0] == "batch":
            hits = rng.sample(range(1, 20 if left_out else 6), rng.choice([1, 2]))
            points = [["kafka.offsets", hit, ["fault", "offsets unknown"]] for hit in hits]
            made.append([*step[:3], [*step[3], *points]])
        else:
            made.append(step)
    return made


def _with_markers_left_out(steps: list[Step], rng: Random) -> list[Step]:
    """In some schedules the broker leaves the markers out of whatever transaction ends next.

    Only where shards stay as many: another transactional id cannot end what was left open.
    """
    rescaled = any(step[0] == "restart" and step[1] for step in steps)
    if rescaled or rng.random() > 0.15:
        return steps
    made: list[Step] = []
    for step in steps:
        if step[0] == "batch" and rng.random() < 0.6:
            points = [*step[3]]
            for _ in range(rng.choice([1, 1, 2])):
                name = rng.choice(["task", "kafka.init", "kafka.commit", "kafka.committed"])
                points.append([name, rng.choice([1, 1, 2]), ["fault", "markers left out"]])
            made.append([*step[:3], points])
        else:
            made.append(step)
    return made


def _with_users(steps: list[Step], rng: Random) -> list[Step]:
    """Some schedules also have rows that are refused, and users who ask for something."""
    refuses, asks = rng.random() < 0.2, rng.random() < 0.2
    zeros = refuses and rng.random() < 0.3
    made: list[Step] = []
    for step in steps:
        if asks and step[0] == "batch" and rng.random() < 0.3:
            # transaction 7 stays open with two versions, so that two gaps are there at once
            aggregate = rng.randrange(3)
            made += [["write", number, aggregate, 0, 1] for number in (7, 9, 7, 9)]
            made.append(["commit", 9])
        made.append(step)
        while asks and step[0] == "batch" and rng.random() < 0.5:
            made.append(["ask", rng.choice(["retry", "skip", "skip"]), rng.randrange(3)])
            made += [["look"], ["batch", rng.randrange(2), rng.randrange(4), []]]
        if step[0] == "write" and refuses and rng.random() < 0.3:
            made.append(["spoil", step[1], rng.choice([BY_CLIENT, ALONE, WITH_ITS_BATCH])])
        if step[0] == "write" and zeros and rng.random() < 0.3:
            made.append(["zero", step[1], step[2]])
    return made


class Maker:
    """Draws one schedule."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        pick = rng.choice
        self._swarm = {
            name
            for name in (
                "crash",
                "kill",
                "stall",
                "rescale",
                "lose",
                "older",
                "clock",
                "rollback",
                "faults",
                "concurrent",
                "restart",
                "late_end",
                "timeout",
            )
            if rng.random() < (0.6 if name == "rollback" else 0.3)
        }
        several = "rescale" in self._swarm
        partitions = pick([2, 2, 3, 4] if several else [1, 1, 1, 2, 3])
        self._setup = Setup(
            partitions=partitions,
            shards=rng.randint(1, partitions),
            page_rows=pick([1, 2, 3, 5, 10, 50]),
            chunk_rows=pick([1, 2, 3, 50, 50]),
            batch_rows=pick([1, 2, 50]),
            fetch=pick([1, 2, 50]),
            delay=pick([0, 500_000, 1_000_000]),
            start=pick(["beginning", "beginning", "now"]),
            late=pick(["publish", "publish", "divert", "drop"]),
            policy="hold_shard" if rng.random() < 0.15 else "hold_aggregate",
            max_backoff=pick([1, 1, 2, 3]),
            backoff_base=pick([250_000, 1_000_000]),
            horizon=pick([60_000_000, 60_000_000, 8_000_000, 0]),
            executors=2 if rng.random() < 0.3 or "stall" in self._swarm else 1,
            lazy_markers=rng.random() < 0.3,
            eager_send=rng.random() < 0.5,
        )
        rng.random()  # of a choice that is gone: each seed keeps its schedule
        self._aggregates = rng.randint(1, 4)
        self._transactions = rng.randint(1, 4)
        self._reuse = pick([0.1, 0.3, 0.6])
        self._ties = rng.random() < 0.3
        self._open: list[int] = []

    def make(self) -> Schedule:
        """All of it."""
        rng = self._rng
        steps: list[Step] = []
        for _ in range(rng.randint(1, 4)):
            for _ in range(rng.randint(1, 5)):
                steps += self._writing()
            steps += self._between()
            steps.append(self._batch())
            if rng.random() < 0.5:
                steps.append(["look"])
        if self._open and rng.random() < 0.3:
            steps += self._outlasting()
        return Schedule(self._setup, steps)

    def _outlasting(self) -> list[Step]:
        """Transactions that stay open until what they hold back is skipped, and then commit."""
        steps: list[Step] = []
        for attempt in range(self._setup.max_backoff):
            steps.append(["time", self._setup.backoff_base << attempt])
            steps.append(self._batch())
        steps += [["commit", number] for number in self._open]
        return steps

    def _writing(self) -> list[Step]:
        rng = self._rng
        steps: list[Step] = []
        draw = rng.random()
        if draw < 0.25:
            # A transaction by itself
            steps.append(self._write(9))
            steps.append(["commit", 9])
        elif draw < 0.65 or not self._open:
            number = rng.randrange(self._transactions)
            if number not in self._open:
                self._open.append(number)
            steps.append(self._write(number))
        else:
            steps.append(self._ending())
        if not self._ties or rng.random() < 0.3:
            steps.append(self._time())
        return steps

    def _write(self, transaction: int) -> Step:
        rng = self._rng
        reuse = int(rng.random() < self._reuse)
        return ["write", transaction, rng.randrange(self._aggregates), reuse, rng.choice([1, 1, 2])]

    def _ending(self) -> Step:
        rng = self._rng
        number = self._open.pop(rng.randrange(len(self._open)))
        if "rollback" in self._swarm and rng.random() < 0.5:
            return ["rollback", number]
        return ["commit", number]

    def _time(self) -> Step:
        return ["time", self._rng.choice([1, 100_000, 300_000, 700_000, 2_000_000])]

    def _between(self) -> list[Step]:
        """What happens to the publisher between two batches."""
        rng, swarm = self._rng, self._swarm
        steps: list[Step] = []
        if "clock" in swarm and rng.random() < 0.3:
            steps.append(["clock", rng.choice([-3_000_000, -500_000, -1, 5_000_000])])
        if "lose" in swarm and rng.random() < 0.3:
            steps.append(["lose", rng.randrange(self._setup.executors)])
        if "older" in swarm and rng.random() < 0.3:
            steps.append(["older", rng.randrange(self._setup.executors), rng.randint(1, 4)])
        rescaled = "rescale" in swarm and rng.random() < (0.7 if "stall" in swarm else 0.4)
        restarted = "restart" in swarm and rng.random() < 0.3
        if rescaled or restarted:
            shards = rng.randint(1, self._setup.partitions) if rescaled else 0
            steps.append(["restart", shards])
        if "stall" in swarm and rng.random() < 0.4:
            steps.append(["resume", rng.randrange(2), self._some_points()])
        if "timeout" in swarm and rng.random() < 0.2:
            steps.append(["timeout"])
        if self._setup.lazy_markers and rng.random() < 0.3:
            steps.append(["markers"])
        if "late_end" in swarm and rng.random() < 0.3:
            steps.append(["late_end"])
        return steps

    def _some_points(self) -> int | None:
        return self._rng.choice([None, None, 1, 3, 8, 15])

    def _batch(self) -> Step:
        rng, swarm = self._rng, self._swarm
        points: list[list[Any]] = []
        if "crash" in swarm and rng.random() < 0.5:
            points.append([rng.choice(CRASH_POINTS), self._hit(), ["crash"]])
        if "kill" in swarm and rng.random() < 0.3:
            points.append([rng.choice(TASK_POINTS), self._hit(), ["kill"]])
        if "stall" in swarm and rng.random() < 0.4:
            points.append([rng.choice(TASK_POINTS), self._hit(), ["stall"]])
        if "stall" in swarm and rng.random() < 0.3:
            woken = ["resume", rng.randrange(2), self._some_points()]
            points.append([rng.choice(TASK_POINTS), self._hit(), woken])
        if "faults" in swarm and rng.random() < 0.5:
            points.append([rng.choice(TASK_POINTS), 1, ["fault", rng.choice(FAULTS)]])
        if "late_end" in swarm and rng.random() < 0.3:
            points.append(["kafka.commit", 1, ["fault", "commit sent twice"]])
            points.append([rng.choice(["kafka.flushed", "after_produce"]), 2, ["late_end"]])
        if "timeout" in swarm and rng.random() < 0.2:
            points.append([rng.choice(TASK_POINTS), self._hit(), ["timeout"]])
        if "concurrent" in swarm:
            for _ in range(rng.randint(0, 3)):
                step = rng.choice([self._write(8), ["commit", 8], self._time()])
                if self._open and rng.random() < 0.5:
                    step = self._ending()
                points.append([rng.choice(TASK_POINTS), self._hit(), step])
        return ["batch", rng.randrange(2), rng.randrange(4), points]

    def _hit(self) -> int:
        return self._rng.choice([1, 1, 1, 2, 2, 3])
