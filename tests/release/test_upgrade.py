"""The present version goes on from the state directory of each version that was released."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher, new_publisher
from tests.publisher.harness import Publisher, create_table, insert, transaction
from tests.release.kept import APP, STATES, named, write

__all__ = ["new_publisher"]


def start_on(state: Path, publisher: Publisher) -> None:
    """Give it the state, and let it go on in its topic, which has nothing of what was published."""
    with tarfile.open(state) as tar:
        tar.extractall(publisher.folder, filter="data")
    publisher.settings["app"]["id"] = APP
    refused = publisher.command("run", "--available-now", "--json")
    assert json.loads(refused.stdout)["error"]["code"] == "state.foreign"
    accepted = re.search(r"its id is ([\w+/=-]+)", publisher.command("doctor").stdout)
    assert accepted, publisher.command("doctor").stdout
    publisher.settings["sink"]["accept_topic_id"] = accepted[1]


@pytest.mark.parametrize("state", sorted(STATES.glob("*.tar.gz")), ids=lambda path: path.name)
def test_a_state_of_a_released_version(
    state: Path, database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """It knows what was published, what waits and what was skipped; the topic could not tell it."""
    database = named(database.server)
    create_table(database)
    write(database)
    publisher = new_publisher(database)
    start_on(state, publisher)
    with transaction(database) as cursor:
        for name in ("whole", "held", "skipped"):
            insert(cursor, name, 4)
        for name in ("held", "skipped"):
            insert(cursor, name, 2)
        cursor.connection.commit()
    publisher.publish_everything()
    found = [(r.key, r.version, r.late) for r in publisher.topic.read()]
    assert sorted(found) == [
        ("held", 2, False),
        ("held", 3, False),
        ("held", 4, False),
        ("skipped", 2, True),
        ("skipped", 4, False),
        ("whole", 4, False),
    ]
    assert publisher.topic.versions("held") == [2, 3, 4]


def test_a_state_is_kept_of_the_first_version() -> None:
    assert (STATES / "0.1.0.tar.gz").is_file()
