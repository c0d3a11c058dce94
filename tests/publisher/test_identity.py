"""Scenario D8: tables of libraries, as they are: which columns say whose event a row is."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, differences, eventually, transaction

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)

# the tables of prooph, patchlevel and spatie, as their own migrations make them

PROOPH = """
CREATE TABLE `_7f1c0a5be2` (
  `no` BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  event_id CHAR(36) CHARACTER SET utf8mb3 COLLATE utf8mb3_bin NOT NULL,
  event_name VARCHAR(100) CHARACTER SET utf8mb3 COLLATE utf8mb3_bin NOT NULL,
  payload JSON NOT NULL,
  metadata JSON NOT NULL,
  created_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  aggregate_version INT UNSIGNED GENERATED ALWAYS AS
    (JSON_EXTRACT(metadata, '$._aggregate_version')) STORED{not_null},
  aggregate_id CHAR(36) CHARACTER SET utf8mb3 COLLATE utf8mb3_bin GENERATED ALWAYS AS
    (JSON_UNQUOTE(JSON_EXTRACT(metadata, '$._aggregate_id'))) STORED{not_null},
  aggregate_type VARCHAR(150) CHARACTER SET utf8mb3 COLLATE utf8mb3_bin GENERATED ALWAYS AS
    (JSON_UNQUOTE(JSON_EXTRACT(metadata, '$._aggregate_type'))) STORED{not_null},
  UNIQUE KEY (event_id),
  UNIQUE KEY ix_unique_event (aggregate_type, aggregate_id, aggregate_version),
  KEY (created_at))
"""
OF_PROOPH = {
    "id": "no",
    "aggregate_id": ["aggregate_type", "aggregate_id"],
    "version": "aggregate_version",
    "event_type": "event_name",
    "create_time": "created_at",
}
PATCHLEVEL_AGGREGATE = """
CREATE TABLE event_store (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, aggregate VARCHAR(255) NOT NULL,
  aggregate_id CHAR(36) NOT NULL, playhead INT NOT NULL, event VARCHAR(255) NOT NULL,
  payload JSON NOT NULL, recorded_on DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP,
  custom_headers JSON NOT NULL,
  UNIQUE KEY (aggregate, aggregate_id, playhead), KEY (recorded_on))
  DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_unicode_ci
"""
OF_PATCHLEVEL_AGGREGATE = {
    "aggregate_id": ["aggregate", "aggregate_id"],
    "version": "playhead",
    "event_type": "event",
    "metadata": "custom_headers",
    "create_time": "recorded_on",
}
PATCHLEVEL_STREAM = """
CREATE TABLE event_store (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, stream VARCHAR(255) NOT NULL, playhead INT NULL,
  event_name VARCHAR(255) NOT NULL, event_payload JSON NOT NULL,
  recorded_on DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP, custom_headers JSON NOT NULL,
  UNIQUE KEY (stream, playhead), KEY (recorded_on))
"""
OF_PATCHLEVEL_STREAM = {
    "aggregate_id": "stream",
    "version": "playhead",
    "event_type": "event_name",
    "payload": "event_payload",
    "metadata": "custom_headers",
    "create_time": "recorded_on",
}
SPATIE = """
CREATE TABLE stored_events (
  id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY, aggregate_uuid CHAR(36) NULL,
  aggregate_version BIGINT UNSIGNED NULL, event_class VARCHAR(255) NOT NULL,
  event_properties JSON NOT NULL, meta_data JSON NOT NULL,
  created_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
  UNIQUE KEY (aggregate_uuid, aggregate_version), KEY (created_at))
  DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_unicode_ci
"""
OF_SPATIE = {
    "aggregate_id": "aggregate_uuid",
    "version": "aggregate_version",
    "event_type": "event_class",
    "payload": "event_properties",
    "metadata": "meta_data",
    "create_time": "created_at",
}


def published(publisher: Publisher) -> set[tuple[str, int]]:
    """Keys and versions of the topic, after a look that nothing is out of place."""
    records = publisher.topic.read()
    found = {(r.key, r.version) for r in records}
    assert not differences(found, records, 4)
    return found


def verdict(publisher: Publisher, status: int = 0) -> dict[str, Any]:
    """The result of `verify`."""
    done = publisher.command("verify", "--json")
    assert done.returncode == status, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)["result"]
    return result


def trace(publisher: Publisher, key: str, status: int = 0) -> list[str]:
    """What `trace` says of each version."""
    return [v["verdict"] for v in publisher.answer(status, "trace", key)["versions"]]


def prooph_rows(rows: list[tuple[str, str, int]]) -> list[str]:
    return [
        json.dumps({"_aggregate_type": kind, "_aggregate_id": name, "_aggregate_version": version})
        for kind, name, version in rows
    ]


@both
def test_d8_two_columns_say_whose_event_it_is(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """The invoice of an order has the order's id: two aggregates."""
    is_mysql = database.server.name.startswith("MySQL")
    database.execute(PROOPH.format(not_null=" NOT NULL" if is_mysql else ""))
    publisher = new_publisher(
        database,
        store={"table": "_7f1c0a5be2", "columns": OF_PROOPH},
        gaps={"backoff_base": "60s"},
        run={"shards": 2},
    )
    one, other = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
    rows = [("App.Order", one, v) for v in (1, 2, 3)] + [("App.Order", other, 1)]
    rows += [("App.Invoice", one, v) for v in (1, 3)] + [("50%|x", "a|b", 1)]
    with transaction(database) as cursor:
        cursor.executemany(
            "INSERT INTO `_7f1c0a5be2` (event_id, event_name, payload, metadata)"
            " VALUES (UUID(), 'x', '{}', %s)",
            [(row,) for row in prooph_rows(rows)],
        )
        cursor.connection.commit()
    publisher.start()
    eventually(lambda: len(publisher.topic.follow()) == 6)
    wanted = {(f"App.Order|{one}", v) for v in (1, 2, 3)} | {(f"App.Order|{other}", 1)}
    wanted |= {(f"App.Invoice|{one}", 1), ("50%25%7Cx|a%7Cb", 1)}
    assert published(publisher) == wanted
    [record] = [r for r in publisher.topic.read() if r.key.startswith("50")]
    assert record.headers["ce_subject"] == b"50%25%7Cx|a%7Cb"
    held = f"App.Invoice|{one}"
    [gap] = publisher.answer(1, "gaps", "list")["open"]
    assert (gap["aggregate_id"], gap["first_missing"]) == (held, 2)
    assert trace(publisher, f"App.Order|{one}") == ["published"] * 3
    assert trace(publisher, held, 1) == ["published", "missing", "held"]
    assert publisher.command("gaps", "skip", held, "--yes").returncode == 0
    publisher.until_published(held, [1, 3])
    assert publisher.stop() == 143
    assert verdict(publisher)["events"] == 7
    publisher.answer(0, "doctor")


@pytest.mark.parametrize("shape", ["text", "BINARY(16)", "INT"])
def test_d8_the_parts_may_be_text_uuids_and_numbers(
    database: FreshDatabase, new_publisher: NewPublisher, shape: str
) -> None:
    database.execute(PATCHLEVEL_AGGREGATE)
    names: list[Any] = [str(uuid.uuid4()) for _ in range(20)]
    stored = names
    if shape == "BINARY(16)":
        stored = [uuid.UUID(name).bytes for name in names]
    elif shape == "INT":
        stored = [*range(-5, 15)]
        names = [str(number) for number in stored]
    if shape != "text":
        database.execute(f"ALTER TABLE event_store MODIFY aggregate_id {shape} NOT NULL")
    columns = OF_PATCHLEVEL_AGGREGATE
    publisher = new_publisher(database, store={"table": "event_store", "columns": columns})
    with transaction(database) as cursor:
        cursor.executemany(
            "INSERT INTO event_store (aggregate, aggregate_id, playhead, event, payload,"
            " custom_headers) VALUES (%s, %s, %s, 'x', '{}', '{}')",
            [(kind, name, v) for kind in ("hotel", "review") for name in stored for v in (1, 2)],
        )
        cursor.connection.commit()
    publisher.publish_everything()
    wanted = {(f"{k}|{n}", v) for k in ("hotel", "review") for n in names for v in (1, 2)}
    assert published(publisher) == wanted
    assert verdict(publisher)["events"] == 80
    assert trace(publisher, f"hotel|{names[3]}") == ["published"] * 2
    again = f"{publisher.topic.name}.again"
    span = ("--from", "2020-01-01T00:00:00Z", "--to", "2035-01-01T00:00:00Z", "--topic", again)
    assert publisher.answer(0, "replay", *span)["events"] == 80


@pytest.mark.parametrize(
    ("database", "table"),
    [("mysql", "stored_events"), ("mariadb", "event_store")],
    indirect=["database"],
)
def test_d8_rows_of_no_aggregate_are_counted_and_passed_over(
    database: FreshDatabase, new_publisher: NewPublisher, table: str
) -> None:
    is_spatie = table == "stored_events"
    database.execute(SPATIE if is_spatie else PATCHLEVEL_STREAM)
    columns: dict[str, Any] = OF_SPATIE if is_spatie else OF_PATCHLEVEL_STREAM
    store = {"table": table, "columns": columns}
    publisher = new_publisher(database, store=store, run={"shards": 2})
    names = [columns[n] for n in ("aggregate_id", "version", "event_type", "payload", "metadata")]

    def insert(rows: list[tuple[str | None, int | None]]) -> None:
        with transaction(database) as cursor:
            cursor.executemany(
                f"INSERT INTO {table} ({', '.join(names)}) VALUES (%s, %s, 'x', '{{}}', '{{}}')",  # noqa: S608
                rows,
            )
            cursor.connection.commit()

    nameless = (None if is_spatie else "imports", None)
    insert([("a", 1), nameless, ("a", 2), ("b", 1), nameless])
    publisher.start("--available-now")
    assert publisher.finish() == 3
    assert 'store.without_identity = \\"skip\\"' in publisher.words()

    publisher.settings["store"]["without_identity"] = "skip"
    publisher.start()
    publisher.until_published("a", [1, 2])
    insert([nameless, ("a", 3)])
    publisher.until_published("a", [1, 2, 3])
    eventually(lambda: status(publisher)["counters"]["without_identity"] == 3)
    # what the recount finds: no difference, though it counts rows
    assert publisher.stop() == 143
    assert status(publisher)["counters"]["comparisons"] == 0
    publisher.publish_everything()
    found = verdict(publisher)
    assert (found["events"], found["accounted"]["without_identity"]) == (4, 3)
    said = publisher.command("doctor", "--json").stdout
    assert "3 rows of the newest 100,000 without" in said
    assert "3 rows without identity" in publisher.words() or "are skipped" in publisher.words()


@pytest.mark.engines("threads", "here")
@both
def test_d8_names_that_are_not_ascii_and_metadata_that_are_no_json(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Akka's metadata are bytes of its own format; the columns are found in any case."""
    database.execute(
        "CREATE TABLE `事件-表` (`编号` BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,"
        " `聚合` VARCHAR(60) NOT NULL, `Typ-É` VARCHAR(60) NOT NULL, `版本` INT NOT NULL,"
        " `类型` VARCHAR(100) NOT NULL, `内容` JSON NOT NULL, meta BLOB NULL,"
        " `时间` TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),"
        " UNIQUE KEY (`聚合`, `版本`, `Typ-É`), KEY (`时间`))"
        " DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin"
    )
    columns = {"id": "编号", "aggregate_id": ["Typ-é", "聚合"], "version": "版本"}
    columns |= {"event_type": "类型", "payload": "内容", "metadata": "META", "create_time": "时间"}
    publisher = new_publisher(database, store={"table": "事件-表", "columns": columns})
    with transaction(database) as cursor:
        cursor.executemany(
            "INSERT INTO `事件-表` (`Typ-É`, `聚合`, `版本`, `类型`, `内容`, meta)"
            " VALUES (%s, %s, %s, '已下单', '{}', %s)",
            [
                ("订单", "1-a", 1, b"\x08\xff\x9a\x00"),
                ("订单", "1-a", 2, b"[]"),
                ("发票", "1-a", 1, b'{"user": "u"}'),
            ],
        )
        cursor.connection.commit()
    publisher.publish_everything()
    assert published(publisher) == {("订单|1-a", 1), ("订单|1-a", 2), ("发票|1-a", 1)}
    of = {(r.key, r.version): r.headers for r in publisher.topic.read()}
    assert of["订单|1-a", 1]["metadata"] == b"\x08\xff\x9a\x00"
    assert of["订单|1-a", 2]["metadata"] == b"[]"
    assert of["发票|1-a", 1]["user"] == b"u"
    assert verdict(publisher)["events"] == 3
    assert trace(publisher, "订单|1-a") == ["published"] * 2
    assert publisher.command("doctor").returncode == 0


def status(publisher: Publisher) -> dict[str, Any]:
    """The document of `eventpub status`."""
    done = publisher.command("status", "--json")
    document: dict[str, Any] = json.loads(done.stdout)["result"]["status"]
    return document
