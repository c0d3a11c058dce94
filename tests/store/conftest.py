"""Servers of their own for tests of time zones and of servers that go away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eventpub.local.servers import Database
from tests.servers.databases import mariadb, mysql


@pytest.fixture(scope="session", params=["mysql", "mariadb"])
def berlin_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """A server whose system runs on Berlin's time; who pauses it resumes it."""
    start = mysql if request.param == "mysql" else mariadb
    with start(tmp_path_factory.mktemp("berlin"), time_zone="Europe/Berlin") as server:
        yield server
