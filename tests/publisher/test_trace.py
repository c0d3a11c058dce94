"""`trace` on real servers: each version of an aggregate has one word for where it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from eventpub.admission.model import topic_partition
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

LONG_AGO = "2020-01-01 00:00:00"


def trace(publisher: Publisher, status: int, *arguments: str) -> dict[str, Any]:
    """What `eventpub trace … --json` says."""
    return publisher.answer(status, "trace", *arguments)


def verdicts(result: dict[str, Any]) -> dict[int, str]:
    return {v["version"]: v["verdict"] for v in result["versions"]}


def test_each_version_has_one_word(database: FreshDatabase, new_publisher: NewPublisher) -> None:
    create_table(database)
    publisher = new_publisher(
        database,
        gaps={"backoff_base": "60s", "max_backoff": 8},
        recount={"horizon": "10s"},
        read={"start": "2019-01-01T00:00:00Z"},
    )
    commit(database, "old", 1, create_time="2018-01-01 00:00:00")
    publisher.start()
    commit(database, "a", 1, 2, 3, payload=b"12345")
    commit(database, "held", 1, 3)
    commit(database, "gap", 1, 4)
    commit(database, "dead", 0, 1)
    publisher.until_published("a", [1, 2, 3])
    publisher.until_published("dead", [1])
    publisher.until_published("gap", [1])
    publisher.until_published("held", [1])

    found = trace(publisher, 0, "a")
    assert verdicts(found) == {1: "published", 2: "published", 3: "published"}
    assert found["publisher_is_running"]
    records = {(r.key, r.version): r for r in publisher.topic.read()}
    for traced in found["versions"]:
        [record] = traced["records"]
        there = records["a", traced["version"]]
        assert (record["partition"], record["offset"]) == (there.partition, there.offset)
        assert record["topic"] == publisher.topic.name
        assert traced["stored"]["payload_bytes"] == 5
        assert traced["stored"]["event_type"] == "happened"
    assert verdicts(trace(publisher, 0, "a", "--limit", "2")) == {2: "published", 3: "published"}
    assert verdicts(trace(publisher, 0, "a", "2")) == {2: "published"}
    assert verdicts(trace(publisher, 0, "old")) == {1: "baseline"}

    found = eventually(lambda: held(publisher))
    assert verdicts(found) == {1: "published", 2: "missing", 3: "held"}
    assert found["versions"][2]["hold"]["first_missing"] == 2
    assert "waits for version 2 since" in found["versions"][2]["note"]

    found = trace(publisher, 1, "dead", "0")
    assert verdicts(found) == {0: "dead"}
    assert found["versions"][0]["note"].startswith("admission.version_below_first")

    assert publisher.command("gaps", "skip", "gap", "--yes").returncode == 0
    publisher.until_published("gap", [1, 4])
    assert verdicts(trace(publisher, 0, "gap")) == {
        1: "published",
        2: "skipped",
        3: "skipped",
        4: "published",
    }
    commit(database, "gap", 2, create_time=LONG_AGO)
    publisher.until_published("gap", [1, 4, 2])
    found = trace(publisher, 0, "gap")
    assert verdicts(found)[2] == "late"
    [record] = found["versions"][1]["records"]
    assert record["is_late"]

    assert verdicts(trace(publisher, 1, "nobody")) == {}
    assert verdicts(trace(publisher, 1, "a", "77")) == {77: "unknown"}

    assert publisher.stop() == 143
    commit(database, "gap", 3, create_time=LONG_AGO)
    found = trace(publisher, 1, "gap", "3")
    assert verdicts(found) == {3: "skipped"}
    assert "gaps retry" in found["versions"][0]["note"]
    commit(database, "a", 4)
    commit(database, "lost", 1, create_time=LONG_AGO)
    found = trace(publisher, 1, "a")
    assert verdicts(found)[4] == "waiting"
    assert not found["publisher_is_running"]
    assert any("no publisher" in note for note in found["notes"])
    assert verdicts(trace(publisher, 1, "lost")) == {1: "missing"}
    assert verdicts(trace(publisher, 1, "held")) == {1: "published", 2: "missing", 3: "held"}
    # what left the store is still found on the topic
    database.execute("DELETE FROM events WHERE aggregate_id = 'gap'")
    found = trace(publisher, 0, "gap")
    assert verdicts(found) == {1: "published", 2: "late", 4: "published"}
    assert [v["note"] for v in found["versions"]] == [
        "no row in the table",
        "published, marked as late; no row in the table",
        "no row in the table",
    ]
    assert verdicts(trace(publisher, 0, "gap", "3")) == {3: "skipped"}
    # as text, for people
    done = publisher.command("trace", "held")
    assert done.returncode == 1
    assert "held: 1 published, 1 missing, 1 held; waits for version 2" in done.stdout


def held(publisher: Publisher) -> dict[str, Any]:
    found = trace(publisher, 1, "held")
    return found if verdicts(found).get(3) == "held" else {}


def test_an_event_is_found_after_partitions_were_added(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    ids = [f"id-{n}" for n in range(4)]
    for aggregate_id in ids:
        commit(database, aggregate_id, 1)
    publisher.publish_everything()
    sink = publisher.settings["sink"]
    admin = AdminClient({"bootstrap.servers": sink["bootstrap_servers"]})
    for made in admin.create_partitions([NewPartitions(sink["topic"], 7)]).values():
        made.result()
    # nor does somebody else's record of the same key count
    producer = Producer({"bootstrap.servers": sink["bootstrap_servers"]})
    producer.produce(sink["topic"], b"", "foreign", headers={"ce_sequence": "1"})
    assert producer.flush(10) == 0
    moved = 0
    for record in publisher.topic.read():
        if record.key == "foreign":
            continue
        found = trace(publisher, 0, record.key)
        [[place]] = [v["records"] for v in found["versions"]]
        assert (place["partition"], place["offset"]) == (record.partition, record.offset)
        moved += record.partition != topic_partition(record.key, 7)
    assert moved
    assert verdicts(trace(publisher, 1, "foreign")) == {}


@pytest.mark.parametrize("late", ["publish", "divert"])
def test_skips_dead_letters_and_late_events_are_found_after_partitions_were_added(
    database: FreshDatabase, new_publisher: NewPublisher, late: str
) -> None:
    create_table(database)
    publisher = new_publisher(
        database, gaps={"max_backoff": 2, "late": late}, recount={"rows_in_past": "count"}
    )
    publisher.start()
    ids = [f"id-{n}" for n in range(4)]
    for aggregate_id in ids:
        commit(database, aggregate_id, 0, 1, 4)
    for aggregate_id in ids:
        publisher.until_published(aggregate_id, [1, 4])
        commit(database, aggregate_id, 3, create_time=LONG_AGO)
    expected = {0: "dead", 1: "published", 2: "skipped", 3: "late", 4: "published"}
    for aggregate_id in ids:
        eventually(lambda a=aggregate_id: found_so(publisher, a, expected))  # type: ignore[misc]
    assert publisher.stop() == 143
    sink = publisher.settings["sink"]
    name = sink["topic"]
    admin = AdminClient({"bootstrap.servers": sink["bootstrap_servers"]})
    sides = [f"{name}.gaps", f"{name}.dead"] + [f"{name}.late"] * (late == "divert")
    grown = [NewPartitions(topic, 7) for topic in (name, *sides)]
    for made in admin.create_partitions(grown).values():
        made.result()
    assert any(topic_partition(a, 4) != topic_partition(a, 7) for a in ids)

    for aggregate_id in ids:
        assert verdicts(trace(publisher, 1, aggregate_id)) == expected
    for version, verdict in expected.items():
        found = trace(publisher, int(verdict == "dead"), ids[0], str(version))
        assert verdicts(found) == {version: verdict}


def found_so(publisher: Publisher, aggregate_id: str, expected: dict[int, str]) -> bool:
    done = publisher.command("trace", aggregate_id, "--json")
    return verdicts(json.loads(done.stdout)["result"]) == expected


def test_versions_that_were_refused_are_shown_without_being_named(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit(database, "zero", 0, 1)
    commit(database, "neg", -5)
    commit(database, "gone", 0, 1)
    publisher.publish_everything()
    assert verdicts(trace(publisher, 1, "zero")) == {0: "dead", 1: "published"}
    assert verdicts(trace(publisher, 1, "neg")) == {-5: "dead"}
    database.execute("DELETE FROM events WHERE aggregate_id = 'gone' AND version = 0")
    assert verdicts(trace(publisher, 1, "gone")) == {0: "dead", 1: "published"}
    found = trace(publisher, 0, "zero", "--limit", "1")
    assert (verdicts(found), found["total"]) == ({1: "published"}, 2)
    assert (
        "zero: the last 1 of 2 versions: 1 published"
        in publisher.command("trace", "zero", "--limit", "1").stdout
    )


def test_the_versions_that_are_waited_for_are_named_where_they_are_not_shown(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "60s", "max_backoff": 8})
    publisher.start()
    commit(database, "many", *range(2, 502))
    commit(database, "wide", *range(1, 6), 3_000)
    commit(database, "end", 1)
    publisher.until_published("end", [1])

    def says(aggregate_id: str, expected: str) -> bool:
        done = publisher.command("trace", aggregate_id)
        return expected in done.stdout

    many = "many: the last 20 of 501 versions: 20 held; waits for version 1"
    wide = "wide: the last 20 of 3,000 versions: 19 missing, 1 held; waits for versions 6 to 2999"
    eventually(lambda: says("many", many))
    eventually(lambda: says("wide", wide))
    found = trace(publisher, 1, "wide")
    assert found["waits_for"] == {"from_version": 6, "to_version": 2_999}
    assert found["total"] == 3_000


def test_an_event_whose_version_was_written_anew_is_shown_beside_its_dead_letter(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    publisher.start()
    commit(database, "a", 1, 2)
    publisher.until_published("a", [1, 2])
    database.execute("DELETE FROM events WHERE aggregate_id = 'a' AND version = 2")
    commit(database, "a", 2, payload=b"another")
    found = eventually(lambda: rewritten(publisher))
    assert verdicts(found) == {1: "published", 2: "dead"}
    places = [(r["topic"], r["offset"]) for r in found["versions"][1]["records"]]
    [record] = [r for r in publisher.topic.read() if r.version == 2]
    name = publisher.topic.name
    assert places == [(f"{name}.dead", places[0][1]), (name, record.offset)]


def rewritten(publisher: Publisher) -> dict[str, Any]:
    found = publisher.command("trace", "a", "--json")
    result: dict[str, Any] = json.loads(found.stdout)["result"]
    return result if verdicts(result).get(2) == "dead" else {}


def test_only_records_of_the_publisher_count(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit(database, "a", 1)
    publisher.publish_everything()
    name = publisher.topic.name
    app = publisher.settings["app"]["id"]
    producer = Producer({"bootstrap.servers": publisher.topic.bootstrap_servers})
    headers: dict[str, str | bytes | None] = {"ce_source": "billing", "ce_sequence": "1"}
    producer.produce(name, b"x", "Ghost", partition=0, headers=headers)
    headers = {"ce_source": app, "ce_sequence": "1", "ce_id": "lost/1"}
    producer.produce(name, b"x", "lost", partition=1, headers=headers)
    assert producer.flush(10) == 0

    found = trace(publisher, 1, "Ghost", "1")
    assert verdicts(found) == {1: "unknown"}
    found = trace(publisher, 0, "lost", "1")
    assert found["versions"][0]["note"] == "no row in the table"
    assert [r["partition"] for r in found["versions"][0]["records"]] == [1]
    assert "nothing is known of it" in publisher.command("trace", "nobody").stdout
    text = publisher.command("trace", "nobody", "--timeout", "0.000001").stdout
    assert f"partitions of {name} were not read to the end" in text
    assert "nothing is known of it" not in text


def test_a_row_without_a_time_is_shown_as_what_stops_the_publisher(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database, time="DATETIME(6)")
    time = "DATETIME(6) NULL DEFAULT CURRENT_TIMESTAMP(6)"
    database.execute(f"ALTER TABLE events MODIFY create_time {time}")
    publisher = new_publisher(database)
    commit(database, "a", 1)
    publisher.publish_everything()
    commit(database, "a", 2, create_time=None)
    with transaction(database) as cursor:
        cursor.execute("SET sql_mode = ''")
        insert(cursor, "zero", 1, create_time="0000-00-00")
        insert(cursor, "old", 1, create_time="1969-12-31 23:59:59")
        cursor.connection.commit()
    commit(database, "a", 3)
    publisher.start("--available-now")
    assert publisher.finish() == 3, publisher.words()
    assert "store.row_invalid" in publisher.log.read_text()

    found = trace(publisher, 1, "a")
    assert verdicts(found) == {1: "published", 2: "invalid", 3: "waiting"}
    assert found["versions"][1]["stored"]["create_time"] is None
    assert "no create_time" in found["versions"][1]["note"]
    assert verdicts(trace(publisher, 1, "a", "2")) == {2: "invalid"}
    assert "invalid" in publisher.command("trace", "a").stdout
    assert verdicts(trace(publisher, 1, "zero")) == {1: "invalid"}
    found = trace(publisher, 1, "old")
    assert verdicts(found) == {1: "invalid"}
    assert "before 1970" in found["versions"][0]["note"]

    # from before a start that is configured, it is a baseline like others
    publisher.settings["read"]["start"] = "2019-01-01T00:00:00Z"
    (publisher.state / "start.json").unlink()
    assert verdicts(trace(publisher, 0, "old")) == {1: "baseline"}


def test_a_row_of_before_1970_is_published_as_a_missing_version_only(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database, time="DATETIME(6)")
    publisher = new_publisher(database)
    commit(database, "a", 1, create_time="1969-12-31 23:59:59")
    publisher.publish_everything()
    assert verdicts(trace(publisher, 1, "a")) == {1: "invalid"}
    commit(database, "a", 2)
    publisher.publish_everything()
    assert verdicts(trace(publisher, 0, "a")) == {1: "published", 2: "published"}


def test_the_last_versions_are_the_highest(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"max_backoff": 1})
    highest = 2**63 - 1
    commit(database, "a", 1, highest)
    publisher.publish_everything()
    commit(database, "a", 77)
    publisher.publish_everything()
    found = trace(publisher, 0, "a", "--limit", "2")
    assert verdicts(found) == {highest - 1: "skipped", highest: "published"}
    assert found["total"] == highest
