"""Connections to the event store, with the session settings that this package expects.

A reading session is READ COMMITTED, read only, autocommit and in UTC, whatever the server's
defaults. Passwords appear in no message, representation or exception. `mapped` raises errors of
PyMySQL and SQLAlchemy as `StoreError`, by `failures.toml`.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
import pymysql.connections
from pymysql.charset import charset_by_name

from eventpub.config import Store
from eventpub.config_values import read_secret
from eventpub.errors import ConfigError, StoreError
from eventpub.masking import current

Connection = pymysql.connections.Connection

UNKNOWN_HOST = "'…' (replace … with the account's host, as mysql.user has it)"
_FILE = files(__package__).joinpath("failures.toml")
_MEANINGS: list[dict[str, Any]] = tomllib.loads(_FILE.read_text("utf-8"))["meaning"]
_TEXT_OPTIONS = {"unix_socket", "ssl_ca", "ssl_cert", "ssl_key", "ssl_key_password"}
_SWITCHES = {"ssl_disabled", "ssl_verify_cert", "ssl_verify_identity"}
_SECONDS = {"connect_timeout", "read_timeout", "write_timeout"}
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
READ_TIMEOUT = 30
"""Seconds without a byte from the server after which the connection counts as lost."""

_NO_LIMIT = 2**64 - 1

_KEEPALIVE = {
    "TCP_KEEPIDLE": 60,  # s; NATs and load balancers drop idle connections after 240 to 900 s
    "TCP_KEEPALIVE": 60,  # macOS' name of it
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,  # ms without an acknowledgement; even a slow server sends those
}


def connect_arguments(config: Store) -> dict[str, Any]:
    """The arguments for `pymysql.connect`, including the password."""
    arguments = _without_password(config)
    in_url = urlsplit(config.url.get_secret_value()).password
    password = None if in_url is None else unquote(in_url)
    if config.password is not None:
        password = current(config.password.get_secret_value())
    elif config.password_file is not None:
        password = read_secret(config.password_file, "store.password_file")
    if password is not None:
        # bytes: PyMySQL would encode text as latin1
        arguments["password"] = password.encode()
    return arguments


def _without_password(config: Store) -> dict[str, Any]:
    url = urlsplit(config.url.get_secret_value())
    timeout = max(1, round(config.connect_timeout / 1e6))
    arguments: dict[str, Any] = {
        "host": url.hostname,
        "port": url.port or 3306,
        "user": unquote(url.username or "root"),
        "database": unquote(url.path.strip("/")),
        "connect_timeout": timeout,
        "read_timeout": READ_TIMEOUT,
        "write_timeout": READ_TIMEOUT,
        "charset": "utf8mb4",
    }
    for key, value in parse_qsl(url.query, keep_blank_values=True):
        if key in _TEXT_OPTIONS:
            arguments[key] = value
        elif key in _SWITCHES:
            arguments[key] = _switch(key, value)
        elif key in _SECONDS:
            if not re.fullmatch(r"0*[1-9][0-9]{0,5}", value):
                raise _url_error(f"has {key}={value}, which is not a number of seconds")
            arguments[key] = int(value)
        elif key == "charset":  # always utf8mb4: ids are identified by their UTF-8 bytes
            if charset_by_name(value.lower()) is None:
                raise _url_error(f"has {key}={value}, which MySQL does not know; leave it out")
        else:
            known = ", ".join(sorted(_TEXT_OPTIONS | _SWITCHES | _SECONDS))
            raise _url_error(f"has an unknown option {key}; known are {known}")
    if "ssl_ca" in arguments:  # PyMySQL would only encrypt, and trust any server
        arguments.setdefault("ssl_verify_cert", True)
    return arguments


def display_name(config: Store) -> str:
    arguments = _without_password(config)
    place = arguments.get("unix_socket") or f"{arguments['host']}:{arguments['port']}"
    return f"{arguments['user']}@{place}/{arguments['database']}"


class _Connection(pymysql.connections.Connection):
    """With one TLS context per process: loading the system's authorities takes 38 ms."""

    def _create_ssl_ctx(self, sslp: dict[str, Any]) -> ssl.SSLContext:
        paths = [Path(sslp[name]) for name in ("ca", "cert", "key") if sslp.get(name)]
        changed = [path.stat().st_mtime_ns for path in paths]  # certificates are renewed
        key = json.dumps([sslp, changed], sort_keys=True, default=str)
        if key not in _tls:
            if sslp:
                made: ssl.SSLContext = super()._create_ssl_ctx(sslp)  # type: ignore[misc]
                # PyMySQL does not do so with the system's authorities
                made.check_hostname = bool(sslp.get("check_hostname"))
            else:  # encrypted where the server can, as the URL asks for no verification
                made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                made.check_hostname = False
                made.verify_mode = ssl.CERT_NONE
            _tls[key] = made
        return _tls[key]


_tls: dict[str, ssl.SSLContext] = {}


def connect(config: Store) -> Connection:
    """A connection with autocommit and the server's session defaults.

    Raises:
        StoreError: store.unreachable, store.auth_failed, store.database_missing, …
    """
    arguments = connect_arguments(config)
    read_timeout = arguments["read_timeout"]
    # a server that never greets must be noticed as soon as one that refuses
    greeting = min(read_timeout, arguments["connect_timeout"])
    arguments |= {"autocommit": True, "read_timeout": greeting}
    place = display_name(config)
    with mapped(place):
        connection = _open(place, arguments)
    connection._read_timeout = read_timeout  # type: ignore[attr-defined]
    # networks drop idle connections
    sock: socket.socket = connection._sock  # type: ignore[attr-defined]
    if sock.family != getattr(socket, "AF_UNIX", None):
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


_encrypted: set[str] = set()
"""Local servers that require TLS."""


def _open(place: str, arguments: Mapping[str, Any]) -> Connection:
    """To a local server without TLS, if it allows that: rows cost a third less."""
    is_local = "unix_socket" in arguments or arguments["host"] in _LOOPBACK
    if not is_local or place in _encrypted or any(key.startswith("ssl_") for key in arguments):
        return _Connection(**arguments)
    try:
        return _Connection(**arguments, ssl_disabled=True)
    except (pymysql.err.MySQLError, RuntimeError) as error:
        if error.args and error.args[0] in range(2000, 3000):
            raise  # a client error: the server has not refused
    connection = _Connection(**arguments)
    _encrypted.add(place)
    return connection


def connect_for_reading(config: Store) -> Connection:
    """A connection whose session is READ COMMITTED, read only, in UTC.

    `net_write_timeout`: a consumer that waits for its broker must not lose the rest of its window.
    `lock_wait_timeout`: a statement that waits for an ALTER TABLE must end before we drop the
    connection, or each such connection would stay open on the server.
    `sort_buffer_size`: MySQL sorts JSON along with its key where the index does not give the order,
    and fails unless the buffer can hold the row; it allocates what it needs.
    """
    connection = connect(config)
    patience = max(1, int(0.8 * connection._read_timeout))  # type: ignore[attr-defined]
    own = "max_execution_time = 0, sort_buffer_size = 2 * @@max_allowed_packet"
    if is_mariadb(connection):
        own = "max_statement_time = 0"
    with mapped(display_name(config)):
        run(connection, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ ONLY")
        run(
            connection,
            "SET time_zone = '+00:00', sql_mode = '', net_write_timeout = 600, sql_big_selects = 1,"
            f" sql_select_limit = {_NO_LIMIT}, {own}, lock_wait_timeout = {patience}",
        )
    return connection


def is_mariadb(connection: Connection) -> bool:
    return "mariadb" in str(connection.server_version).lower()  # type: ignore[attr-defined]


def run(connection: Connection, sql: str) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


def run_named(connection: Connection, sql: str) -> list[dict[str, Any]]:
    """Like `run`; rows as text by lower-case column name."""
    with connection.cursor() as cursor:
        cursor.execute(sql)
        names = [str(column[0]).lower() for column in cursor.description or ()]
        rows = (
            [v.decode(errors="replace") if isinstance(v, bytes) else v for v in row]
            for row in cursor
        )
        return [dict(zip(names, row, strict=True)) for row in rows]


def _switch(key: str, value: str) -> bool:
    if value.lower() in {"1", "true", "yes", "on"}:
        return True
    if value.lower() in {"0", "false", "no", "off"}:
        return False
    raise _url_error(f"has {key}={value}; write true or false")


def _url_error(what: str) -> ConfigError:
    return ConfigError(
        "config.store_url",
        f"store.url {what}",
        where="store.url",
        suggestion="write it as mysql+pymysql://user@host:3306/database",
    )


@contextmanager
def mapped(where: str | None = None) -> Iterator[None]:
    try:
        yield
    except (pymysql.err.MySQLError, OSError, RuntimeError) as error:
        raise store_error(error, where) from error
    except Exception as error:
        if isinstance(getattr(error, "orig", None), Exception):  # SQLAlchemy's around PyMySQL's
            raise store_error(error, where) from error
        raise


def error_number(error: BaseException) -> int | None:
    error = getattr(error, "orig", None) or error  # SQLAlchemy's around PyMySQL's
    return next((number for number in error.args[:1] if isinstance(number, int)), None)


def store_error(error: BaseException, where: str | None = None) -> StoreError:
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
    """Whether a side refused TLS itself, as opposed to a lost connection."""
    cause = getattr(error, "original_exception", None) or error.__context__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return True
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError | TimeoutError):
        return False
    if isinstance(cause, ssl.SSLError):
        # in TLS 1.3 the server's refusal of our certificate comes with its first answer
        lost = next(entry for entry in _MEANINGS if entry["code"] == "store.connection_lost")
        return error_number(error) not in lost["numbers"] or "ALERT" in known.upper()
    # PyMySQL wraps network errors, so a bare OSError is about a certificate file
    return isinstance(error, OSError)
