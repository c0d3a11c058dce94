"""A first configuration for a database: finds the event table, and makes the SQL for an account."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url
from urllib.parse import unquote, urlsplit, urlunsplit

from eventpub.config import Columns, Config
from eventpub.errors import ConfigError, StoreError
from eventpub.settings import Loaded
from eventpub.sources.mysql.proposing import Candidate, Proposal, propose
from eventpub.sources.mysql.table import is_view, quote

_ACCOUNT = "eventpub"


class NoTableError(StoreError):
    exit_status = 1


_NEXT = [
    "run the statements for the account, and set EVENTPUB_STORE__PASSWORD",
    "eventpub doctor",
    "eventpub run",
]
_FIRST = "run the statement for the table: "
_WAIT = "it may copy the table while writers wait", "writers are not blocked (InnoDB)"


def init(loaded: Loaded, file: Path, *, force: bool = False) -> dict[str, Any]:
    """Find the event table and write a configuration for it; returns `eventpub init --json`.

    Args:
        loaded: values that it lacks (table, columns, names) are found in the database or derived
            from the names of database and table.
        force: overwrite an existing file.

    Raises:
        ConfigError: init.file_exists, init.not_writable
        NoTableError: init.no_table, init.column_unknown, …
    """
    config = loaded.config

    def given(key: str, value: Any) -> Any:
        return None if loaded.origins[key] == "default" else value

    names = config.store.columns.model_dump().items()
    columns = {ours: name for ours, name in names if given(f"store.columns.{ours}", True)}
    table = given("store.table", config.store.table)
    found = propose(config.store, table, columns)
    chosen = _chosen(found, table)
    asked = config.store.url.get_secret_value()
    url = _without_password(asked)
    asked_as, user = (unquote(urlsplit(of).username or "root") for of in (asked, url))
    app_id = given("app.id", config.app.id) or _plain(found.database)
    topic = given("sink.topic", config.sink.topic)
    topic = topic or f"{_plain(found.database)}.{_plain(chosen.table)}"
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(_text(config, chosen, url, app_id, topic))
    except OSError as error:
        raise ConfigError(
            "init.not_writable",
            f"{file} cannot be written: {error.strerror}",
            where="--output",
            suggestion="name another file with --output",
        ) from error
    notes = list(chosen.notes)
    if user != asked_as:
        notes.insert(
            0,
            f"store.url in {file} has the user {user}, not {asked_as}: the statements below create"
            " that account, with only the privileges that the publisher uses",
        )
    others = [candidate for candidate in found.candidates if candidate is not chosen]
    return {
        "file": str(file),
        "table": chosen.table,
        "columns": dict(chosen.columns),
        "left_out": chosen.left_out,
        "framework": chosen.framework,
        "first_version": chosen.first_version,
        "without_identity": chosen.without_identity,
        "statements": chosen.statements,
        "others": [{"table": c.table, "columns": dict(c.columns)} for c in others],
        "account": account_sql(user, found.database, chosen.table, is_mariadb=found.is_mariadb),
        "notes": notes,
        "next": [_FIRST + _WAIT["ADD COLUMN" not in s] for s in chosen.statements] + _NEXT,
    }


def account_sql(user: str, database: str, table: str, *, is_mariadb: bool) -> list[str]:
    """The statements that create an account with just the publisher's privileges."""
    name = "'" + user.replace("\\", "\\\\").replace("'", "''") + "'@'%'"
    role = "SLAVE MONITOR" if is_mariadb else "REPLICATION CLIENT"
    return [
        f"CREATE USER IF NOT EXISTS {name} IDENTIFIED BY '…';",
        f"GRANT SELECT ON {quote(database)}.{quote(table)} TO {name};",
        f"GRANT PROCESS ON *.* TO {name};  -- recommended: shows open transactions",
        f"GRANT {role} ON *.* TO {name};  -- optional: shows whether it is a replica",
    ]


def require_absent(file: Path) -> None:
    if os.path.lexists(file):
        raise ConfigError(
            "init.file_exists",
            f"{file} already exists",
            where="--output",
            suggestion=f"to check it: eventpub doctor --config {file}; to write another one, name"
            " it with --output, or write over it with --force",
        )


def _chosen(found: Proposal, table: str | None) -> Candidate:
    if not found.candidates:
        raise _nothing(found, table)
    best = [c for c in found.candidates if c.score == found.candidates[0].score]
    if len(best) > 1:
        names = [candidate.table for candidate in best]
        raise NoTableError(
            "init.several_tables",
            f"each of these tables of database {found.database} may be the event table:"
            f" {', '.join(names)}",
            where="store.table",
            suggestion="choose one: "
            + ", or ".join(f"--table {name}" for name in names)
            + "; for several, run a publisher for each",
        )
    return best[0]


def _nothing(found: Proposal, table: str | None) -> StoreError:
    if found.refused:
        name, why = min(found.refused.items())
        return NoTableError(
            "init.not_publishable",
            f"table {name} cannot be published: {why}",
            where=f"table {name}",
            suggestion="publish a table that has a version per aggregate: 1, 2, 3, …",
        )
    if found.views:
        return is_view(found.views[0], f"database {found.database}")
    # of the tables that resemble an event table, those that lack least
    near = sorted((len(lacks), name) for name, lacks in found.lacking.items() if len(lacks) < 3)
    names = [table] if table else [name for size, name in near if size == near[0][0]]
    if not names:
        return NoTableError(
            "init.no_table",
            f"no table of database {found.database} looks like an event table: aggregate id,"
            " version, event type, payload and creation time",
            where="store.url",
            suggestion="name it with --table, or have `eventpub migrate --sql` print one",
        )
    lacks = "; ".join(f"table {name} lacks {', '.join(found.lacking[name])}" for name in names)
    return NoTableError(
        "init.column_unknown",
        "no table could be identified as the event table by the names and types of its columns:"
        f" {lacks}",
        where=f"table {', '.join(names)}",
        suggestion=f"if it is the one, name its columns: --table {' or '.join(names)} "
        + " ".join(f"--set store.columns.{role.split()[0]}=…" for role in found.lacking[names[0]])
        + "; each row needs a version (1, 2, 3, … in its aggregate)",
    )


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")[:100] or "events"


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    user = unquote(parts.username or "root")
    if user == "root":
        user = _ACCOUNT
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote_url(user, safe='')}@{place}"))


def _columns(chosen: Candidate) -> dict[str, str | tuple[str, ...]]:
    differ = {}
    own = {**Columns().model_dump(), "aggregate_id": "aggregate_id"}
    for ours, default in own.items():
        name = chosen.columns.get(ours, "")
        if name != default and (name or default in chosen.names):
            differ[ours] = name
    return differ


def _toml(value: str | tuple[str, ...]) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(config: Config, chosen: Candidate, url: str, app_id: str, topic: str) -> str:
    more = ""
    if chosen.first_version == 0:
        more += "first_version = 0  # aggregates of this table begin with version 0\n"
    if chosen.without_identity == "skip":
        more += 'without_identity = "skip"  # rows of no aggregate; "stop": an error\n'
    if columns := _columns(chosen):
        more += "\n[store.columns]  # only those whose names differ\n"
        for ours, name in columns.items():
            more += f"{ours} = {_toml(name)}{'' if name else '  # the table has none'}\n"
    return f"""\
# Configuration of eventpub; all keys: docs/configuration.md, `eventpub config show`

[app]
id = {_toml(app_id)}  # name of this publisher; never run two with one name
state_dir = "./state"  # index and position: keep it between runs

[store]
# the password: EVENTPUB_STORE__PASSWORD, or password_file = "/run/secrets/…"
url = {_toml(url)}
table = {_toml(chosen.table)}
{more}
[read]
start = "beginning"  # or "now", or an RFC 3339 time: what was created before is left out

[sink]
topic = {_toml(topic)}
bootstrap_servers = {_toml(config.sink.bootstrap_servers)}
# [sink.properties]  # librdkafka's own, if the broker requires a login
# "security.protocol" = "SASL_SSL"

[run]
engine = "spark"  # Structured Streaming; "threads": one small process, without Java
"""
