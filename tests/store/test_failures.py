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
