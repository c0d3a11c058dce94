"""Which of both servers it is, by what it says its version is: numbers of any kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eventpub.sources.mysql.connection import is_mariadb


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("8.4.9", False),
        ("9.7.4-2", False),
        ("26.7.0", False),
        ("26.10.1-commercial", False),
        ("10.11.19-MariaDB-0+deb12u1", True),
        ("11.8.9-MariaDB", True),
        ("5.5.5-12.3.2-MariaDB-log", True),
    ],
)
def test_calendar_versions_are_mysql_and_new_ones_of_mariadb_are_mariadb(
    version: str, expected: bool
) -> None:
    """Nothing else is decided by a version: what a server has is looked for by name."""
    connection: Any = SimpleNamespace(server_version=version)
    assert is_mariadb(connection) is expected
