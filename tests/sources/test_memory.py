"""The twin in memory is a `Source`."""

from __future__ import annotations

import pytest

from tests.sources.contract import Case, SourceContract, T, window
from tests.twins.source import MemorySource, Row, Table

DAY = 86_400_000_000


class MemoryCase:
    """A table whose clock is a day after its rows."""

    def __init__(self) -> None:
        self.table = Table(T + DAY)
        self.source = MemorySource(self.table)

    def commit(self, *rows: tuple[str, int, int]) -> None:
        """At once."""
        self.table.rows += [Row(*row) for row in rows]


class TestMemorySource(SourceContract):
    """On the twin."""

    @pytest.fixture
    def case(self) -> Case:
        """As the contract wants it."""
        return MemoryCase()


def test_a_row_is_seen_from_its_commit_on_with_the_time_of_its_statement() -> None:
    table = Table(T + 5, [Row("a", 1, T + 1, commit_time=T + 9)])
    source = MemorySource(table)
    assert window(source, T, T + 5) == []
    table.now = T + 9
    assert window(source, T, T + 5) == [("a", 1)]
