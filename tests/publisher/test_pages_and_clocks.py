"""Scenarios B: pages, ties and clocks; every case is published by `run --available-now`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from eventpub.local.servers import Database
from tests.conftest import FreshDatabase, fresh_database
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import compare, create_table, insert, transaction
from tests.servers.databases import mysql

PAGE = 100


@pytest.mark.parametrize("kind", ["INTERFACE.md's table", "eventpub migrate"])
def test_b1_b2_ties_at_and_beyond_the_end_of_a_page(
    database: FreshDatabase, new_publisher: NewPublisher, kind: str
) -> None:
    """One page of rows with one `create_time`, one more, ten pages; within and across aggregates.

    Also with columns' precision below microseconds this is what every second looks like.
    """
    publisher = new_publisher(database, read={"page_rows": PAGE}, run={"shards": 3})
    if kind == "eventpub migrate":
        assert publisher.command("migrate").returncode == 0
    else:
        create_table(database)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for number, rows in enumerate((PAGE, PAGE + 1, 10 * PAGE, 1, PAGE - 1, 1)):
        at = (start + timedelta(seconds=number)).strftime("%Y-%m-%d %H:%M:%S.%f")
        with transaction(database) as cursor:
            cursor.execute("SET time_zone = '+00:00'")
            for version in range(1, rows // 2 + 1):
                insert(cursor, f"one-{number}", version, create_time=at)
            for other in range(rows - rows // 2):
                insert(cursor, f"many-{number}-{other}", 1, create_time=at)
            cursor.connection.commit()
    publisher.publish_everything()
    differences = compare(database, publisher.topic)
    assert not differences, differences


@pytest.mark.parametrize("column", ["TIMESTAMP(3)", "DATETIME"])
def test_b4_columns_of_second_and_millisecond_precision(
    database: FreshDatabase, new_publisher: NewPublisher, column: str
) -> None:
    create_table(database, time=column)
    publisher = new_publisher(database, read={"page_rows": 10})
    for version in range(1, 51):
        with transaction(database) as cursor:
            insert(cursor, "a", version)
            insert(cursor, f"b-{version}", 1)
            cursor.connection.commit()
    publisher.publish_everything()
    differences = compare(database, publisher.topic)
    assert not differences, differences


@pytest.fixture(scope="module")
def plus_five_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A server whose clock says something else than UTC."""
    with mysql(tmp_path_factory.mktemp("plus-five"), time_zone="+05:30") as server:
        yield server


@pytest.fixture
def plus_five(plus_five_server: Database) -> Iterator[FreshDatabase]:
    """A fresh database there."""
    with fresh_database(plus_five_server) as database:
        yield database


@pytest.mark.parametrize("column", ["TIMESTAMP(6)", "DATETIME(6)"])
def test_b5_a_server_whose_time_zone_is_not_utc(
    plus_five: FreshDatabase, new_publisher: NewPublisher, column: str
) -> None:
    create_table(plus_five, time=column)
    publisher = new_publisher(plus_five)
    with transaction(plus_five) as cursor:
        for version in range(1, 11):
            insert(cursor, "a", version)
        cursor.connection.commit()
    before = datetime.now(UTC)
    publisher.publish_everything()
    differences = compare(plus_five, publisher.topic)
    assert not differences, differences
    created = datetime.fromtimestamp(publisher.topic.read()[0].timestamp / 1000, UTC)
    assert abs(before - created) < timedelta(minutes=2)
