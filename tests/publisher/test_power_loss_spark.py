"""Scenario F8 with the engine spark: what a power failure may leave of a checkpoint, of journals,
snapshots and indexes of a query. The topic has all that is needed to begin anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, compare, create_table, insert, transaction

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.environ.get("EVENTPUB_TEST_ENGINE") != "spark",
        reason="starts Spark for each file, for half an hour; with EVENTPUB_TEST_ENGINE=spark",
    ),
]

AGGREGATES = 4


def commit(database: FreshDatabase, version: int) -> None:
    with transaction(database) as cursor:
        for number in range(AGGREGATES):
            insert(cursor, f"a-{number}", version)
        cursor.connection.commit()


def kinds(state: Path) -> dict[str, Path]:
    """The newest file of each kind, by its path without numbers and names."""
    found = {}
    for file in sorted(state.rglob("*"), key=lambda file: file.stat().st_mtime):
        place = file.relative_to(state)
        is_kept = place.parts[0] in {"shared", "query"} and not file.name.startswith(("LOG", "."))
        if is_kept and file.is_file() and file.stat().st_size:
            found[re.sub(r"[0-9a-f]{16}|\d+", "N", str(place))] = file
    return found


def test_f8_each_file_that_a_query_keeps_is_cut(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    """One after the other, each of what the publisher before has left."""
    create_table(database)
    publisher = new_publisher(database, run={"shards": 2}, spark={"master": "local[2]"})
    version = 0
    tried: set[tuple[str, int]] = set()
    case = "none"
    while True:
        publisher.start()
        for _ in range(3):
            version += 1
            commit(database, version)
            wait(publisher, version, case)
        publisher.kill()
        differences = compare(database, publisher.topic)
        assert not differences, (case, differences)
        cases = [(kind, part) for kind in kinds(publisher.state) for part in _parts(kind)]
        left = [each for each in cases if each not in tried]
        if not left:
            break
        tried.add(left[0])
        kind, part = left[0]
        file = kinds(publisher.state)[kind]
        os.truncate(file, file.stat().st_size // 2 * part)
        case = f"{kind} {'cut to half' if part else 'emptied'}"
    assert len(tried) > 10
    assert any("checkpoint/N/offsets" in kind for kind, _ in tried)


def _parts(kind: str) -> list[int]:
    """Of an index, which a snapshot replaces, one of the two is enough."""
    return [len(kind) % 2] if kind.startswith("query") else [0, 1]


def wait(publisher: Publisher, version: int, case: str) -> None:
    for number in range(AGGREGATES):
        try:
            publisher.until_published(f"a-{number}", [*range(1, version + 1)])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
