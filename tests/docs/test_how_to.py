"""What the pages say happens, happens: on real servers, by the commands that they name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs export none
    AdminClient,
    NewPartitions,
)

from eventpub.local.downloads import MIB, find_java, installed, maven, step
from tests.conftest import FreshDatabase
from tests.docs.pages import ROOT, blocks
from tests.publisher.conftest import NewPublisher, new_publisher
from tests.publisher.harness import (
    Publisher,
    Topic,
    commit,
    create_table,
    eventually,
)
from tests.servers.kafka import kafka_jars

__all__ = ["new_publisher"]

DOCS = ROOT / "docs"
KINDS = ("missing", "repeated", "out_of_order", "altered", "extra")


@pytest.fixture
def publisher(database: FreshDatabase, new_publisher: NewPublisher) -> Publisher:
    create_table(database)
    return new_publisher(database, recount={"horizon": "2s"})


def code(page: str, language: str) -> Iterator[str]:
    return (block.text for block in blocks(DOCS / page) if block.language == language)


def verify(publisher: Publisher, *arguments: str) -> dict[str, int]:
    """The counts that `eventpub verify` reports, without those that are 0."""
    done = publisher.command("verify", "--json", *arguments)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)["result"]
    counts = {name: result[name] for name in KINDS} | {"dead": result["accounted"]["dead"]}
    return {name: count for name, count in counts.items() if count}


def test_delete_or_anonymise_published_rows(database: FreshDatabase, publisher: Publisher) -> None:
    """The table of docs/how-to/delete-or-anonymise.md, line by line."""
    commit(database, "old", 1, 2, create_time="2020-01-01 00:00:00")
    for name in ("anonymised", "rewritten", "other"):
        commit(database, name, 1, 2, 3)
    publisher.publish_everything()
    assert not verify(publisher)
    time.sleep(2.5)  # older than the horizon

    database.execute("DELETE FROM events WHERE aggregate_id = 'old'")
    publisher.publish_everything()
    assert verify(publisher) == {"extra": 2}
    assert not verify(publisher, "--from", "2026-01-01T00:00:00Z")

    database.execute("UPDATE events SET payload = 'gone' WHERE aggregate_id = 'anonymised'")
    publisher.publish_everything()
    assert verify(publisher, "--from", "2026-01-01T00:00:00Z") == {"altered": 3}
    commit(database, "anonymised", 4)
    publisher.publish_everything()
    assert publisher.topic.versions("anonymised") == [1, 2, 3, 4]
    assert verify(publisher, "--from", "2026-01-01T00:00:00Z") == {"altered": 3}

    database.execute("DELETE FROM events WHERE aggregate_id = 'rewritten' AND version = 3")
    commit(database, "rewritten", 3, payload=b'"another"')
    publisher.publish_everything()
    assert publisher.topic.versions("rewritten") == [1, 2, 3]
    dead = Topic(publisher.topic.bootstrap_servers, f"{publisher.topic.name}.dead").read()
    assert [(r.key, r.headers["eventpub_reason"].partition(b":")[0]) for r in dead] == [
        ("rewritten", b"admission.version_conflict")
    ]
    assert verify(publisher, "--from", "2026-01-01T00:00:00Z") == {"altered": 4}


def test_add_partitions(database: FreshDatabase, publisher: Publisher) -> None:
    """As docs/how-to/grow-partitions.md has it; `verify` finds no difference."""
    for number in range(20):
        commit(database, f"order-{number}", 1, 2)
    publisher.publish_everything()
    (block,) = code("how-to/grow-partitions.md", "text")
    # what the script would ask for, whose jar the tests' Kafka does not have
    asked = re.findall(r"--alter --topic orders\.events(\S*) --partitions (\d+)", block)
    assert [side for side, _ in asked] == ["", ".gaps", ".dead"]
    client = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    more = [NewPartitions(publisher.topic.name + side, int(count)) for side, count in asked]
    for future in client.create_partitions(more).values():
        future.result(15)
    for number in range(20):
        commit(database, f"order-{number}", 3)
    doctor = publisher.command("doctor")
    assert doctor.returncode == 0, doctor.stdout
    publisher.publish_everything()
    assert "number of partitions has changed" in publisher.log.read_text()
    assert not verify(publisher)
    assert len(publisher.topic.read()) == 60


def test_restore_a_database(database: FreshDatabase, publisher: Publisher) -> None:
    """docs/how-to/restore-a-database.md: the topic's history is put back into the table."""
    (script,) = code("how-to/restore-a-database.md", "python")
    address = database.connect()
    for named, is_here in (
        ('"db.internal"', f'"{address.host}"'),
        ("3306", str(address.port)),
        ('database="shop", user="admin"', f'database="{database.name}", user="root"'),
        ('password="…"', 'password=""'),
        ("kafka-1:9092", publisher.topic.bootstrap_servers),
        ("orders.events", publisher.topic.name),
    ):
        assert named in script
        script = script.replace(named, is_here)
    address.close()
    (publisher.folder / "restore.py").write_text(script)
    commit(database, "order-1", 1, 2, 3)
    commit(database, "order-2", 1, payload=b"\xff", metadata='{"user": "ü", "attempt": 2}')
    commit(database, "order-3", 1, payload=None, create_time="2025-07-01 12:00:00.123456")
    publisher.start()
    for name, versions in (("order-1", [1, 2, 3]), ("order-2", [1]), ("order-3", [1])):
        publisher.until_published(name, versions)
    assert publisher.command("pause").returncode == 0
    rows = (
        "SELECT aggregate_id, version, event_type, payload, create_time FROM events"
        " ORDER BY aggregate_id, version"
    )
    before = database.execute(rows)
    database.execute("DELETE FROM events WHERE version > 1 OR aggregate_id <> 'order-1'")
    assert verify(publisher, "--differences", "lost.jsonl") == {"extra": 4}
    command = [sys.executable, "restore.py"]
    done = subprocess.check_output(command, text=True, cwd=publisher.folder)
    assert done == "4 rows were inserted\n"
    assert database.execute(rows) == before
    assert publisher.command("resume").returncode == 0
    commit(database, "order-1", 4)
    publisher.until_published("order-1", [1, 2, 3, 4])
    assert not verify(publisher)
    assert len(publisher.topic.read()) == 6


def test_move_to_another_machine(database: FreshDatabase, publisher: Publisher) -> None:
    """docs/how-to/another-machine.md: with a copy of the state, and without."""
    commit(database, "order-1", 1, 2)
    publisher.publish_everything()
    elsewhere = publisher.folder / "elsewhere"
    shutil.copytree(publisher.state, elsewhere)
    shutil.rmtree(publisher.state)
    publisher.settings["app"]["state_dir"] = str(elsewhere)
    commit(database, "order-1", 3)
    publisher.publish_everything()
    shutil.rmtree(elsewhere)
    commit(database, "order-1", 4)
    publisher.publish_everything()
    assert publisher.topic.versions("order-1") == [1, 2, 3, 4]
    assert not verify(publisher)


def test_skip_a_gap(database: FreshDatabase, publisher: Publisher) -> None:
    """The commands of docs/how-to/skip-a-gap.md, in their order."""
    publisher.settings["gaps"] = {"max_backoff": 20}
    commit(database, "order-17", 1, 4)
    publisher.start()
    publisher.until_published("order-17", [1])

    def gaps(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = publisher.command("gaps", *arguments, "--json")
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    assert eventually(lambda: gaps("list")[0] == 1)
    assert gaps("retry", "order-17")[0] == 1, "it is not there yet"
    publisher.stop()
    assert gaps("skip", "order-17", "--yes")[0] != 0
    assert gaps("skip", "order-17", "--yes", "--later")[0] == 0
    assert gaps("cancel", "order-17")[0] == 0
    publisher.start()
    assert eventually(lambda: gaps("skip", "order-17", "--yes")[0] == 0)
    publisher.until_published("order-17", [1, 4])
    commit(database, "order-17", 3)
    publisher.until_published("order-17", [1, 4, 3])
    assert [r.version for r in publisher.topic.follow() if r.late] == [3]
    (record,) = publisher.gaps.read()
    assert record.value is not None
    assert set(json.loads(record.value)) == {
        *("aggregate_id", "from_version", "to_version"),
        *("first_seen", "skipped_at", "attempts", "reason"),
    }
    assert gaps("list")[0] == 0


def test_the_example_of_a_record_is_what_the_row_beside_it_becomes(
    database: FreshDatabase, publisher: Publisher
) -> None:
    (statement,) = code("messages.md", "sql")
    (shown,) = map(json.loads, code("messages.md", "json"))
    publisher.settings["app"]["id"] = "orders"
    publisher.settings["sink"]["partitions"] = 8
    database.execute(statement.strip().removesuffix(";"))
    publisher.publish_everything()
    (record,) = publisher.topic.read()
    assert record.value is not None
    assert shown == {
        "partition": record.partition,
        "timestamp": record.timestamp,
        "key": record.key,
        "headers": [[name, value.decode()] for name, value in record.headers.items()],
        "value": record.value.decode(),
    }


def ours(example: str, publisher: Publisher, database: FreshDatabase, group: str) -> str:
    """An example with this test's servers and topic, as root."""
    with database.connect() as address:
        port = str(address.port)
    for named, is_here in (
        ('"kafka-1:9092"', f'"{publisher.topic.bootstrap_servers}"'),
        ('"orders.events"', f'"{publisher.topic.name}"'),
        ("3306", port),
        ('database="billing"', f'database="{database.name}"'),
        ("/billing", f"/{database.name}"),
        ('user="billing"', 'user="root"'),
        ('", "billing", "…"', '", "root", ""'),
        ('"billing"', f'"{group}-{publisher.topic.name}"'),
        ('"…"', '""'),
    ):
        example = example.replace(named, is_here)
    assert not re.search(r"3306|kafka-1|orders\.events|…", example)
    return example


def prints(
    command: list[str],
    folder: Path,
    lines: int,
    remembered: Callable[[], bool],
    *,
    of: Callable[[list[str]], list[str]] = lambda printed: printed,
) -> list[str]:
    """What a consumer prints until there are so many lines `of` it, and all is `remembered`."""
    out = folder / "out"
    with out.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=folder)
    try:
        eventually(lambda: len(of(out.read_text().splitlines())) >= lines and remembered())
    finally:
        process.kill()
        process.wait()
    return out.read_text().splitlines()


@pytest.fixture
def remembered(database: FreshDatabase, publisher: Publisher) -> Callable[[], bool]:
    """The table of docs/how-to/consume.md: whether it has the last record's offset.

    What a consumer has printed it commits only then.
    """
    (statement,) = code("how-to/consume.md", "sql")
    database.execute(statement.strip().removesuffix(";"))

    def is_remembered() -> bool:
        last = publisher.topic.read()[-1]
        found = database.execute("SELECT part, last_offset FROM billing_offsets")
        return (last.partition, last.offset) in found

    return is_remembered


def test_the_consumer_in_python_handles_each_event_once(
    database: FreshDatabase,
    publisher: Publisher,
    tmp_path: Path,
    remembered: Callable[[], bool],
) -> None:
    (example,) = code("how-to/consume.md", "python")
    program = tmp_path / "billing.py"
    command = [sys.executable, "-u", str(program)]
    commit(database, "a", 1, 2, 3)
    publisher.publish_everything()
    program.write_text(ours(example, publisher, database, "first"))
    found = prints(command, tmp_path, 3, remembered)
    assert found == [f"a {version} happened b'{{}}'" for version in (1, 2, 3)]
    commit(database, "a", 4)
    publisher.publish_everything()
    # as if it had ended before it committed to Kafka what is in the database
    program.write_text(ours(example, publisher, database, "second"))
    assert prints(command, tmp_path, 1, remembered) == ["a 4 happened b'{}'"]


def driver() -> Path:
    """The folder of the JDBC driver that the page names."""
    page = (DOCS / "how-to/consume.md").read_text()
    (version,) = re.findall(r"`com\.mysql:mysql-connector-j:(\S+)`", page)
    artifact = ("com.mysql", "mysql-connector-j", version)

    def build(folder: Path) -> None:
        with step("downloading a JDBC driver"):
            maven([artifact], folder)

    name = f"mysql-connector-j-{version}"
    return installed(name, needs=20 * MIB, build=build)


def test_the_consumer_in_java_handles_each_event_once(
    database: FreshDatabase,
    publisher: Publisher,
    tmp_path: Path,
    remembered: Callable[[], bool],
) -> None:
    java = Path(find_java())
    compiler = java.with_name("javac")
    if not compiler.exists() and not shutil.which("javac"):
        pytest.skip("no Java compiler is installed")
    (example,) = code("how-to/consume.md", "java")
    jars = f"{kafka_jars()}/*:{driver()}/*"
    program = str(compiler) if compiler.exists() else "javac"
    command = [str(java), "-cp", f"{tmp_path}:{jars}", "Billing"]

    def handled(group: str, lines: int) -> list[str]:
        (tmp_path / "Billing.java").write_text(ours(example, publisher, database, group))
        subprocess.run([program, "-cp", jars, "Billing.java"], cwd=tmp_path, check=True)

        def found(printed: list[str]) -> list[str]:
            return [line for line in printed if line.endswith("happened")]

        return found(prints(command, tmp_path, lines, remembered, of=found))

    commit(database, "a", 1, 2, 3)
    publisher.publish_everything()
    assert handled("first", 3) == [f"a {version} happened" for version in (1, 2, 3)]
    commit(database, "a", 4)
    publisher.publish_everything()
    assert handled("second", 1) == ["a 4 happened"]
