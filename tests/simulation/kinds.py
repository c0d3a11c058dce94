"""Kinds of schedules: each about one thing that happens to a store, a topic or a machine.

`any` is the general one: whatever may happen to processes, clients and transactions, in any
combination. Each of the others adds what it is about to a quieter life. A kind that is not enabled
is of something that today's code gets wrong: a test shows that it still does, so that whoever
fixes it has to switch the kind on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.simulation import schedule
from tests.simulation.broker import ALONE, BY_CLIENT, WITH_ITS_BATCH
from tests.simulation.schedule import Maker, Schedule, with_channel
from tests.simulation.world import Step

MAIN, GAPS, DEAD, ALL = 0, 1, 2, -1
"""Topics, as steps name them."""


@dataclass(frozen=True)
class Kind:
    """What a kind is about.

    Attributes:
        make: the schedule of a seed.
        findings: of the review, which it shows.
        expected: what has to come of it.
        enabled: whether the code is up to it.
        shows: where it is not, what the checker says of some schedule.
    """

    make: Callable[[int], Schedule]
    findings: str
    expected: str
    enabled: bool = True
    shows: str = ""


class _Quiet(Maker):
    """A life with few faults, to which each kind adds its own.

    Args:
        swarm: the faults of the general kind that may happen as well.
        setup: what differs from what is drawn.
    """

    def __init__(self, rng: Random, *swarm: str, **setup: Any) -> None:
        super().__init__(rng)
        self._swarm &= set(swarm)
        setup.setdefault("executors", 1)
        self._setup = replace(self._setup, **setup)
        self.rng = rng

    def life(self, most: int = 4) -> list[Step]:
        """Some transactions."""
        return [step for _ in range(self.rng.randint(1, most)) for step in self._writing()]

    def alone(self, most: int = 4) -> list[Step]:
        """Some transactions, each over before the next begins: no gaps."""
        steps: list[Step] = []
        for _ in range(self.rng.randint(1, most)):
            steps += [self._write(9), ["commit", 9], self._time()]
        return steps

    def batches(self, most: int = 2) -> list[Step]:
        """Some batches, and looks of the driver."""
        steps: list[Step] = []
        for _ in range(self.rng.randint(1, most)):
            steps.append(self._batch())
            if self.rng.random() < 0.6:
                steps.append(["look"])
        return steps

    def some(self, probability: float, *steps: Step) -> list[Step]:
        """These, or nothing."""
        return [*steps] if self.rng.random() < probability else []

    def made(self, steps: list[Step]) -> Schedule:
        """The schedule."""
        return Schedule(self._setup, steps)

    @property
    def horizon(self) -> int:
        """Of the recount, µs."""
        return self._setup.horizon

    def aggregate(self) -> int:
        """Any."""
        return self.rng.randrange(self._aggregates)

    def crash(self, *points: str) -> Step:
        """A batch in which the publisher dies."""
        hit = self.rng.choice([1, 1, 2, 3, 4, 5])
        return ["batch", 0, 0, [[self.rng.choice(points), hit, ["crash"]]]]


def _down(maker: _Quiet) -> list[Step]:
    """The publisher is down for a while, mostly longer than the horizon; transactions end."""
    rng, horizon = maker.rng, maker.horizon
    stop: Step = ["restart", 0]
    if rng.random() < 0.5:
        stop = maker.crash(*schedule.CRASH_POINTS)
    steps: list[Step] = [stop, ["restart", 0]]
    for _ in range(rng.randint(1, 3)):
        steps.append(["time", rng.choice([1_000_000, horizon // 2, horizon + 4_000_000])])
        steps += [maker._ending()] if maker._open and rng.random() < 0.7 else maker.life(1)
    return steps


def _lives_with_downtime(maker: _Quiet) -> list[Step]:
    steps: list[Step] = []
    for _ in range(maker.rng.randint(1, 3)):
        steps += maker.life() + maker.batches() + _down(maker)
        # a start that ends soon must not make the next one forget
        steps += maker.some(0.4, maker.crash(*schedule.CRASH_POINTS), ["restart", 0])
        steps += maker.some(0.3, ["time", maker.horizon + 4_000_000])
        steps += maker.batches()
    return steps


def _downtime(seed: int) -> Schedule:
    maker = _Quiet(Random(f"{seed} downtime"), "rollback", horizon=8_000_000, is_down=True)
    return maker.made(_lives_with_downtime(maker))


def _open(seed: int) -> Schedule:
    rng = Random(f"{seed} open")
    maker = _Quiet(rng, "rollback", horizon=8_000_000, watermark="auto", is_down=True)
    return maker.made(_lives_with_downtime(maker))


def _lost_progress(seed: int) -> Schedule:
    """As `open`, and progress.json is lost."""
    rng = Random(f"{seed} lost_progress")
    maker = _Quiet(rng, "rollback", horizon=8_000_000, watermark="auto", is_down=True)
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        steps += maker.life() + maker.batches()
        steps += maker.some(0.5, ["time", maker.horizon + 4_000_000], *maker.batches())
        steps += _down(maker)
        steps += maker.some(0.8, ["forget", "progress.json", rng.randrange(2)])
        steps += maker.some(0.2, ["lose", 0])
        steps += maker.some(0.3, maker.crash(*schedule.CRASH_POINTS), ["restart", 0])
        steps += maker.some(0.3, ["time", maker.horizon + 4_000_000])
        steps += maker.batches()
    return maker.made(steps)


def _stale(seed: int) -> Schedule:
    """Open transactions are seen now and then, by a publisher that runs all the time."""
    rng = Random(f"{seed} stale")
    maker = _Quiet(rng, "rollback", horizon=8_000_000, watermark="auto")
    steps: list[Step] = []
    for _ in range(rng.randint(2, 5)):
        steps += maker.life() + maker.batches()
        if rng.random() < 0.6:
            # what was seen times out while nobody sees anything, and ends
            steps += [["stale", 1], ["time", 4_000_000], ["look"], *maker.life(2)]
            steps += [*maker.batches(), ["time", rng.choice([1_000_000, 12_000_000])]]
            steps += maker.some(0.5, *[["commit", number] for number in maker._open])
            steps += [*maker.batches(), ["stale", 0]]
        steps += maker.some(0.4, ["time", rng.choice([1_000_000, 4_000_000, 12_000_000])])
    return maker.made(steps)


def _seen(seed: int) -> Schedule:
    """As `stale`, but each answer is fresh; or the account may not look at all."""
    rng = Random(f"{seed} seen")
    watermark = rng.choice(["auto", "auto", "denied"])
    maker = _Quiet(rng, "rollback", horizon=8_000_000, watermark=watermark)
    steps: list[Step] = []
    for _ in range(rng.randint(2, 5)):
        steps += maker.life() + maker.batches()
        steps += maker.some(0.4, ["time", rng.choice([1_000_000, 4_000_000, 12_000_000])])
    return maker.made(steps)


def _prepared(seed: int) -> Schedule:
    """Transactions are prepared, the database restarts, and they end long afterwards.

    Before the first start of the publisher, in between, or while it is down.
    """
    rng = Random(f"{seed} prepared")
    # so that what is counted again is seconds, not the month that it would be
    start = "2023-11-14T22:13:10+00:00"
    maker = _Quiet(rng, "rollback", horizon=8_000_000, watermark="auto", is_down=True, start=start)
    steps: list[Step] = []
    number = _PREPARED
    for _ in range(rng.randint(1, 3)):
        steps += maker.some(0.6, *maker.life(2))
        steps += maker.some(0.3, *maker.batches())
        steps += [["write", number, maker.aggregate(), 0, 1], ["prepare", number]]
        steps += maker.life(2)
        steps += maker.some(0.4, *maker.batches(), *_down(maker))
        steps += maker.some(0.8, ["time", maker.horizon + 4_000_000])
        steps += [["recover"], *maker.batches()]
        steps += maker.some(0.5, *maker.life(2), *maker.batches())
        steps += maker.some(0.3, *_down(maker))
        steps += [["time", rng.choice([1_000_000, 12_000_000])], *maker.batches()]
        steps += maker.some(0.7, ["commit", number], *maker.batches())
        number += 2
    return maker.made(steps)


def _replica(seed: int) -> Schedule:
    rng = Random(f"{seed} replica")
    maker = _Quiet(rng, "rollback", horizon=8_000_000, is_replica=True)
    steps: list[Step] = []
    for _ in range(rng.randint(2, 5)):
        steps += maker.life()
        steps += maker.some(0.7, ["apply", rng.randint(1, 9)])
        steps += maker.some(0.3, ["time", 12_000_000])
        steps += maker.batches()
    return maker.made(steps)


_PREPARED = 21
"""Number of a transaction that nothing else writes to; what is odd is committed in the end."""

_BEHIND = ("kafka.committed", "after_commit", "before_index", "index.write")
"""Where a publisher dies whose index is then behind the topic."""

_FOLDING = ("kafka.read", "kafka.read", "index.write", "index.written", "kafka.offsets")
"""Where a first fold is interrupted."""


def _cut_twice(
    seed: int, name: str, before: Callable[[_Quiet], list[Step]], *, gaps: bool = True
) -> Schedule:
    """Lives, with gaps or without, between which retention cuts the topics."""
    rng = Random(f"{seed} {name}")
    maker = _Quiet(rng, "rollback", fetch=rng.choice([1, 2]))
    life = maker.life if gaps else maker.alone
    steps: list[Step] = []
    for _ in range(rng.randint(1, 2)):
        steps += life(6) + maker.batches()
        topic = rng.choice([MAIN, MAIN, GAPS, DEAD, ALL])
        steps += maker.some(0.8, ["topic", "cut", topic, rng.choice([1, 2, 4, 100])])
        steps += before(maker)
        steps += maker.some(0.3, ["topic", "cut", topic, rng.choice([1, 2])])
        steps += maker.batches()
    return maker.made(steps + life() + maker.batches())


def _retention(seed: int) -> Schedule:
    """The index is kept."""

    def before(maker: _Quiet) -> list[Step]:
        return maker.some(0.5, maker.crash(*schedule.CRASH_POINTS))

    return _cut_twice(seed, "retention", before)


def _forgotten(seed: int) -> Schedule:
    """The index is lost."""
    return _cut_twice(seed, "forgotten", _lose, gaps=False)


def _forgotten_gaps(seed: int) -> Schedule:
    """The index is lost, and with it what is held and was skipped."""
    return _cut_twice(seed, "forgotten_gaps", _lose)


def _lose(maker: _Quiet) -> list[Step]:
    return [["restart", 0], *maker.some(0.8, ["lose", 0])]


def _first_fold(seed: int) -> Schedule:
    """The index is lost, and the fold that makes it anew interrupted."""

    def before(maker: _Quiet) -> list[Step]:
        steps: list[Step] = [["restart", 0], ["lose", 0]]
        for _ in range(maker.rng.randint(0, 3)):
            steps.append(maker.crash(*_FOLDING))
        return steps

    return _cut_twice(seed, "first_fold", before, gaps=False)


def _older_and_cut(seed: int) -> Schedule:
    """The index is an older copy, and what it misses is cut."""

    def before(maker: _Quiet) -> list[Step]:
        steps: list[Step] = [["restart", 0], ["older", 0, maker.rng.randint(1, 6)]]
        return steps + maker.some(0.3, maker.crash(*_FOLDING))

    return _cut_twice(seed, "older_and_cut", before, gaps=False)


_STATE = ["progress.json", "start.json", "run.json"]


def _retention_any(seed: int) -> Schedule:
    """Any part of the topics is cut at any time, and any part of the state lost, while transactions
    are open and gaps held."""
    rng = Random(f"{seed} retention_any")
    partitions = rng.choice([1, 2, 3])
    maker = _Quiet(
        rng,
        "rollback",
        "rescale",
        partitions=partitions,
        shards=rng.randint(1, partitions),
        executors=rng.choice([1, 1, 2]),
        horizon=rng.choice([0, 1_000_000, 8_000_000]),
        watermark=rng.choice(["off", "auto"]),
        start="beginning",
    )
    number, steps = _PREPARED, list[Step]()
    for _ in range(rng.randint(1, 3)):
        # one transaction that outlasts what follows, and what waits for it
        steps += maker.some(0.7, ["write", number, maker.aggregate(), 0, 1], maker._time())
        steps += maker.life(6) + maker.batches()
        steps += maker.some(0.5, ["time", rng.choice([2_000_000, 12_000_000])], *maker.batches())
        steps += maker.alone(3) + maker.batches(1) if rng.random() < 0.7 else []
        steps += maker.some(0.8, _cut(rng, partitions))
        steps += _loss(maker)
        first = _cut(rng, partitions)
        points = maker.some(0.3, [rng.choice(["task", *_FOLDING]), rng.choice([1, 2, 3]), first])
        points += maker.some(0.2, [rng.choice(_FOLDING), rng.choice([1, 2]), ["crash"]])
        steps.append(["batch", rng.randrange(2), rng.randrange(4), points])
        steps += maker.some(0.7, ["commit", number], *maker.batches())
        number += 2
    return maker.made(steps + maker.life() + maker.batches())


def _cut(rng: Random, partitions: int) -> Step:
    """Of any topic, or all; of any partition, or all."""
    topic = rng.choice([MAIN, MAIN, MAIN, GAPS, DEAD, ALL])
    place = rng.choice([-1, rng.randrange(partitions)])
    return ["topic", "cut", topic, rng.choice([1, 2, 4, 6, 100]), place]


def _loss(maker: _Quiet) -> list[Step]:
    """Of the index, progress.json, the start, all, or the newest writes; or none."""
    rng = maker.rng
    executor = rng.randrange(maker._setup.executors)
    lost: list[Step] = [["lose", executor]]
    draw = rng.random()
    if draw < 0.2:
        lost = [["older", executor, rng.randint(1, 6)]]
    elif draw < 0.35:
        lost = [["forget", rng.choice(_STATE), rng.randrange(2)]]
    elif draw < 0.5:
        lost = [["lose", 0], ["lose", 1], *(["forget", name, 0] for name in _STATE)]
    elif draw < 0.65:
        lost = [["lose", executor], ["forget", "progress.json", rng.randrange(2)]]
    elif draw < 0.7:
        lost = []
    shards = rng.randint(1, maker._setup.partitions) if "rescale" in maker._swarm else 0
    return [["restart", shards], *lost]


def _future_and_cut(seed: int) -> Schedule:
    """Rows have times in the future, topics are cut, and the state is lost or old."""
    rng = Random(f"{seed} future_and_cut")
    maker = _Quiet(rng, "rollback", start="beginning", horizon=rng.choice([1_000_000, 8_000_000]))
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        for step in maker.life(6):
            steps.append(step)
            if step[0] == "write":
                ahead = rng.choice([60_000_000, 1_800_000_000, 7_200_000_000])
                steps += maker.some(0.3, ["ahead", step[1], ahead])
        steps += maker.batches()
        steps += maker.some(0.7, ["topic", "cut", MAIN, rng.choice([1, 2, 4])]) + _loss(maker)
        steps += maker.some(0.6, *maker.life()) + maker.batches()
    return maker.made(steps)


def _recreated(seed: int) -> Schedule:
    rng = Random(f"{seed} recreated")
    maker = _Quiet(rng, "rollback")
    steps = maker.life(6) + maker.batches()
    steps += maker.some(0.4, ["restart", 0]) + maker.some(0.4, ["lose", 0])
    steps.append(["topic", "remake", rng.choice([MAIN, ALL])])
    return maker.made(steps + maker.life() + maker.batches() + maker.life())


def _lost_tail(seed: int) -> Schedule:
    rng = Random(f"{seed} lost_tail")
    maker = _Quiet(rng, "rollback")
    steps = maker.life(6) + maker.batches()
    steps += maker.some(0.4, ["restart", 0]) + maker.some(0.4, ["lose", 0])
    steps.append(["topic", "lose tail", rng.randint(1, 3)])
    return maker.made(steps + maker.life() + maker.batches() + maker.life())


def _partitions(seed: int) -> Schedule:
    """Partitions are added; shards divide neither number, or do; indexes are kept or deleted."""
    rng = Random(f"{seed} partitions")
    few = rng.randint(1, 3)
    maker = _Quiet(rng, "rollback", partitions=few, shards=rng.randint(1, few))
    steps = maker.life(6) + maker.batches()
    steps.append(["restart", 0])
    steps.append(["topic", "add partitions", few + rng.randint(1, 3)])
    steps += maker.some(0.7, ["lose", 0])
    steps += maker.some(0.3, maker.crash(*_FOLDING), ["restart", 0])
    return maker.made(steps + maker.life() + maker.batches())


def _producers(seed: int, name: str, how: list[str], topics: list[int]) -> Schedule:
    """Other producers write to the topics."""
    rng = Random(f"{seed} {name}")
    maker = _Quiet(rng, "rollback")
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        steps += maker.life()
        number, version = maker.aggregate(), rng.choice([1, 2, 3, 9, 1000])
        step: Step = ["topic", "foreign", rng.choice(how), rng.choice(topics), number, version]
        steps += maker.some(0.7, step) + maker.batches()
        steps += maker.some(0.3, ["restart", 0]) + maker.some(0.2, ["lose", 0])
    return maker.made(steps + maker.life() + maker.batches())


def _garbage(seed: int) -> Schedule:
    return _producers(seed, "garbage", ["garbage"], [MAIN, GAPS, DEAD])


def _forged(seed: int) -> Schedule:
    return _producers(seed, "forged", ["forged", "garbage"], [MAIN, DEAD])


def _two_ids(seed: int) -> Schedule:
    return _producers(seed, "two_ids", ["other", "forged"], [MAIN, DEAD])


def _foreign_skips(seed: int) -> Schedule:
    return _producers(seed, "foreign_skips", ["skip"], [GAPS])


def _others_open(seed: int) -> Schedule:
    """Other producers' transactions are open at any time; now and then ours are left open, too."""
    rng = Random(f"{seed} others_open")
    swarm = ("rollback", "crash", "kill", "lose", "older", "restart")
    maker = _Quiet(rng, *swarm)
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        steps += maker.life()
        steps.append(["topic", "overlapping", rng.randint(2, 9), rng.randint(2, 12)])
        for step in maker.batches(3):
            if step[0] == "batch" and rng.random() < 0.6:
                name = rng.choice(["kafka.commit", "kafka.committed", "task"])
                step[3].append([name, 1, ["fault", "markers left out"]])
            steps.append(step)
        steps += maker.some(0.3, ["restart", 0]) + maker.some(0.2, ["lose", 0])
    return maker.made(steps + maker.life() + maker.batches())


def _lost_commits(seed: int) -> Schedule:
    """Commits that were answered become aborts, whose markers take the very same offsets."""
    rng = Random(f"{seed} lost commits")
    maker = _Quiet(rng, "rollback", "crash", "kill", "restart", "older")
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        steps += maker.life()
        for step in maker.batches(3):
            if step[0] == "batch" and rng.random() < 0.6:
                name = rng.choice(["kafka.commit", "kafka.committed", "task"])
                step[3].append([name, 1, ["fault", "commit becomes abort"]])
            steps.append(step)
        steps += maker.some(0.5, ["restart", 0])
    return maker.made(steps + maker.life() + maker.batches())


def _restored(seed: int) -> Schedule:
    rng = Random(f"{seed} restored")
    maker = _Quiet(rng, "rollback", late=rng.choice(["publish", "divert"]))
    steps = maker.life(6) + maker.batches()
    for _ in range(rng.randint(1, 2)):
        steps += maker.some(0.5, ["restart", 0])
        back = rng.choice([1_000_000, 3_000_000, 3_600_000_000])
        steps += [["restore", back], ["time", 1_000_000]]
        maker._open.clear()
        steps += maker.life(6) + maker.batches()
        steps += maker.some(0.2, ["lose", 0]) + maker.batches()
    return maker.made(steps)


def _second_rows(seed: int) -> Schedule:
    """Two writers give their rows one version, and the table lets both in."""
    rng = Random(f"{seed} second rows")
    swarm = ["rollback", "crash", "kill", "restart", "rescale", "lose", "older", "concurrent"]
    swarm.append("faults")
    late = rng.choice(["publish", "divert"])
    drops = seed % 2 == 1
    options = {"allows_second": True, "drops_key": drops, "late": late, "start": "beginning"}
    if drops:  # noticed within a minute, for which the end waits by counting
        options["horizon"] = 60_000_000
    maker = _Quiet(rng, *swarm, **options)
    steps: list[Step] = []
    for _ in range(rng.randint(1, 4)):
        for step in maker.life(5):
            steps.append(step)
            number = rng.choice([step[1], 8]) if step[0] == "write" else 8
            if rng.random() < 0.4:
                steps.append(
                    ["double", number, rng.randrange(50), int(rng.random() < 0.2 * (not drops))]
                )
            steps += maker.some(0.5, ["commit", 8])
        steps += maker._between() + maker.batches()
    return maker.made(steps)


def _future(seed: int) -> Schedule:
    rng = Random(f"{seed} future")
    maker = _Quiet(rng, "rollback", "crash")
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        for step in maker.life(5):
            steps.append(step)
            if step[0] == "write":
                ahead = rng.choice([1_000_000, 1_800_000_000, 7_200_000_000])
                steps += maker.some(0.3, ["ahead", step[1], ahead])
        steps += maker.batches()
    return maker.made(steps)


def _large(seed: int) -> Schedule:
    """Rows of very different sizes, and a broker that takes only so much in time.

    Two rows of any size: one of a window, and one that was fetched for it.
    """
    rng = Random(f"{seed} large")
    most = rng.choice([300, 600])
    maker = _Quiet(rng, "rollback", "crash", most_bytes=most, chunk_rows=50)
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        for step in maker.life(8):
            steps.append(step)
            if step[0] == "write":
                steps += maker.some(0.5, ["grow", step[1], rng.choice([20, 100, most // 2])])
        steps += maker.batches()
    return maker.made(steps)


def _many_gaps(seed: int) -> Schedule:
    """An archived store: the first versions of many aggregates are gone, or still open."""
    rng = Random(f"{seed} many_gaps")
    rows = rng.choice([2, 3])
    maker = _Quiet(
        rng,
        "crash",
        chunk_rows=rows,
        batch_rows=rows,
        policy="hold_aggregate",
        start="beginning",
        most_fetched=4 * rows,
        max_backoff=rng.choice([1, 2]),
    )
    count = rng.randint(6, 15)
    steps: list[Step] = []
    for aggregate in range(count):
        steps += [["write", 9, aggregate, 0, rng.randint(2, 4)], ["time", 1]]
    steps.append(["commit", 9])
    steps += [["archive", aggregate, 1] for aggregate in range(count) if rng.random() < 0.9]
    for _ in range(rng.randint(1, 3)):
        steps += [["time", 2_000_000], *maker.batches()]
    return maker.made(steps)


def _unbound(seed: int) -> Schedule:
    """Users have gaps skipped of aggregates that hold nothing, as far as they can see."""
    rng = Random(f"{seed} unbound")
    maker = _Quiet(rng, "crash")
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        number = maker.aggregate()
        steps += maker.life()
        # a gap that is about to be found, or has been, when the request comes
        steps += [["write", transaction, number, 0, 1] for transaction in (7, 9)]
        steps += [["commit", 9], ["time", 2_000_000]]
        blind: Step = ["skip_blind", number]
        if rng.random() < 0.6:
            steps.append(["batch", 0, 0, [[rng.choice(["store.poll", "kafka.init"]), 1, blind]]])
        else:
            steps += [blind, ["restart", 0]]
        steps += [*maker.batches(), ["commit", 7]]
    return maker.made(steps + maker.batches())


def _old_ends(seed: int) -> Schedule:
    """A broker that leads no more answers with an old end, while the index is behind the topic."""
    rng = Random(f"{seed} old_ends")
    maker = _Quiet(rng, "rollback", "crash", "kill", "rescale")
    steps: list[Step] = []
    for _ in range(rng.randint(1, 4)):
        steps += (
            maker.life() + maker.some(0.7, maker.crash(*_BEHIND)) + maker.some(0.2, ["lose", 0])
        )
        steps += maker.some(0.3, ["older", 0, rng.randint(1, 4)])
        steps += maker.some(0.5, *maker.life(2))
        old = [["kafka.offsets", hit, ["fault", "old ends"]] for hit in rng.sample(range(1, 9), 2)]
        foreign: Step = ["topic", "foreign", "garbage", MAIN, maker.aggregate(), 1]
        if rng.random() < 0.3:
            old.append(["after_begin", 1, foreign])
        steps += [["batch", 0, 0, old], *maker.batches()]
    return maker.made(steps)


def _power(seed: int) -> Schedule:
    rng = Random(f"{seed} power")
    maker = _Quiet(rng, "rollback", "crash")
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        steps += maker.life() + maker.batches()
        steps += [["power", rng.choice([0, 0, 1, 3, 9]), rng.randrange(2)]]
        steps += maker.some(0.8, ["restart", 0])
    return maker.made(steps + maker.life() + maker.batches())


_STALLS = (
    *("kafka.init", "kafka.init", "kafka.init", "kafka.taken"),
    *("store.now", "before_begin", "before_report"),
)
"""Where a runner stalls, so that others have its shard when it wakes up."""

_WAKES = ("task", "kafka.init", "kafka.taken", "kafka.flush", "kafka.commit", "before_index")
"""What others do when it wakes up."""


def _overlap(seed: int) -> Schedule:
    """Publishers are frozen or out of reach, and go on beside the one that has their shards by now,
    or shards of another number."""
    rng = Random(f"{seed} overlap")
    partitions = rng.choice([1, 2, 2, 3])
    shards = rng.randint(1, partitions)
    maker = _Quiet(rng, "rollback", executors=2, partitions=partitions, shards=shards)
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        steps += maker.life()
        stall: Step = [rng.choice(_STALLS), rng.choice([1, 1, 2, 3]), ["stall"]]
        kill: Step = [rng.choice(_STALLS), rng.choice([1, 2, 3]), ["kill"]]
        points = [*maker.some(0.8, stall), *maker.some(0.3, kill)]
        points += maker.some(0.5, ["tasks done", 1, ["crash"]])
        steps += maker.some(0.3, ["time", 12_000_000])
        steps.append(["batch", rng.randrange(2), rng.randrange(4), points])
        steps += maker.some(0.4, ["look"])
        steps += maker.some(0.5, *maker.life(2))
        steps += maker.some(0.2, maker.crash(*_BEHIND))
        steps += maker.some(0.7, ["restart", rng.choice([0, *range(1, partitions + 1)])])
        steps += maker.some(0.2, ["lose", rng.randrange(2)])
        wakes = [
            [rng.choice(_WAKES), rng.choice([1, 1, 2]), ["resume", rng.randrange(2), points]]
            for points in (rng.choice([1, 3, 8, 15]), rng.choice([3, None]), None)
            if rng.random() < 0.7
        ]
        steps.append(["batch", rng.randrange(2), rng.randrange(4), wakes])
    return maker.made(steps + maker.life() + maker.batches())


def _pause(seed: int) -> Schedule:
    """Somebody pauses the publisher and has it go on, while rows come and processes die."""
    rng = Random(f"{seed} pause")
    maker = _Quiet(rng, "rollback", horizon=8_000_000, watermark=rng.choice(["auto", "off"]))
    steps: list[Step] = []
    for _ in range(rng.randint(2, 5)):
        steps += maker.life() + maker.some(0.6, *maker.batches())
        points = [
            [rng.choice(_STALLS), rng.choice([1, 2]), ["pause", rng.choice([1, 1, 0])]],
            *maker.some(0.3, [rng.choice(schedule.RUNNER_POINTS), 1, ["kill"]]),
            *maker.some(0.2, [rng.choice(schedule.CRASH_POINTS), 2, ["crash"]]),
        ]
        steps.append(["batch", 0, 0, points])
        steps += maker.some(0.6, *maker.life(2)) + maker.some(0.4, *maker.batches())
        steps += maker.some(0.3, ["time", rng.choice([1_000_000, 12_000_000])])
        steps += maker.some(0.3, ["restart", 0]) + maker.some(0.3, ["look"])
        steps += maker.some(0.7, ["pause", 0])
        steps += maker.batches()
    return maker.made(steps)


def _clocks(seed: int) -> Schedule:
    """The database's clock jumps ahead and back, and the publisher is down at times."""
    rng = Random(f"{seed} clocks")
    horizon = 8_000_000
    watermark = rng.choice(["auto", "auto", "off"])
    maker = _Quiet(rng, "rollback", horizon=horizon, watermark=watermark, is_down=True)
    ahead: Step = ["clock", rng.choice([5_000_000, 20_000_000, 100_000_000, 600_000_000])]
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        steps += maker.some(0.7, ahead) + maker.life() + maker.batches()
        back = rng.choice([-2_000_000, -20_000_000, -100_000_000])
        steps += maker.some(0.8, ["clock", back]) + maker.some(0.7, *maker.batches(1))
        # what is open for long while the clock is behind
        steps += maker.some(0.7, *maker.life(2), ["batch", 0, 0, []])
        steps += maker.some(0.5, ["time", rng.choice([1_000_000, horizon + 4_000_000])])
        steps += [["look"], *maker.batches(1)]
        steps += maker.some(0.6, *_down(maker))
        steps += maker.some(0.3, ["time", horizon + 4_000_000])
        steps += maker.batches()
    return maker.made(steps)


_AROUND_A_REQUEST = [
    "before_begin",
    "after_produce",
    "before_commit",
    "kafka.commit",
    "kafka.committed",
    "after_commit",
    "before_index",
    "index.write",
    "index.written",
    "after_index",
    "before_report",
    "kafka.read",
    "store.backtrack",
    "answer",
]


def _retries(seed: int) -> Schedule:
    """Rows are refused, and users want them published after all, more than once or while paused."""
    rng = Random(f"{seed} retries")
    swarm = ("rollback", "faults", "crash", "kill", "lose", "older", "restart", "timeout")
    maker = _Quiet(rng, *swarm, late="publish", start="beginning")
    pauses = Random(f"{seed} retries pauses")
    steps: list[Step] = []
    for _ in range(rng.randint(2, 4)):
        for step in maker.life():
            steps.append(step)
            if step[0] == "write" and rng.random() < 0.6:
                steps.append(["spoil", step[1], rng.choice([BY_CLIENT, ALONE, WITH_ITS_BATCH])])
        steps += maker.batches()
        steps += maker.some(0.6, ["accept", rng.choice([1, 1, 1, 0])])
        for _ in range(rng.randint(1, 3)):
            number = rng.randrange(4)
            is_paused = pauses.random() < 0.15
            if is_paused and pauses.random() < 0.5:
                steps.append(["pause", 1])
            steps.append(["publish", number])
            steps += maker.some(0.3, ["publish", number])
            points = _while_it_is_done(rng)
            if is_paused:
                points.append([pauses.choice(_AROUND_A_REQUEST), 1, ["pause", 1]])
            steps.append(["batch", 0, 0, points])
            if is_paused and pauses.random() < 0.8:
                steps.append(["pause", 0])
            steps += maker.some(0.3, *maker._between()) + maker.some(0.3, ["look"])
        steps += maker.some(0.5, *maker.batches(1))
    return maker.made(steps)


def _while_it_is_done(rng: Random) -> list[list[Any]]:
    """A runner is lost, the publisher dies, or an answer of the broker is lost, perhaps."""
    points: list[list[Any]] = []
    if rng.random() < 0.7:
        action = rng.choice([["crash"], ["kill"], ["fault", "commit unanswered"]])
        points.append([rng.choice(_AROUND_A_REQUEST), rng.choice([1, 1, 1, 2, 2, 3, 4]), action])
    return points


KINDS: dict[str, Kind] = {
    "any": Kind(schedule.make, "", "complete, once and in order"),
    "downtime": Kind(
        _downtime,
        "A21",
        "what was younger than the horizon when the publisher went down is found",
    ),
    "seen": Kind(
        _seen,
        "A14",
        "what an open transaction was seen to have written is found, however late it commits",
    ),
    "prepared": Kind(
        _prepared,
        "A14",
        "the same of what was prepared (XA) when the database restarted, whoever saw it first",
    ),
    "open": Kind(
        _open,
        "A14, A21",
        "the same if it commits while the publisher is down, however long",
    ),
    "lost_progress": Kind(
        _lost_progress,
        "A14, A21",
        "the same if progress.json is lost meanwhile",
    ),
    "stale": Kind(
        _stale,
        "A11",
        "the same if answers are not fresh for a while",
    ),
    "replica": Kind(
        _replica,
        "A2",
        "never enabled: what a replica applies after the horizon is lost, so it is refused",
        enabled=False,
        shows="lost",
    ),
    "retention": Kind(_retention, "A10", "cut topics change nothing while there is an index"),
    "forgotten": Kind(
        _forgotten,
        "A10",
        "only what was created before the index was lost may count as published; nothing again",
    ),
    "forgotten_gaps": Kind(
        _forgotten_gaps,
        "A10",
        "the same where aggregates are held; or it is said that what was published since the oldest"
        " held event, and cut, is repeated",
    ),
    "first_fold": Kind(
        _first_fold,
        "A10",
        "the same if the fold that makes the index anew is interrupted",
    ),
    "older_and_cut": Kind(
        _older_and_cut,
        "A10",
        "nothing again, also where an older index misses what is cut",
    ),
    "retention_any": Kind(
        _retention_any,
        "A4, A5",
        "what may still commit is lost only as far as what was cut is, or it is older than the"
        " horizon and the longest hold; state.start_lost where nobody knows anything",
    ),
    "future_and_cut": Kind(_future_and_cut, "A6", "no time in the future tells what was published"),
    "recreated": Kind(_recreated, "A6", "sink.topic_recreated"),
    "lost_tail": Kind(
        _lost_tail,
        "A6",
        "sink.topic_recreated, or published again where nobody knows that it was there",
    ),
    "partitions": Kind(
        _partitions, "A15", "state.foreign, or after the indexes are deleted nothing again"
    ),
    "garbage": Kind(_garbage, "A16", "ignored"),
    "forged": Kind(_forged, "A16", "believed by nobody: nothing is silenced"),
    "two_ids": Kind(_two_ids, "A22", "sink.other_publisher, or complete"),
    "foreign_skips": Kind(_foreign_skips, "A16, A22", "believed by nobody"),
    "others_open": Kind(_others_open, "C4", "waited for; nothing of ours is taken for theirs"),
    "lost_commits": Kind(
        _lost_commits,
        "A1",
        "what Kafka has answered as committed, and then aborted, is published again",
    ),
    "restored": Kind(
        _restored,
        "A13",
        "an event with the version of another that was published is a dead letter,"
        " admission.version_conflict",
    ),
    "second_rows": Kind(
        _second_rows,
        "A3",
        "of a version one row is published, and each that differs from it is a dead letter, once",
    ),
    "future": Kind(_future, "A23", "published like any other"),
    "large": Kind(
        _large,
        "A8",
        "published, in smaller transactions",
    ),
    "many_gaps": Kind(
        _many_gaps,
        "A9",
        "each skipped, a portion at a time",
    ),
    "unbound": Kind(
        _unbound,
        "A19",
        "a request that names no version gives up no gap: `gaps skip` makes none, a file may",
    ),
    "old_ends": Kind(
        _old_ends,
        "F4",
        "a fold that ended too early is noticed before anything is committed behind it",
    ),
    "pause": Kind(_pause, "", "complete, once and in order, also by who starts paused"),
    "clocks": Kind(
        _clocks,
        "a fresh look: the clock behind the position",
        "all of what was committed while the clock was behind, or the publisher down meanwhile",
    ),
    "retries": Kind(
        _retries,
        "",
        "a dead letter's row that a user wants published is, once, however often it is asked for",
    ),
    "power": Kind(_power, "A12", "complete, once and in order"),
    "overlap": Kind(_overlap, "", "who is late gives way: fences, and what a fold has missed"),
}
"""By name, `any` first."""


def made(kind: str, seed: int) -> Schedule:
    """The schedule of a seed and kind."""
    schedule = KINDS[kind].make(seed)
    if kind == "any":
        return schedule
    return with_channel(schedule, Random(f"{seed} {kind} channel"), is_quiet=kind != "overlap")
