"""What the server's refusals become: an error with the statement that fixes it."""

from __future__ import annotations

import pymysql.err
import pytest

from eventpub.store.failures import store_error


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
        (1227, "Access denied; you need (at least one of) the FILE privilege(s)", "SELECT on the"),
    ],
)
def test_a_missing_privilege_names_the_grant(number: int, said: str, statement: str) -> None:
    error = store_error(pymysql.err.OperationalError(number, said))
    assert error.code == "store.privilege_missing"
    assert statement in str(error.suggestion)
