"""What the server's refusals become: an error with the statement that fixes it."""

from __future__ import annotations

import pymysql.err
import pytest

from eventpub.sources.mysql.connection import store_error


@pytest.mark.parametrize(
    ("number", "said", "statement"),
    [
        (
            1142,
            "SELECT command denied to user 'reader'@'10.0.0.7' for table 'events'",
            "GRANT SELECT ON `events` TO 'reader'@'…'",
        ),
        (
            1142,
            "CREATE command denied to user 'reader'@'10.0.0.7' for table `shop`.`events`",
            "GRANT CREATE ON `shop`.`events` TO 'reader'@'…'",
        ),
        (
            1044,
            "Access denied for user 'reader'@'%' to database 'shop'",
            "GRANT SELECT ON `shop`.* TO 'reader'@'…'",
        ),
        (
            1142,
            "SELECT command denied to user 'reader'@'10.0.0.7' for table `shop`.`domain_event`",
            "or, as the server does not say whether it exists: check store.table",
        ),
        (1227, "Access denied; you need (at least one of) the FILE privilege(s)", "SELECT on the"),
    ],
)
def test_a_missing_privilege_names_the_grant(number: int, said: str, statement: str) -> None:
    error = store_error(pymysql.err.OperationalError(number, said))
    assert error.code == "store.privilege_missing"
    assert statement in str(error.suggestion)


def test_a_login_without_a_password_is_told_that_none_is_set() -> None:
    """The remedy was about a wrong one."""
    said = "Access denied for user 'reader'@'10.0.0.7' (using password: "
    fixes = [
        str(store_error(pymysql.err.OperationalError(1045, f"{said}{is_set})")).suggestion)
        for is_set in ("NO", "YES")
    ]
    assert fixes[0].startswith(
        "no password is set: set EVENTPUB_STORE__PASSWORD, store.password or"
    )
    assert "no password is set" not in fixes[1]


@pytest.mark.parametrize(
    ("number", "said", "is_retriable"),
    [
        (1030, "Got error 28 - 'No space left on device' from storage engine", True),
        (3, "Error writing file '/tmp/MY3' (OS errno 28 - No space left on device)", True),
        (1114, "The table '/tmp/#sql1_2' is full", True),
        (1038, "Out of sort memory, consider increasing server sort buffer size", True),
        (1105, "target: shop.0.primary: vttablet: rpc error: code = Unavailable", True),
        (1105, "Unknown error", False),
        (1030, "Got error 176 - 'Read page with wrong checksum' from storage engine InnoDB", False),
        (1064, "You have an error in your SQL syntax", False),
    ],
)
def test_a_server_short_of_something_is_waited_for(
    number: int, said: str, is_retriable: bool
) -> None:
    """A full tmpdir for some minutes ended the publisher after one."""
    made = pymysql.err.InternalError if number < 1000 else pymysql.err.OperationalError
    error = store_error(made(number, said))
    assert error.code == "store.query_failed"
    assert error.retriable == is_retriable
