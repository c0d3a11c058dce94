"""A cluster of two workers that share no folder: latency, and a machine that is lost for good.

    python -m bench.cluster                        # both; needs root and unshare(1)
    python -m bench.cluster --events 5000000 --rounds 3 --no-latency

Latency is measured at the same rate by a publisher whose tasks run on its own machine, and by one
whose tasks run on a standalone cluster; the two workers see nothing of the publisher's state
directory. Then a backlog is drained, a worker and its executors are killed at a low rate, and for
each partition it is looked when the first event that was created after that is visible: with copies
of the indexes (`state.snapshots`) and, to compare, without, so that the shards that have moved fold
the whole topic.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import pyspark

from eventpub.admission.model import topic_partition
from eventpub.local import find_java
from eventpub.local.processes import free_port
from eventpub.ops.asking import ask_running
from eventpub.state import StateDir

from .compare import Records
from .load import Phase, under_load
from .machine import PARTITIONS, Machine, environment
from .publisher import Publisher, Settings
from .steady import WARM_UP

SHARDS = 4
_HIDE = 'mount -t tmpfs none "$1"; shift; exec "$@"'
"""Gives a process an empty folder in the place of one, as on another machine."""
_DEPLOY = "org.apache.spark.deploy"
_COMES_UP = 120.0
_SETTLES = 15.0
_LOST_FOR = 60.0
_READER_RATE = 40_000
"""Events a second that the reader has read at least: it begins with the backlog."""
_UNTIL_STOPPED = 100_000.0


class Standalone:
    """Spark's standalone cluster: a master and two workers; a context manager.

    Args:
        folder: of its logs and working directories.
        cores: of each worker: how many shards it takes.
        hidden: a folder in whose place the workers have an empty one; None: they see what there is.

    Attributes:
        url: of its master.
        workers: in no order that matters.
    """

    def __init__(self, folder: Path, cores: int = SHARDS, hidden: Path | None = None) -> None:
        self._folder = folder
        self._cores = cores
        hide = ["unshare", "--mount", "sh", "-c", _HIDE, "sh", str(hidden)]
        self._hide = [] if hidden is None else hide
        self._started: list[psutil.Popen] = []
        self.url = ""
        self.workers: list[psutil.Popen] = []

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        try:
            here = ("--host", "127.0.0.1", "--webui-port", "0")
            self._start("master", f"{_DEPLOY}.master.Master", *here, "--port", str(port))
            self._wait_for(port)
            self.workers = [
                self._start(
                    f"worker-{number}",
                    *(f"{_DEPLOY}.worker.Worker", *here),
                    *("--cores", str(self._cores), "--memory", "1g"),
                    *("--work-dir", str(self._folder / f"work-{number}"), self.url),
                    hide=self._hide,
                )
                for number in range(2)
            ]
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill what was started, and what descends from it."""
        for process in self._started:
            kill(process)
        psutil.wait_procs(self._started, timeout=20)

    def _start(self, name: str, *arguments: str, hide: Sequence[str] = ()) -> psutil.Popen:
        home = Path(pyspark.__file__).parent
        with (self._folder / f"{name}.log").open("wb") as log:
            process = psutil.Popen(
                [*hide, str(find_java()), "-Xmx256m", "-cp", f"{home}/jars/*", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                # what Spark's own start scripts set
                env=os.environ | {"SPARK_HOME": str(home), "SPARK_SCALA_VERSION": "2.13"},
                cwd=self._folder,
            )
        self._started.append(process)
        return process

    @staticmethod
    def _wait_for(port: int) -> None:
        deadline = time.monotonic() + _COMES_UP
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"Spark's master does not listen after {_COMES_UP:.0f} s")
            time.sleep(0.1)


def kill(process: psutil.Process) -> None:
    """`kill -9` of it and of all that descends from it."""
    with suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                each.kill()


def _most_busy(cluster: Standalone, publisher: Publisher) -> psutil.Process:
    """The worker on which most shards run."""
    status = ask_running(StateDir(publisher.state), "status")
    assert status is not None
    pids = [int(shard["where"].split()[-1]) for shard in status["shards"]]

    def runs(worker: psutil.Process) -> int:
        below = {process.pid for process in worker.children(recursive=True)}
        return sum(pid in below for pid in pids)

    found: psutil.Process = max(cluster.workers, key=runs)
    assert runs(found), "no shard runs on a worker"
    return found


def _spark(master: str) -> Settings:
    return {
        "run": {"shards": SHARDS},
        "spark": {
            "master": master,
            "properties": {
                "spark.executor.memory": "512m",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
            },
        },
        "channel": {"host": "127.0.0.1"},
    }


def _latency(machine: Machine, rate: float, seconds: float) -> dict[str, Any]:
    """p50, p99 and the highest, s, on one machine and on the cluster, in turns."""
    found: dict[str, Any] = {}
    phase = Phase(rate, WARM_UP + seconds)
    for name in ("one machine", "cluster"):
        database = f"cluster{len(found)}"
        if name == "cluster":
            with (
                TemporaryDirectory(prefix="eventpub-bench-") as folder,
                Standalone(Path(folder), hidden=machine.folder) as cluster,
            ):
                one = under_load(
                    machine, database, [phase], _spark(cluster.url), quiet=5.0, warm_up=WARM_UP
                )
        else:
            settings = _spark("local[*]")
            one = under_load(machine, database, [phase], settings, quiet=5.0, warm_up=WARM_UP)
        machine.drop(database)
        found[name] = {"latency": one["latency"]["at_once"], "verdict": one["verdict"]}
        print(f"{name}: {found[name]}", flush=True)
    return found


def _lost(machine: Machine, events: int, rate: float, *, copies: bool) -> dict[str, Any]:
    """A worker is lost for good; seconds until each partition has new events again."""
    killed = 0

    def meanwhile(publisher: Publisher) -> None:
        nonlocal killed
        publisher.reaches(time.time_ns() // 1000)
        time.sleep(_SETTLES + events / _READER_RATE)
        victim = _most_busy(cluster, publisher)
        killed = time.time_ns() // 1000
        kill(victim)
        time.sleep(_LOST_FOR)

    def examine(records: Records) -> dict[str, Any]:
        partitions = np.array([topic_partition(name, PARTITIONS) for name in records.names])
        new = records.created >= killed
        of_each = partitions[records.keys[new]]
        arrived = records.arrived[new]
        back = [
            round((int(arrived[of_each == number].min()) - killed) / 1e6, 2)
            for number in range(PARTITIONS)
        ]
        return {"back": back}

    database = "lost"
    with (
        TemporaryDirectory(prefix="eventpub-bench-") as folder,
        Standalone(Path(folder), hidden=machine.folder) as cluster,
    ):
        state = {"snapshots": f"{folder}/snapshots", "snapshot_every": "10s"}
        one = under_load(
            machine,
            database,
            [Phase(rate, _UNTIL_STOPPED)],
            {**_spark(cluster.url), **({"state": state} if copies else {})},
            meanwhile=meanwhile,
            examine=examine,
            backlog=events,
        )
    machine.drop(database)
    found = {"back": one["back"], "all back": max(one["back"]), "verdict": one["verdict"]}
    print(f"lost, {'with' if copies else 'without'} copies: {found}", flush=True)
    return found


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--rate", type=float, default=3_000, help="events/s, of the latency")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--events", type=int, default=5_000_000, help="on the topic at the loss")
    parser.add_argument("--rounds", type=int, default=1, help="of the loss, with copies")
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument("--no-whole-fold", action="store_true", help="only with copies")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"environment": environment()}
    with Machine() as machine:
        if not arguments.no_latency:
            found["latency"] = _latency(machine, arguments.rate, arguments.seconds)
        found["lost"] = [
            _lost(machine, arguments.events, 500, copies=True) for _ in range(arguments.rounds)
        ]
        found["median"] = statistics.median(one["all back"] for one in found["lost"])
        if not arguments.no_whole_fold:
            found["whole fold"] = _lost(machine, arguments.events, 500, copies=False)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
