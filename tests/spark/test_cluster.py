"""`eventpub run` on a cluster whose machines share no disk but what is said to be shared."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eventpub.local.servers import kafka
from tests.publisher.harness import eventually
from tests.spark.cluster import cluster
from tests.spark.kills import Job, connect, database, run_of

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of mounts need root"),
]


class Machines:
    """A database, a broker and a cluster; `private`: folders of which each machine has its own."""

    def __init__(self, folder: Path, stack: ExitStack, *private: str) -> None:
        self._folder, self._stack = folder, stack
        self.url = stack.enter_context(database(folder))
        self._address = stack.enter_context(kafka(folder / "kafka")).bootstrap_servers
        folders = [folder / name for name in private]
        self._master = stack.enter_context(cluster(folder, folders)).master

    def insert(self, *events: tuple[str, int]) -> None:
        with connect(self.url) as connection, connection.cursor() as cursor:
            for event in events:
                cursor.execute(
                    "INSERT INTO events (aggregate_id, version, event_type) VALUES (%s, %s, 't')",
                    event,
                )
            connection.commit()

    def start(self, name: str) -> Job:
        job = Job(lambda _: self._command("run", name), self._folder / f"{name}.log", {})
        self._stack.callback(job.kill)
        job.start()
        return job

    def ask(self, name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        """The exit status and the answer of another command."""
        command = self._command(*arguments, name, "--json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        found: dict[str, Any] = json.loads(done.stdout)
        return done.returncode, found

    def _command(self, *words: str) -> list[str]:
        """A command about a publisher, whose name follows the command's."""
        *before, name = [word for word in words if word != "--json"]
        program, _, *config = run_of(self.url, self._address, self._folder, self._master, {})(False)
        own = {
            "app.id": name,
            "app.state_dir": self._folder / name,
            "sink.topic": name,
            "state.location": self._folder / "shared" / name,
            "gaps.backoff_base": "60s",
        }
        sets = [part for key, value in own.items() for part in ("--set", f"{key}={value}")]
        return [program, *before, *config, *sets, *["--json"] * ("--json" in words)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_a_location_that_is_not_shared_is_named(tmp_path: Path, stack: ExitStack) -> None:
    machines = Machines(tmp_path, stack, "first", "shared")
    machines.insert(("a", 1))
    job = machines.start("first")
    assert job.wait(300) != 0, job.words()
    assert "state.not_shared" in job.words()
    assert "journal_missing" not in job.words()


def test_a_second_publisher_says_that_it_waits_and_holds_are_known_after_the_end(
    tmp_path: Path, stack: ExitStack
) -> None:
    machines = Machines(tmp_path, stack, "first", "second")
    machines.insert(("a", 1), ("b", 1), ("b", 3))
    first = machines.start("first")
    eventually(lambda: machines.ask("first", "gaps", "list")[0] == 1, every=1.0)
    second = machines.start("second")
    eventually(lambda: "spark.cores.max" in str(machines.ask("second", "status")), every=1.0)
    for job in (second, first):
        job.processes()[0].terminate()
        job.wait(60)
    status, found = machines.ask("first", "gaps", "list")
    held = [(hold["aggregate_id"], hold["first_missing"]) for hold in found["result"]["open"]]
    assert (status, held) == (1, [("b", 2)])
    status, found = machines.ask("first", "gaps", "skip", "b", "--yes", "--later")
    assert status == 0, found
