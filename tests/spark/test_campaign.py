"""kill -9, again and again, of jobs on the source `eventstore` and on the sink `eventpub`.

What is killed is a Python worker, an executor, or the driver with all of its processes, while it
stands at a step (`eventpub/failpoint.py`) or at any moment. Transactions commit late all the while.
At the end everything that was committed must be in the sink, once and in order, for a reader of its
own; from Spark's numbers, beside Spark's own sink for Kafka, whose repeats are counted.

    EVENTPUB_TEST_KILLS=40 script/test tests/spark/test_campaign.py -s

so many in each case, each of them printed, and a line of what came of it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from eventpub.local.servers import kafka
from tests.servers import kafka_cluster
from tests.servers.cluster import FAULTS, strike
from tests.spark.cluster import Cluster, cluster
from tests.spark.kills import (
    Event,
    Job,
    Writers,
    batches_of,
    command_of,
    compare,
    database,
    job_of_rate,
    job_of_source,
    kill_all,
    numbers_of_rate,
    read_delta,
    read_kafka,
    read_parquet,
    read_sql,
    run_of,
    stored,
)

T = TypeVar("T")

pytestmark = [pytest.mark.alone, pytest.mark.timeout(5400)]

_REACHED_WITHIN = 300.0
"""Seconds until some process stands at a step; a start takes 15, and 60 beside much else."""
_RATE = 500
_PARTITIONS = 6

SOURCE = (
    "after_plan", "before_step", "during_step", "before_journal", "after_journal", "after_index",
    "before_replay", "before_snapshot", "during_snapshot", "after_snapshot", "during_fetch",
    "during_prune",
)  # fmt: skip
SINK = (
    "after_take", "before_begin", "after_begin", "during_produce", "before_marker", "after_produce",
    "after_marker", "before_commit", "after_commit", "before_settle", "after_settle",
)  # fmt: skip

Kill = tuple[str, str]
"""A step, or "" for any moment; and who: a worker, an executor, the driver with all its processes,
or the machine, which loses its indexes, too."""

_BEFORE: dict[str, list[Kill]] = {
    "before_replay": [("after_journal", "worker")],
    "before_snapshot": [("", "driver")],
    "during_snapshot": [("", "driver")],
    "after_snapshot": [("", "driver")],
    "during_fetch": [("", "machine")],
    "during_prune": [("", "driver"), *[("after_snapshot", "driver")] * 3],
}
"""Kills without which a step is not reached for minutes: a driver's first batch has a snapshot, and
two of them are kept."""


def kills_of(
    steps: Sequence[str],
    count: int,
    dice: random.Random,
    victims: Sequence[str] = ("worker", "worker", "worker", "worker", "driver"),
) -> list[Kill]:
    """So many, each step and as often any moment once before the next round."""
    found: list[Kill] = []
    while len(found) < count:
        units = []
        for step in steps:
            kill = step, dice.choice(victims)
            units.append([*_BEFORE.get(step, []), kill])
        units += [[("", dice.choice(victims))] for _ in steps]
        dice.shuffle(units)
        units.sort(key=lambda unit: unit[-1][0] in {"during_fetch", "during_prune"})
        found += [kill for unit in units for kill in unit]
    return found[:count]


class Campaign:
    """Kills a job.

    Args:
        folder: of everything.

    Attributes:
        job: what is killed; set before `play`, with `environment`.
        executors: where its workers run, in those of a cluster.
    """

    job: Job
    executors: Cluster | None = None

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.dice = dice
        self.killed: Counter[str] = Counter()
        self._folder, self._steps = folder, folder / "steps"
        self._steps.mkdir()
        names = dict.fromkeys((*SOURCE, *SINK))
        for step in names:
            (self._steps / step).touch()  # off
        spec = ",".join(f"{step}:1:{self._steps / step}" for step in names)
        self.environment = {"EVENTPUB_FAILPOINT": spec}

    def begin(self) -> None:
        """Start the job; Spark refuses a checkpoint whose first offset is not whole."""
        self._until((self._folder / "checkpoint" / "offsets" / "0").exists, "batch")

    def play(
        self, kills: Sequence[Kill], strike: Callable[[], Callable[[], None]] = lambda: _nothing
    ) -> None:
        """Kill the job so often.

        Args:
            strike: does harm before each kill; what it returns ends that.
        """
        for step, victim in kills:
            pid = self._standing(step) if step else self._at_any_moment()
            heal = strike()
            self.killed[f"{victim} {step}".strip()] += self._kill(victim, pid)
            print(self.killed.total(), victim, step, flush=True)
            heal()
        self.job.kill()

    def end(self) -> None:
        """Let the job publish the rest, and end by itself."""
        for _ in range(3):
            self.job.start(ends=True)
            if self.job.wait(600) == 0:
                return
        raise AssertionError(self.job.words())

    def _standing(self, step: str) -> int:
        file = self._steps / step
        file.unlink()
        self._until(file.exists, step)
        time.sleep(self.dice.random())
        return int(file.read_text())

    def _at_any_moment(self) -> int:
        """After another batch, where the checkpoint is known."""
        before = self._committed()
        self._until(self._victims, "worker")
        self._until(lambda: not before or self._committed() > before, "batch")
        time.sleep(self.dice.random() * 4)
        return self.dice.choice(self._until(self._victims, "worker")).pid

    def _committed(self) -> int:
        return batches_of(self._folder / "checkpoint")

    def _victims(self) -> list[psutil.Process]:
        return self.job.workers() if self.executors is None else self.executors.executors()

    def _until(self, what: Callable[[], T], name: str) -> T:
        deadline = time.monotonic() + _REACHED_WITHIN
        while not (found := what()):
            if not self.job.is_running:
                self.job.start()
            assert time.monotonic() < deadline, f"no {name}\n{self.job.words()}"
            time.sleep(0.05)
        return found

    def _kill(self, victim: str, pid: int) -> bool:
        """Whether it was there."""
        if victim in {"driver", "machine"}:
            self.job.kill()
            if victim == "machine":
                shutil.rmtree(self._folder / "local")
            return True
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if self.executors is not None:
                executors = self.executors.executors()
                process = next(each for each in [process, *process.parents()] if each in executors)
            kill_all([process, *process.children(recursive=True)])
            return True
        return False


def _nothing() -> None:
    pass


_KILLS = int(os.environ.get("EVENTPUB_TEST_KILLS", "0"))
takes_minutes = pytest.mark.skipif(not _KILLS, reason="set EVENTPUB_TEST_KILLS, as to 40")


def report(case: str, campaign: Campaign, **found: Any) -> None:
    """One line."""
    kills = {"kills": campaign.killed.total(), "by": dict(campaign.killed)}
    print("\n" + json.dumps({"case": case, **kills, **found}), flush=True)


@contextmanager
def late_commits(url: str) -> Iterator[None]:
    """Transactions, some of which are open for seconds."""
    writers = Writers(url)
    try:
        yield
    finally:
        writers.stop()


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    seed = int(os.environ.get("EVENTPUB_TEST_SEED", random.SystemRandom().randrange(10**6)))
    print(f"EVENTPUB_TEST_SEED={seed}")
    made = Campaign(tmp_path, random.Random(seed))
    yield made
    made.job.kill()


@pytest.mark.parametrize(
    "sink",
    [
        "parquet",
        *(pytest.param(sink, marks=takes_minutes) for sink in ("sql", "delta", "eventpub")),
    ],
)
def test_the_source_into(sink: str, campaign: Campaign, tmp_path: Path) -> None:
    with ExitStack() as stack:
        url, address = stack.enter_context(database(tmp_path)), ""
        if sink == "eventpub":
            address = stack.enter_context(kafka(tmp_path / "kafka")).bootstrap_servers
        job = job_of_source(sink, url, address, tmp_path)
        campaign.job = Job(command_of(job), tmp_path / "job.log", campaign.environment)
        steps = (*SOURCE, *SINK) if sink == "eventpub" else SOURCE
        with late_commits(url):
            campaign.begin()
            campaign.play(kills_of(steps, _KILLS or 2, campaign.dice))
        campaign.end()
        read: dict[str, Callable[[], list[Event]]] = {
            "parquet": lambda: read_parquet(job["out"]),
            "sql": lambda: read_sql(url),
            "delta": lambda: read_delta(job["out"]),
            "eventpub": lambda: read_kafka(address, "kills"),
        }
        events = stored(url)
        found = compare(events, read[sink]())
    batches = batches_of(tmp_path / "checkpoint")
    report(f"source into {sink}", campaign, batches=batches, events=len(events), found=found)
    assert found == (0, 0, 0)


@pytest.mark.parametrize("master", ["local[2,4]", "spark"])
def test_c12_f13_the_publisher(master: str, campaign: Campaign, tmp_path: Path) -> None:
    """On a cluster those that die are executors, of machines that share no disk."""
    if master == "spark" and os.geteuid() != 0:
        pytest.skip("namespaces of mounts need root")
    with ExitStack() as stack:
        url = stack.enter_context(database(tmp_path))
        address = stack.enter_context(kafka(tmp_path / "kafka")).bootstrap_servers
        if master == "spark":
            campaign.executors = stack.enter_context(cluster(tmp_path, [tmp_path / "run"]))
            master = campaign.executors.master
        properties = {f"spark.executorEnv.{k}": v for k, v in campaign.environment.items()}
        command = run_of(url, address, tmp_path, master, properties)
        campaign.job = Job(command, tmp_path / "job.log", campaign.environment)
        victims = ["worker", "driver"] if campaign.executors is None else ["executor"]
        with late_commits(url):
            kills = kills_of([*SOURCE[1:6], *SINK[:-2]], _KILLS or 3, campaign.dice, victims)
            campaign.play(kills)
        campaign.end()
        events = stored(url)
        found = compare(events, read_kafka(address, "kills"))
    report(f"eventpub run on {master}", campaign, events=len(events), found=found)
    assert found == (0, 0, 0)


@takes_minutes
def test_spark_s_numbers_into_three_brokers(campaign: Campaign, tmp_path: Path) -> None:
    """Brokers and coordinators go away, too: before a third of the kills, and come back after.

    Spark's own sink repeats what it has written of a batch that is not committed.
    """
    dice, struck = campaign.dice, Counter[str]()
    with kafka_cluster(tmp_path / "kafka", relayed=True) as brokers:
        address = brokers.bootstrap_servers
        brokers.controller()  # it answers
        topics = [NewTopic(name, _PARTITIONS) for name in ("kills", "beside")]
        admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        for made in admin.create_topics(topics).values():
            made.result(60)

        def strike_one() -> Callable[[], None]:
            if dice.random() > 1 / 3:
                return _nothing
            fault = dice.choice(FAULTS)
            struck[fault] += 1
            ids = ["eventpub.kills.0", "eventpub.kills.1"]
            _, heal = strike(brokers, fault, dice, "kills", _PARTITIONS, ids)
            time.sleep(dice.random() * 3)

            def later() -> None:
                time.sleep(dice.random() * 3)
                heal()

            return later

        job = job_of_rate(address, tmp_path, _RATE)
        campaign.job = Job(command_of(job), tmp_path / "job.log", campaign.environment)
        campaign.play(kills_of(SINK, _KILLS, dice), strike_one)
        campaign.end()
        found, beside = (
            compare(
                numbers_of_rate(Path(of["checkpoint"]), _RATE), read_kafka(address, of["topic"])
            )
            for of in (job | job["sink_options"], job["beside"] | job["beside"]["sink_options"])
        )
    rows = len(numbers_of_rate(Path(job["checkpoint"]), _RATE))
    batches = batches_of(Path(job["checkpoint"]))
    report(
        "Spark's numbers", campaign,
        struck=dict(struck), batches=batches, events=rows, found=found, beside=beside,
    )  # fmt: skip
    assert found == (0, 0, 0)
    assert beside[0] == 0
