"""Finding A19: what users ask of a publisher is done as they were shown it, or not at all."""

from __future__ import annotations

import os
import stat
import time
from typing import Any

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    commit,
    create_table,
    eventually,
    insert,
    transaction,
)

pytestmark = pytest.mark.engines("threads", "here")


def gaps(publisher: Publisher, status: int, *arguments: str) -> dict[str, Any]:
    """What `eventpub gaps … --json` says."""
    return publisher.answer(status, "gaps", *arguments)


@pytest.mark.engines("threads", "spark")
def test_a19_a_skip_names_what_it_gives_up_and_gives_up_nothing_else(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "60s", "max_backoff": 8})
    publisher.start()
    commit(database, "held", 1, 5, 9)
    commit(database, "whole", 1)
    commit(database, "grows", 1, 4, 6)
    publisher.until_published("held", [1])
    publisher.until_published("whole", [1])
    eventually(lambda: len(gaps(publisher, 1, "list")["open"]) == 2)

    assert gaps(publisher, 1, "retry", "nobody")["outcome"] == "nothing is held"
    # nothing is held: nothing is asked, now or later
    assert gaps(publisher, 1, "skip", "whole", "--yes")["outcome"] == "nothing is held"
    assert gaps(publisher, 1, "skip", "nobody", "--yes", "--later")["outcome"] == "nothing is held"
    # not without --yes, where nobody can be asked; and it says which
    told = gaps(publisher, 1, "skip", "held")
    assert (told["outcome"], told["from_version"], told["to_version"]) == ("not confirmed", 2, 4)
    done = publisher.command("gaps", "skip", "held")
    assert done.returncode == 1
    assert "versions 2 to 4" in done.stdout
    assert "--yes" in done.stdout
    assert gaps(publisher, 1, "list")["requests"] == []
    assert publisher.topic.versions("held") == [1]

    told = gaps(publisher, 0, "skip", "held", "--yes")
    assert (told["outcome"], told["from_version"], told["to_version"]) == ("skipped", 2, 4)
    publisher.until_published("held", [1, 5])

    # without a publisher: only where it is left for later, where it can be seen and taken back
    publisher.kill()
    assert gaps(publisher, 1, "skip", "held", "--yes")["outcome"] == "not running"
    assert gaps(publisher, 1, "retry", "held")["outcome"] == "not running"
    assert gaps(publisher, 1, "list")["requests"] == []
    kept = gaps(publisher, 0, "skip", "held", "--yes", "--later")
    assert (kept["outcome"], kept["from_version"], kept["to_version"]) == ("kept", 6, 8)
    (waiting,) = gaps(publisher, 1, "list")["requests"]
    assert (waiting["id"], waiting["aggregate_id"]) == (kept["request"], "held")
    assert (waiting["from_version"], waiting["to_version"]) == (6, 8)
    assert gaps(publisher, 0, "cancel", waiting["id"])["cancelled"] == [waiting]
    assert gaps(publisher, 1, "cancel", waiting["id"])["cancelled"] == []
    assert gaps(publisher, 1, "list")["requests"] == []

    # what waits is bound to its versions: those that came are published, and no other gap goes
    assert gaps(publisher, 0, "skip", "held", "--yes", "--later")["outcome"] == "kept"
    commit(database, "held", 6, 7, 8, 11)
    assert gaps(publisher, 0, "skip", "grows", "--yes", "--later")["to_version"] == 3
    database.execute("DELETE FROM events WHERE aggregate_id = 'grows' AND version = 4")
    broken = publisher.state / "requests" / "mine.json"
    broken.write_text('{"id": "mine", "action": "skip"}')
    empty = publisher.state / "requests" / "empty.json"
    empty.write_text("")
    os.chmod(publisher.state / "requests", 0o755)
    publisher.start()
    publisher.until_published("held", [1, 5, 6, 7, 8, 9])
    publisher.until_said('"changed"')
    assert {f.name for f in (publisher.state / "requests").iterdir() if f.suffix != ".answer"} == {
        "mine.json",
        "empty.json",
    }
    assert stat.S_IMODE((publisher.state / "requests").stat().st_mode) == 0o700
    listed = gaps(publisher, 1, "list")
    assert {h["aggregate_id"]: h["first_missing"] for h in listed["open"]} == {
        "held": 10,
        "grows": 2,
    }
    (skip,) = listed["skipped"]
    assert (skip["aggregate_id"], skip["from_version"], skip["to_version"]) == ("held", 2, 4)
    publisher.kill()


def test_what_a_paused_publisher_has_taken_over_can_be_taken_back(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "60s", "max_backoff": 8})
    publisher.start()
    commit(database, "held", 1, 3)
    publisher.until_published("held", [1])
    eventually(lambda: publisher.command("gaps", "list").returncode == 1)
    publisher.kill()
    assert gaps(publisher, 0, "skip", "held", "--yes", "--later")["outcome"] == "kept"
    assert publisher.answer(0, "pause")["outcome"] == "kept"
    publisher.start()
    eventually(lambda: publisher.answer(0, "pause")["outcome"] == "paused")
    assert len(gaps(publisher, 0, "cancel", "held")["cancelled"]) == 1
    assert publisher.answer(0, "resume")["outcome"] == "resumed"
    commit(database, "after", 1)
    publisher.until_published("after", [1])
    assert [h["first_missing"] for h in gaps(publisher, 1, "list")["open"]] == [2]
    assert publisher.topic.versions("held") == [1]


def test_a_request_that_was_kept_gives_up_no_gap_whose_transaction_is_open(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """It came before the first window, which says what is open."""
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "200ms", "max_backoff": 2})
    publisher.start()
    with transaction(database) as writer:
        insert(writer, "gap", 1)
        commit(database, "gap", 2)
        eventually(lambda: publisher.command("gaps", "list").returncode == 1)
        time.sleep(2)  # all of its attempts were in vain
        publisher.kill()
        assert gaps(publisher, 0, "retry", "gap", "--later")["outcome"] == "kept"
        assert publisher.answer(0, "pause")["outcome"] == "kept"
        publisher.start()
        eventually(lambda: publisher.answer(0, "pause")["outcome"] == "paused")
        assert publisher.answer(0, "resume")["outcome"] == "resumed"
        publisher.until_said("still missing")
        time.sleep(1)
        assert publisher.topic.versions("gap") == []
        writer.connection.commit()
    publisher.until_published("gap", [1, 2])
    assert not any(record.late for record in publisher.topic.follow())
