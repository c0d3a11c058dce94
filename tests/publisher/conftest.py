"""A publisher for a test, stopped and checked for what it leaves behind.

A test runs with the engine of EVENTPUB_TEST_ENGINE; without that with those that it is marked with,
``engines("threads", "spark")``, or else "threads". Marked with one engine, it is only for that one,
and says why. "here" is Spark's micro-batches without Spark; see `tests.spark.here`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.harness import ENGINE, Publisher, chosen_engine, create_table

FAST: dict[str, dict[str, Any]] = {
    "read": {"delay": "300ms"},
    "gaps": {"backoff_base": "100ms", "max_backoff": 5},
}
"""Times shortened, so that a hold ends within 3.1 s."""

NewPublisher = Callable[..., Publisher]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With which engines a test runs."""
    marker = metafunc.definition.get_closest_marker("engines")
    if marker is None:
        return
    names: Sequence[Any] = marker.args
    asked = os.environ.get(ENGINE)
    if asked is not None and names == (asked,):
        return
    if asked is not None and len(names) == 1:
        reason = f"only for the engine {names[0]}: {marker.kwargs.get('why', '')}"
        names = [pytest.param(names[0], marks=pytest.mark.skip(reason=reason))]
    elif asked is not None:
        names = [asked]
    metafunc.parametrize("engine", names, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of publishers whose settings name none."""
    before = os.environ.get(ENGINE)
    os.environ[ENGINE] = name = getattr(request, "param", chosen_engine())
    yield name
    if before is None:
        del os.environ[ENGINE]
    else:
        os.environ[ENGINE] = before


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
