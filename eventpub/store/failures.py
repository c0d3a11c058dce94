"""What the errors of PyMySQL and SQLAlchemy mean to us: one place that maps them to `StoreError`.

A retriable error is one that waiting may mend: a server that is away, restarts, or is overloaded.
Nothing here repeats a statement or a password.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pymysql.err

from eventpub.errors import StoreError

_UNREACHABLE = {1040, 1129, 1130, 1203, 1226, 2002, 2003, 2005}
_REFUSED = {1045, 1251, 1698, 1820, 1862, 2059, 2061, 3118, 3955, 4151}
_LOST = {1053, 1077, 1079, 1158, 1159, 1160, 1161, 1184, 1927, 2006, 2013, 2055, 3169, 4031}
_TIMEOUT = {1205, 1969, 3024}
_INTERRUPTED = {1213, 1317, 1412, 1615}
_PRIVILEGE = {1044, 1142, 1143, 1227, 1290, 1370}


@contextmanager
def mapped(where: str | None = None) -> Iterator[None]:
    """Raises the libraries' errors of its body as `StoreError`, and leaves all others alone."""
    try:
        yield
    except (pymysql.err.MySQLError, OSError, RuntimeError) as error:
        raise store_error(error, where) from error
    except Exception as error:
        if isinstance(getattr(error, "orig", None), Exception):  # SQLAlchemy's around PyMySQL's
            raise store_error(error, where) from error
        raise


def error_number(error: BaseException) -> int | None:
    """The server's (or the client library's) number of an error, as the manual lists it."""
    original = getattr(error, "orig", None)
    if isinstance(original, BaseException):
        error = original
    number = error.args[0] if error.args else None
    return number if isinstance(number, int) else None


def store_error(error: BaseException, where: str | None = None) -> StoreError:
    """The `StoreError` of a library's error: code, retriable or not, what mends it."""
    original = getattr(error, "orig", None)
    if isinstance(original, BaseException):
        error = original
    number = error_number(error)
    text = str(error.args[1]) if len(error.args) > 1 else str(error) or type(error).__name__

    def say(
        code: str, message: str, *, suggestion: str | None = None, retriable: bool = False
    ) -> StoreError:
        return StoreError(code, message, where=where, suggestion=suggestion, retriable=retriable)

    # PyMySQL wraps the network's errors, so a bare one of the system is about a certificate's file
    if "certificate" in text.lower() or "SSL" in text or isinstance(error, OSError):
        return say(
            "store.tls_failed",
            f"no secure connection to the database: {text}",
            suggestion="check ssl_ca, ssl_cert, ssl_key and ssl_verify_cert in store.url",
        )
    if number in _REFUSED or isinstance(error, RuntimeError):
        return say(
            "store.auth_failed",
            f"the database refused the login: {text}",
            suggestion="check the user in store.url and EVENTPUB_STORE__PASSWORD or "
            "store.password_file",
        )
    if number in _LOST and "timed out" in text:
        return say("store.timeout", f"the database did not answer in time: {text}", retriable=True)
    if number in _UNREACHABLE:
        return say(
            "store.unreachable",
            f"the database cannot be reached: {text}",
            suggestion="check host and port in store.url, and that the server runs",
            retriable=True,
        )
    if number in _TIMEOUT:
        return say("store.timeout", f"the database gave up waiting: {text}", retriable=True)
    if number in _LOST or isinstance(error, pymysql.err.InterfaceError | pymysql.err.InternalError):
        return say(
            "store.connection_lost",
            f"the connection to the database was lost: {text}",
            retriable=True,
        )
    if number == 1049:
        return say(
            "store.database_missing",
            f"there is no such database: {text}",
            suggestion="name the database of the event table at the end of store.url",
        )
    if number in {1059, 1103, 1146}:
        return say(
            "store.table_missing",
            f"there is no such table: {text}",
            suggestion="set store.table, or create it with: eventpub migrate",
        )
    if number == 1054:
        return say(
            "store.column_missing",
            f"the event table lacks a column: {text}",
            suggestion="map the names in [store.columns]",
        )
    if number == 1176:
        return say(
            "store.index_missing",
            f"an index has gone: {text}",
            suggestion="start again; if that fails, `eventpub doctor` names the statement",
        )
    if number in _PRIVILEGE:
        return say(
            "store.privilege_missing",
            f"the account may not do this: {text}",
            suggestion="the publisher's account needs SELECT on the event table",
        )
    return say(
        "store.query_failed",
        f"the database refused a statement: {text}",
        retriable=number in _INTERRUPTED,
    )
