"""Records of strangers on any topic end no command: they are counted and skipped."""

from __future__ import annotations

import shutil
from typing import Any

from confluent_kafka import Producer

from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import create_table, insert, transaction

TIME = b'"2026-01-01T00:00:00.000000Z"'
SKIP = (
    b'{"aggregate_id":"a","from_version":%s,"to_version":2,"first_seen":' + TIME
    + b',"skipped_at":' + TIME + b',"attempts":1,"reason":"x"}'
)  # fmt: skip
ODD = [
    SKIP % b"1e400",
    SKIP % b"NaN",
    SKIP % (b"9" * 30),
    SKIP.replace(b'"a"', b'"\\ud800"') % b"1",
    SKIP.replace(b"2026", b"9999999") % b"1",
    b"[" * 100_000,
    b"\xff",
    b"",
]


def test_records_of_strangers_end_no_command(
    new_publisher: NewPublisher, database: FreshDatabase, kafka_server: Kafka
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"late": "divert"})
    publisher.publish_everything()  # makes the topics
    own = publisher.settings["app"]["id"].encode()
    writer = Producer({"bootstrap.servers": kafka_server.bootstrap_servers})
    headers: list[Any] = [
        [("ce_source", own), ("ce_sequence", b"1" * 5000), ("ce_time", None)],
        [("ce_source", own), ("ce_sequence", b"1"), ("ce_time", None)],
        [("ce_source", b"\xff")],
        [("ce_source", own), (b"\xff", b"a name that is no text")],
    ]
    for suffix in ("", ".gaps", ".dead", ".late"):
        name = publisher.topic.name + suffix
        for value in ODD if suffix else [b"1"]:
            for key in (b"stranger", b"\xff"):
                for each in headers if suffix else [[], *headers[2:]]:
                    writer.produce(name, value, key, partition=0, headers=each)
    assert writer.flush(30) == 0
    with transaction(database) as cursor:
        insert(cursor, "a", 1)
        cursor.connection.commit()
    publisher.publish_everything()
    shutil.rmtree(publisher.state)
    publisher.publish_everything()
    assert publisher.topic.versions("a") == [1]
    for command in (["gaps", "list"], ["dead", "list"], ["verify"], ["trace", "a"]):
        done = publisher.command(*command)
        assert done.returncode < 3, (command, done.stdout + done.stderr)
        assert "Traceback" not in done.stdout + done.stderr, command
