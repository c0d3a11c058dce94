"""What the errors of PyMySQL and SQLAlchemy mean to us, by `failures.toml`: as `StoreError`.

Nothing here repeats a statement or a password.
"""

from __future__ import annotations

import re
import ssl
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import pymysql.err

from eventpub.errors import StoreError

UNKNOWN_HOST = "'…' (replace … with the account's host, as mysql.user has it)"
_FILE = files(__package__).joinpath("failures.toml")
_MEANINGS: list[dict[str, Any]] = tomllib.loads(_FILE.read_text("utf-8"))["meaning"]


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
    error = getattr(error, "orig", None) or error  # SQLAlchemy's around PyMySQL's
    number = error.args[0] if error.args else None
    return number if isinstance(number, int) else None


def store_error(error: BaseException, where: str | None = None) -> StoreError:
    """The `StoreError` of a library's error: code, retriable or not, how to fix it."""
    error = getattr(error, "orig", None) or error  # SQLAlchemy's around PyMySQL's
    text = str(error) or type(error).__name__
    if len(error.args) > 1 and not isinstance(error, OSError):
        text = str(error.args[1])
    known = f"{type(error).__name__} {error_number(error)} {text}"
    meaning = next(entry for entry in _MEANINGS if _means(entry, error, known))
    fixes = (fix for pattern, fix in meaning.get("fixes", ()) if _found(pattern, known))
    suggestion = next(fixes, meaning["suggestion"])
    if meaning["code"] == "store.privilege_missing":
        suggestion = _grant(text) or suggestion
    return StoreError(
        meaning["code"],
        meaning["message"].replace("…", text),
        where=where,
        suggestion=suggestion,
        retriable=meaning.get("retriable", False),
    )


def _means(entry: dict[str, Any], error: BaseException, known: str) -> bool:
    if error_number(error) in entry.get("numbers", ()):
        return True
    if entry["code"] == "store.tls_failed":
        return _is_about_tls(error, known)
    return "pattern" in entry and _found(entry["pattern"], known)


def _found(pattern: str, known: str) -> bool:
    return re.search(pattern, known, re.IGNORECASE | re.DOTALL) is not None


def _grant(text: str) -> str | None:
    """The statement that grants what a server's refusal says is missing, where it says enough."""
    user = re.search(r"user '([^']*)'", text)
    command = re.search(r"\b([A-Z][A-Z, ]*) command denied", text)
    table = re.search(r"table ((?:['`][^'`]+['`]\.)?['`][^'`]+['`])", text)
    database = re.search(r"database '([^']+)'", text)
    if user is None or (table is None and database is None):
        return None
    what = table[1].replace("'", "`") if table else f"`{database[1]}`.*" if database else ""
    also = "; or, as the server does not say whether it exists: check store.table" * bool(table)
    return (
        f"GRANT {command[1] if command else 'SELECT'} ON {what} TO '{user[1]}'@{UNKNOWN_HOST}"
        f"{also}; the publisher's account needs no more than SELECT on the event table"
    )


def _is_about_tls(error: BaseException, known: str) -> bool:
    """Whether TLS itself is refused, by either side; not that a connection broke off within it."""
    cause = getattr(error, "original_exception", None) or error.__context__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return True
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError | TimeoutError):
        return False
    if isinstance(cause, ssl.SSLError):
        # in TLS 1.3 what the server has against our certificate comes with its first answer
        lost = next(entry for entry in _MEANINGS if entry["code"] == "store.connection_lost")
        return error_number(error) not in lost["numbers"] or "ALERT" in known.upper()
    # PyMySQL wraps the network's errors, so a bare one of the system is about a certificate's file
    return isinstance(error, OSError)
