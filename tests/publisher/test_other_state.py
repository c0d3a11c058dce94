"""State that belongs to another publisher, and folders that belong to nobody here."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, commit, create_table, insert, transaction

pytestmark = pytest.mark.parametrize("database", ["mysql"], indirect=True)

Change = Callable[[Publisher, FreshDatabase], None]


def other_app(publisher: Publisher, _: FreshDatabase) -> None:
    publisher.settings["app"]["id"] = "another"


def other_topic(publisher: Publisher, _: FreshDatabase) -> None:
    _to_topic(publisher, f"{publisher.topic.name}.v2")


def other_table(publisher: Publisher, database: FreshDatabase) -> None:
    """All three: what `x1d` shows as 0 of 200 events published, without an error."""
    create_table(database, "payments")
    columns = "aggregate_id, version, event_type, payload, create_time"
    database.execute(
        f"INSERT INTO payments ({columns}) SELECT {columns} FROM events"  # noqa: S608
    )
    publisher.settings["store"]["table"] = "payments"
    publisher.settings["app"]["id"] = "payments"
    _to_topic(publisher, f"{publisher.topic.name}.payments")


def _to_topic(publisher: Publisher, name: str) -> None:
    publisher.settings["sink"]["topic"] = publisher.topic.name = name


def renamed_table(publisher: Publisher, database: FreshDatabase) -> None:
    database.execute("RENAME TABLE events TO moved")
    publisher.settings["store"]["table"] = "moved"


def refused(publisher: Publisher) -> dict[str, Any]:
    """The error with which a start ends; doctor says the same."""
    done = publisher.command("run", "--available-now", "--json")
    error: dict[str, Any] = json.loads(done.stdout)["error"] or {}
    # of an application of another name, the topic has events, too: that is met first
    assert error.get("code") in {"state.foreign", "sink.other_publisher"}, done.stdout
    checks = json.loads(publisher.command("doctor", "--json").stdout)["result"]["checks"]
    [found] = [check for check in checks if check["code"] == error["code"]]
    assert (found["status"], found["suggestion"]) == ("wrong", error["suggestion"])
    return error


@pytest.fixture
def published(database: FreshDatabase, new_publisher: NewPublisher) -> Iterator[Publisher]:
    """20 events of 10 aggregates, and the state of the publisher of two shards."""
    create_table(database)
    publisher = new_publisher(database, run={"shards": 2})
    with transaction(database) as cursor:
        for number in range(20):
            insert(cursor, f"a-{number % 10}", 1 + number // 10)
        cursor.connection.commit()
    publisher.publish_everything()
    assert len(publisher.topic.read()) == 20
    publisher.state.rename(publisher.folder / "theirs")
    yield publisher
    publisher.topic.close()


def with_state(publisher: Publisher, *, only_index: bool, **settings: dict[str, Any]) -> None:
    """Give it the state that was kept, and other settings."""
    shutil.rmtree(publisher.state, ignore_errors=True)
    shutil.copytree(publisher.folder / "theirs", publisher.state)
    if only_index:
        for file in publisher.state.glob("*.json"):
            file.unlink()
    for section, keys in settings.items():
        publisher.settings[section].update(keys)


@pytest.mark.parametrize("change", [other_app, other_topic, other_table, renamed_table])
@pytest.mark.parametrize("only_index", [False, True])
def test_the_state_of_another_publisher_is_refused(
    published: Publisher, database: FreshDatabase, change: Change, only_index: bool
) -> None:
    """Whatever the numbers of shards and partitions: with others, an index was taken over."""
    publisher = published
    own = publisher.settings["app"]["id"]
    change(publisher, database)
    is_new = change is other_topic or change is other_table  # else the topic is there
    for shards, partitions in ((2, 4), (3, 6) if is_new else (1, 4)):
        other: dict[str, Any] = {"run": {"shards": shards}, "sink": {"partitions": partitions}}
        with_state(publisher, only_index=only_index, **other)
        error = refused(publisher)
        if "sink.accept_topic_id" in error["suggestion"] or change is other_table:
            _to_topic(publisher, f"{publisher.topic.name}-{shards}")  # the refused one made it
    if "change it back" in error["suggestion"] or "set it back" in error["suggestion"]:
        publisher.settings["app"]["id"] = own
    else:
        shutil.rmtree(publisher.state)  # "or remove this one"
    table = publisher.settings["store"].get("table", "events")
    database.execute(
        f"INSERT INTO {table} (aggregate_id, version, event_type, payload)"  # noqa: S608
        " VALUES ('new', 1, 'happened', '{}')"
    )
    publisher.publish_everything()
    assert len(publisher.topic.read()) == 21
    assert len({(r.key, r.version) for r in publisher.topic.read()}) == 21


def test_a_topic_that_was_changed_on_purpose_gets_what_is_new(
    published: Publisher, database: FreshDatabase
) -> None:
    """As the error says: with the new topic's id, which doctor shows."""
    publisher = published
    other_topic(publisher, database)
    with_state(publisher, only_index=False)
    assert "sink.accept_topic_id" in refused(publisher)["suggestion"]
    accepted = re.search(r"its id is ([\w+/=-]+)", publisher.command("doctor").stdout)
    assert accepted, publisher.command("doctor").stdout
    publisher.settings["sink"]["accept_topic_id"] = accepted[1]
    commit(database, "a-0", 3)
    publisher.publish_everything()
    assert [(r.key, r.version) for r in publisher.topic.read()] == [("a-0", 3)]


def test_a_folder_with_other_files_is_left_as_it_is(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Each start removed ./spark, ./pages, ./live … of others, and closed the folder to them."""
    create_table(database)
    commit(database, "a", 1)
    publisher = new_publisher(database)
    publisher.settings["app"]["state_dir"] = "."
    folder = publisher.folder
    for name in ("spark/conf", "pages", "checkpoint", "live", "seen", "index"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.txt").write_text("precious")
    for name in ("server.json", "package.json", "nginx.conf.new"):
        (folder / name).write_text("precious")
        os.utime(folder / name, (1, 1))
    folder.chmod(0o755)
    assert publisher.config
    before = sorted(folder.rglob("*"))
    done = publisher.command("run", "--available-now", "--json")
    error = json.loads(done.stdout)["error"] or {}
    assert error.get("code") == "state.not_ours", done.stdout
    checks = json.loads(publisher.command("doctor", "--json").stdout)["result"]["checks"]
    assert [c["status"] for c in checks if c["code"] == "state.not_ours"] == ["wrong"]
    assert sorted(folder.rglob("*")) == before
    assert folder.stat().st_mode & 0o777 == 0o755

    proposed = re.search('"(.*)"', error["suggestion"])
    assert proposed
    publisher.settings["app"]["state_dir"] = proposed[1]
    publisher.publish_everything()
    assert publisher.topic.versions("a") == [1]
    assert [path for path in before if not path.exists()] == []
    assert Path(proposed[1]).stat().st_mode & 0o777 == 0o700


@pytest.mark.engines("threads", "spark")
def test_another_column_is_refused_and_a_renamed_one_taken(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """All events of its aggregates were published again, under other keys."""
    create_table(database)
    other = "VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL DEFAULT 'x'"
    database.execute(f"ALTER TABLE events ADD other {other}, ADD UNIQUE INDEX (other, version)")
    publisher = new_publisher(database, run={"shards": 1})
    commit(database, "a", 1, 2, 3)
    publisher.publish_everything()
    commit(database, "a", 4)
    columns = publisher.settings["store"].setdefault("columns", {})
    columns["aggregate_id"] = "other"
    done = publisher.command("run", "--available-now", "--json")
    assert json.loads(done.stdout)["error"]["code"] == "state.foreign", done.stdout
    database.execute("ALTER TABLE events RENAME COLUMN aggregate_id TO stream")
    columns["aggregate_id"] = "stream"
    publisher.publish_everything()
    published = [(record.key, record.version) for record in publisher.topic.read()]
    assert published == [("a", version) for version in (1, 2, 3, 4)]
    publisher.topic.close()
