"""MySQL and MariaDB are a `Source`, whatever kind of time the table has."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from eventpub.sources.mysql import EventStore
from tests.conftest import FreshDatabase
from tests.sources.contract import Case, SourceContract
from tests.store.tables import create, insert, open_store

TIMES = {
    "TIMESTAMP": "TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
    "DATETIME": "DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
}


class DatabaseCase:
    """A table of a server."""

    def __init__(self, database: FreshDatabase, source: EventStore) -> None:
        self._database = database
        self.source = source

    def commit(self, *rows: tuple[str, int, int]) -> None:
        """By a session in UTC, as the server is configured to be."""
        epoch = datetime(1970, 1, 1)
        texts = [(a, v, str(epoch + timedelta(microseconds=t))) for a, v, t in rows]
        insert(self._database, texts)


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
@pytest.mark.parametrize("kind", TIMES)
class TestMySQLSource(SourceContract):
    """On real servers."""

    @pytest.fixture
    def case(self, database: FreshDatabase, kind: str) -> Iterator[Case]:
        """As the contract wants it."""
        config: Any = create(database, create_time=TIMES[kind])
        config = config.model_copy(update={"time_zone": "UTC"})
        with open_store(config) as source:
            yield DatabaseCase(database, source)
