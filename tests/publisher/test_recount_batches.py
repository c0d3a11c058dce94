"""What a recount finds at once may be more than one micro-batch can take."""

from __future__ import annotations

from typing import Any

import pytest

from eventpub.spark.journal import Journals
from eventpub.spark.place import Place
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import compare, create_table, eventually, insert, transaction

pytestmark = [
    pytest.mark.engines("here", why="threads publish it in transactions of their own"),
    pytest.mark.long,
]

ROWS, PAYLOAD = 4_000, 32_000
MOST = (64 + 13) << 20
"""Bytes of the largest batch, and of what is fetched at once."""


def test_very_many_late_rows_of_a_second_are_divided(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """They were one batch, which cannot be made smaller any more once it is decided."""
    create_table(database)
    publisher = new_publisher(database, run={"shards": 1})
    publisher.start()
    with transaction(database) as cursor:
        for version in range(1, 11):
            insert(cursor, "a", version)
            cursor.connection.commit()
    publisher.until_published("a", [*range(1, 11)])
    with transaction(database) as cursor:
        cursor.execute("SET SESSION cte_max_recursion_depth = 1000000")
        cursor.execute("SET @late = CURRENT_TIMESTAMP(6) - INTERVAL 20 SECOND")
        cursor.execute(
            "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"  # noqa: S608
            f" WITH RECURSIVE n AS (SELECT 1 i UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})"
            f" SELECT CONCAT('b-', i), 1, 't', REPEAT('x', {PAYLOAD}), @late FROM n"
        )
        cursor.connection.commit()
    publisher.until_published(f"b-{ROWS}", [1])
    eventually(lambda: not compare(database, publisher.topic))
    state = StateDir(publisher.state)
    query: Any = state.read(state.query_file)
    journals = Journals(Place(query["location"]), query["query"])
    heads = [journals.head(batch, 0) for batch in range(1, journals.newest() + 1)]
    sizes = [head["rows"] * PAYLOAD for head in heads if head is not None]
    assert sum(sizes) >= ROWS * PAYLOAD
    assert max(sizes) <= MOST
