"""What the errors of PyMySQL and SQLAlchemy mean to us: one place that maps them to `StoreError`.

A retriable error is one that waiting may fix: a server that is away, restarts, or is overloaded.
Nothing here repeats a statement or a password.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import pymysql.err

from eventpub.errors import StoreError

_UNREACHABLE = {1129, 2002, 2003, 2005, 3032}  # 3032: offline mode, as while a role changes
_OF_PROXIES = range(9000, 10_000)
"""Numbers that no server has: ProxySQL, RDS Proxy and others say with them that none is behind."""
_FULL = {1040, 1203, 1226}
_REFUSED = {1045, 1130, 1698, 1820, 1862, 2061, 3118, 3955, 4151}
_NO_SUCH_LOGIN = {1251, 2059}
_NO_TLS = {2026, 3159}  # CR_SSL_CONNECTION_ERROR, ER_SECURE_TRANSPORT_REQUIRED
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


def store_error(error: BaseException, where: str | None = None) -> StoreError:  # noqa: PLR0911, PLR0912 (one case an error of the server)
    """The `StoreError` of a library's error: code, retriable or not, how to fix it."""
    original = getattr(error, "orig", None)
    if isinstance(original, BaseException):
        error = original
    number = error_number(error)
    text = str(error) or type(error).__name__
    if len(error.args) > 1 and not isinstance(error, OSError):
        text = str(error.args[1])

    def say(
        code: str, message: str, *, suggestion: str | None = None, retriable: bool = False
    ) -> StoreError:
        return StoreError(code, message, where=where, suggestion=suggestion, retriable=retriable)

    if number in _NO_TLS or _is_about_tls(error, text):
        return say(
            "store.tls_failed",
            f"no secure connection to the database: {text}",
            suggestion=_tls_fix(number, text),
        )
    if number in _NO_SUCH_LOGIN or isinstance(error, RuntimeError):
        return say(
            "store.auth_unsupported",
            f"the client does not support the account's authentication: {text}",
            suggestion=(
                "pip install pynacl"
                if "pynacl" in text
                else "ALTER USER … IDENTIFIED WITH caching_sha2_password BY …; on MariaDB "
                "IDENTIFIED VIA mysql_native_password, or ed25519 with: pip install pynacl"
            ),
        )
    if number in _REFUSED:
        return say(
            "store.auth_failed",
            f"the database refused the login: {text}",
            suggestion="check the user in store.url, from which hosts it may connect, and "
            "EVENTPUB_STORE__PASSWORD or store.password_file; an account that REQUIREs a "
            "certificate needs ssl_cert and ssl_key in store.url",
        )
    if number in _FULL:
        return say(
            "store.too_many_connections",
            f"the database takes no more connections: {text}",
            suggestion="raise max_connections or the account's limit, or close some of what "
            "others hold; a publisher uses some three connections and two for each shard",
            retriable=True,
        )
    if number in _LOST and "timed out" in text:
        return say("store.timeout", f"the database did not answer in time: {text}", retriable=True)
    if number in _UNREACHABLE or number in _OF_PROXIES:
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
            suggestion="if each connection ends like this, the server's log says why, for example "
            "because it does not accept the certificate of ssl_cert",
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
            f"the account lacks a privilege: {text}",
            suggestion=_grant(text) or "the publisher's account needs SELECT on the event table",
        )
    return say(
        "store.query_failed",
        f"the database refused a statement: {text}",
        retriable=number in _INTERRUPTED,
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
    return (
        f"GRANT {command[1] if command else 'SELECT'} ON {what} TO '{user[1]}'@'…'; the publisher's"
        " account needs no more than SELECT on the event table"
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
