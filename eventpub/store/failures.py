"""What the errors of PyMySQL and SQLAlchemy mean to us: one place that maps them to `StoreError`.

A retriable error is one that waiting may fix: a server that is away, restarts, or is overloaded.
Nothing here repeats a statement or a password.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pymysql.err

from eventpub.errors import StoreError

UNKNOWN_HOST = "'…' (replace … with the account's host, as mysql.user has it)"
_LOST = {1053, 1077, 1079, 1158, 1159, 1160, 1161, 1184, 1927, 2006, 2013, 2055, 3169, 4031}


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
    number = error_number(error)
    text = str(error) or type(error).__name__
    if len(error.args) > 1 and not isinstance(error, OSError):
        text = str(error.args[1])
    meaning = next((m for m in _MEANINGS if m.is_of(error, number, text)), _OTHER)
    return StoreError(
        meaning.code,
        meaning.message.replace("…", text),
        where=where,
        suggestion=meaning.fix(number, text) or meaning.suggestion,
        retriable=meaning.retriable,
    )


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


def _is_about_tls(error: BaseException, text: str) -> bool:
    """Whether TLS itself is refused, by either side; not that a connection broke off within it."""
    cause = getattr(error, "original_exception", None) or error.__context__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return True
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError | TimeoutError):
        return False
    if isinstance(cause, ssl.SSLError):
        # in TLS 1.3 what the server has against our certificate comes with its first answer
        return error_number(error) not in _LOST or "ALERT" in text.upper()
    # PyMySQL wraps the network's errors, so a bare one of the system is about a certificate's file
    return isinstance(error, OSError)


def _tls_fix(number: int | None, text: str) -> str:  # noqa: PLR0911 (one case an error of the server)
    lower = text.lower()
    if number == 3159:
        return "remove ssl_disabled from store.url: the server takes only secure connections"
    if number == 2026:
        return "switch TLS on in the server, or remove ssl_ca and the like from store.url"
    if "expired" in lower or "not yet valid" in lower:
        return "renew the server's certificate (or check this machine's clock)"
    if "hostname mismatch" in lower or "ip address mismatch" in lower:
        return (
            "name the server in store.url by a host name that stands in its certificate, or set "
            "ssl_verify_identity=false to check its authority only"
        )
    if "certificate verify failed" in lower:
        return "ssl_ca must name the file of the authority that has signed the server's certificate"
    if "alert" in lower:
        return (
            "ssl_cert and ssl_key in store.url must be a certificate that the server's authority "
            "has signed, and its key"
        )
    return "check the files of ssl_ca, ssl_cert and ssl_key in store.url, and the server's TLS"


_NO_PASSWORD = (
    "no password is set: set EVENTPUB_STORE__PASSWORD, store.password or store.password_file; for"
    " an account without one check in store.url the user and, if needed, ssl_cert and ssl_key"
)
_BUSY = "SHOW FULL PROCESSLIST on the server says what it does and what waits for locks"


@dataclass(frozen=True)
class _Meaning:
    """What an error is called, and which errors are called so.

    Args:
        code: of the `StoreError`.
        message: in it ``…`` stands for what the server or the library has said.
        numbers: of the errors that mean it.
        also: given error and text: whether it is one whatever its number.
        suggestion: the fix.
        fix: given number and text: a fix that says more, where there is one.
        retriable: whether waiting may fix it.
    """

    code: str
    message: str
    numbers: Collection[int] = ()
    also: Callable[[BaseException, str], bool] = lambda _error, _text: False
    suggestion: str | None = None
    fix: Callable[[int | None, str], str | None] = lambda _number, _text: None
    retriable: bool = False

    def is_of(self, error: BaseException, number: int | None, text: str) -> bool:
        """Whether an error means this."""
        return number in self.numbers or self.also(error, text)


_MEANINGS = (
    _Meaning(
        "store.tls_failed",
        "no secure connection to the database: …",
        {2026, 3159},  # CR_SSL_CONNECTION_ERROR, ER_SECURE_TRANSPORT_REQUIRED
        also=_is_about_tls,
        fix=_tls_fix,
    ),
    _Meaning(
        "store.auth_unsupported",
        "the client does not support the account's authentication: …",
        {1251, 2059},
        also=lambda error, _: isinstance(error, RuntimeError),
        suggestion="ALTER USER … IDENTIFIED WITH caching_sha2_password BY …; on MariaDB "
        "IDENTIFIED VIA mysql_native_password, or ed25519 with: pip install pynacl",
        fix=lambda _, text: "pip install pynacl" if "pynacl" in text else None,
    ),
    _Meaning(
        "store.auth_failed",
        "the database refused the login: …",
        {1045, 1130, 1698, 1820, 1862, 2061, 3118, 3955, 4151},
        suggestion="check the user in store.url, from which hosts it may connect, and the password:"
        " write a new one into the file of store.password_file, which is read for each connection;"
        " one in EVENTPUB_STORE__PASSWORD, store.password or store.url needs a restart. An account"
        " that REQUIREs a certificate needs ssl_cert and ssl_key in store.url",
        fix=lambda _, text: _NO_PASSWORD if "using password: NO" in text else None,
    ),
    _Meaning(
        "store.too_many_connections",
        "the database takes no more connections: …",
        {1040, 1203, 1226},
        suggestion="raise max_connections or the account's limit, or close other "
        "connections; a publisher uses about three, plus two for each shard",
        retriable=True,
    ),
    _Meaning(
        "store.timeout",
        "the database did not answer in time: …",
        also=lambda error, text: error_number(error) in _LOST and "timed out" in text,
        suggestion=_BUSY,
        retriable=True,
    ),
    _Meaning(
        "store.unreachable",
        "the database cannot be reached: …",
        # 3032: offline mode, as while a role changes. From 9000 on are numbers that no server has:
        # ProxySQL, RDS Proxy and others say with them that none is behind.
        {1129, 2002, 2003, 2005, 3032, *range(9000, 10_000)},
        suggestion="check host and port in store.url, and that the server runs",
        retriable=True,
    ),
    _Meaning(
        "store.timeout",
        "the database gave up waiting: …",
        {1205, 1969, 3024},
        suggestion=_BUSY,
        retriable=True,
    ),
    _Meaning(
        "store.connection_lost",
        "the connection to the database was lost: …",
        _LOST,
        also=lambda error, _: isinstance(
            error, pymysql.err.InterfaceError | pymysql.err.InternalError
        ),
        suggestion="check that the server runs; if each connection ends like this, its log says "
        "why",
        retriable=True,
    ),
    _Meaning(
        "store.database_missing",
        "there is no such database: …",
        {1049},
        suggestion="name the database of the event table at the end of store.url",
    ),
    _Meaning(
        "store.table_missing",
        "there is no such table: …",
        {1059, 1103, 1146},
        suggestion="set store.table, or create it with: eventpub migrate",
    ),
    _Meaning(
        "store.column_missing",
        "the event table lacks a column: …",
        {1054},
        suggestion="map the names in [store.columns]",
    ),
    _Meaning(
        "store.index_missing",
        "an index has gone: …",
        {1176},
        suggestion="start again; if that fails, `eventpub doctor` names the statement",
    ),
    _Meaning(
        "store.privilege_missing",
        "the account lacks a privilege: …",
        {1044, 1142, 1143, 1227, 1290, 1370},
        suggestion="the publisher's account needs SELECT on the event table",
        fix=lambda _, text: _grant(text),
    ),
    _Meaning(
        "store.query_failed",
        "the database refused a statement: …",
        {1213, 1317, 1412, 1615},  # which was interrupted
        suggestion="nothing to do: the statement is tried again",
        retriable=True,
    ),
)
"""The first that an error means counts."""

_OTHER = _Meaning(
    "store.query_failed",
    "the database refused a statement: …",
    suggestion="`eventpub doctor` tries all statements; the server's log may say more",
)
