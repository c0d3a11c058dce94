"""Scenario D8: whatever two columns hold, the key that they make is one for every command."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Topic, eventually, transaction

ODD = ["", "|", "%", "%7C", "%25|", "a|b", "a", "a ", " a", "ä", "a\u0308", "订单", "🎉", "A", "-x"]
NAMES = [v for v in ODD if not v.endswith(" ")]  # an ENUM's values end in no space
UUIDS = [uuid.UUID(int=n) for n in (0, 1, 1 << 127)]
# columns, and values of each with their text
SHAPES: dict[str, tuple[str, str, list[tuple[Any, str]], list[tuple[Any, str]]]] = {
    "VARCHAR+VARCHAR": (
        "VARCHAR(40)",
        "VARCHAR(60)",
        [(v, v) for v in ODD],
        [(v, v) for v in ODD[::3]],
    ),
    "VARCHAR+BINARY(16)": (
        "VARCHAR(40)",
        "BINARY(16)",
        [(v, v) for v in ODD],
        [(v.bytes, str(v)) for v in UUIDS],
    ),
    "INT+ENUM": (
        "INT",
        f"ENUM({', '.join(repr(v) for v in NAMES)})",
        [(n, str(n)) for n in (-5, 0, 7)],
        [(v, v) for v in NAMES],
    ),
}


def joined(*parts: str) -> str:
    """The key, by the rule of the documentation."""
    return "|".join(part.replace("%", "%25").replace("|", "%7C") for part in parts)


@pytest.mark.parametrize(
    ("database", "shape"),
    [*(("mysql", shape) for shape in SHAPES), ("mariadb", "VARCHAR+BINARY(16)")],
    indirect=["database"],
)
def test_d8_every_command_knows_an_aggregate_by_its_key(
    database: FreshDatabase, new_publisher: NewPublisher, shape: str
) -> None:
    first_type, second_type, firsts, seconds = SHAPES[shape]
    is_mysql = database.server.name.startswith("MySQL")
    collation = "utf8mb4_0900_bin" if is_mysql else "utf8mb4_nopad_bin"
    database.execute(
        f"CREATE TABLE events (no BIGINT AUTO_INCREMENT PRIMARY KEY, kind {first_type} NOT NULL,"
        f" name {second_type} NOT NULL, version INT NOT NULL, event_type VARCHAR(40) NOT NULL,"
        " payload LONGBLOB NOT NULL, metadata JSON NULL,"
        " create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),"
        " UNIQUE KEY backwards (version, name, kind), KEY (create_time))"
        f" DEFAULT CHARSET=utf8mb4 COLLATE={collation}"
    )
    publisher = new_publisher(
        database,
        store={"columns": {"id": "no", "aggregate_id": ["kind", "name"]}},
        gaps={"backoff_base": "60s"},
        run={"shards": 2},
    )
    keys = {joined(f[1], s[1]): (f[0], s[0]) for f in firsts for s in seconds}
    assert len(keys) == len(firsts) * len(seconds)
    dead, *_ = keys
    insert = (
        "INSERT INTO events (kind, name, version, event_type, payload) VALUES (%s, %s, %s, 'x', %s)"
    )
    with transaction(database) as cursor:
        cursor.executemany(insert, [(*of, v, b"{}") for of in keys.values() for v in (1, 3)])
        cursor.execute(insert, (*keys[dead], 0, b"{}"))  # no version of an event
        cursor.connection.commit()
    publisher.start()
    eventually(lambda: len(publisher.topic.follow()) == len(keys))
    assert {(r.key, r.version) for r in publisher.topic.read()} == {(key, 1) for key in keys}
    gaps = publisher.answer(1, "gaps", "list", "--limit", "100")["open"]
    held = {gap["aggregate_id"] for gap in gaps}
    assert held == {*keys}
    some = [*keys][:: len(keys) // 2 + 1]
    assert len(some) >= 2
    for key in some:
        done = publisher.command("trace", "--json", "--", key)
        assert done.returncode == 1, done.stdout + done.stderr
        found = {v["version"]: v["verdict"] for v in json.loads(done.stdout)["result"]["versions"]}
        found.pop(0, None)
        assert found == {1: "published", 2: "missing", 3: "held"}, key
        assert publisher.command("gaps", "skip", "--yes", "--", key).returncode == 0, key
        publisher.until_published(key, [1, 3])
    retried = next(key for key in reversed(keys) if key not in some)
    with transaction(database) as cursor:
        cursor.executemany(insert, [(*keys[key], 2, b"{}") for key in (*some, retried)])
        cursor.connection.commit()
    assert publisher.command("gaps", "retry", "--", retried).returncode == 0
    publisher.until_published(retried, [1, 2, 3])
    for key in some:
        publisher.until_published(key, [1, 3, 2])
    assert publisher.stop() == 143
    notes = publisher.answer(1, "trace", "nobody")["notes"]
    assert any("kind|name" in note for note in notes), "of an id that is not known at all"
    [letter] = publisher.answer(1, "dead", "list")["letters"]
    assert (letter["aggregate_id"], letter["version"]) == (dead, 0)
    assert publisher.command("verify").returncode == 0
    again = f"{publisher.topic.name}.again"
    span = ("--from", "2020-01-01T00:00:00Z", "--to", "2035-01-01T00:00:00Z", "--topic", again)
    replayed = publisher.answer(0, "replay", *span)
    assert replayed["events"] == 2 * len(keys) + len(some) + 2  # retried, and dead
    assert {r.key for r in Topic(publisher.topic.bootstrap_servers, again).read()} == {*keys}
    checks = {
        c["name"]: c
        for c in json.loads(publisher.command("doctor", "--json").stdout)["result"]["checks"]
    }
    assert checks["event store: identity of aggregates"]["status"] == "ok"
