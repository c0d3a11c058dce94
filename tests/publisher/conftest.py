"""A publisher for a test, stopped and checked for what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventpub.local import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, create_table

FAST: dict[str, dict[str, Any]] = {
    "read": {"delay": "300ms"},
    "gaps": {"backoff_base": "100ms", "max_backoff": 5},
}
"""Times shortened, so that a hold ends within 3.1 s."""

NewPublisher = Callable[..., Publisher]


@pytest.fixture
def new_publisher(tmp_path: Path, kafka_server: Kafka, topic_name: str) -> Iterator[NewPublisher]:
    """Makes publishers of one topic; whatever runs at the end is killed."""
    made: list[Publisher] = []

    def make(database: FreshDatabase, **settings: dict[str, Any]) -> Publisher:
        merged = {k: dict(v) for k, v in FAST.items()}
        for section, keys in settings.items():
            merged.setdefault(section, {}).update(keys)
        publisher = Publisher(
            tmp_path / f"publisher-{len(made)}",
            database.url,
            topic_name,
            kafka_server.bootstrap_servers,
            merged,
        )
        made.append(publisher)
        return publisher

    yield make
    for publisher in made:
        publisher.topic.close()
        if publisher.process is not None:
            family = publisher.family()
            publisher.kill()
            _, left = psutil.wait_procs(family, timeout=10)
            assert not left


@pytest.fixture
def publisher(database: FreshDatabase, new_publisher: NewPublisher) -> Publisher:
    """One publisher of an empty event table; not started."""
    create_table(database)
    return new_publisher(database)
