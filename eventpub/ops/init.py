"""A first configuration for a database: the event table found in it, and the SQL for an account.

What is written is a proposal that passes `config check`; a password is never written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote as quote_url
from urllib.parse import unquote, urlsplit, urlunsplit

from eventpub.config import Columns, Config
from eventpub.errors import ConfigError, StoreError
from eventpub.sources.mysql import propose
from eventpub.sources.mysql.proposing import Candidate, Proposal
from eventpub.sources.mysql.table import is_view, quote

_ACCOUNT = "eventpub"


class NoTableError(StoreError):
    """The database has answered, and no table of it is surely the event table."""

    exit_status = 1


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        file: where to.
        chosen: the table.
        others: tables that it may be instead.
        columns: those whose names differ from ours.
        account: the SQL for the account.
        user: that of the file's url, which gets the account.
        asked_as: the user with whom the database was looked into.
    """

    file: Path
    chosen: Candidate
    others: list[Candidate]
    columns: dict[str, str | tuple[str, ...]]
    account: list[str]
    user: str
    asked_as: str


def init(  # noqa: PLR0913 (options, by keyword)
    config: Config,
    file: Path,
    *,
    table: str | None = None,
    columns: Mapping[str, Any] | None = None,
    app_id: str | None = None,
    topic: str | None = None,
    force: bool = False,
) -> Written:
    """Find the event table, and write a configuration for it.

    Args:
        config: which says where the database and the brokers are.
        file: to be written.
        table: the event table; None: the likeliest of the database.
        columns: by our names its own, where somebody has named them.
        app_id, topic: None: made of the names of database and table.
        force: write over a file that is there.

    Raises:
        ConfigError: init.file_exists
        NoTableError: init.no_table, init.column_unknown, init.several_tables,
            init.not_publishable
        StoreError: store.is_view, …; or the database cannot be looked at.
    """
    if file.exists() and not force:
        raise exists(file)
    found = propose(config.store, table, columns)
    chosen = _chosen(found, table)
    others = [candidate for candidate in found.candidates if candidate is not chosen]
    names = _columns(chosen)
    given = config.store.url.get_secret_value()
    url = _without_password(given)
    asked_as = unquote(urlsplit(given).username or "root")
    user = unquote(urlsplit(url).username or "root")
    text = _text(
        config,
        chosen,
        names,
        url=url,
        app_id=app_id or _plain(found.database),
        topic=topic or f"{_plain(found.database)}.{_plain(chosen.table)}",
    )
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise exists(file) from None
    except OSError as error:
        raise ConfigError(
            "init.not_writable",
            f"{file} cannot be written: {error.strerror}",
            where="--output",
            suggestion="name another file with --output",
        ) from error
    account = account_sql(user, found.database, chosen.table, is_mariadb=found.is_mariadb)
    return Written(file, chosen, others, names, account, user, asked_as)


def account_sql(user: str, database: str, table: str, *, is_mariadb: bool) -> list[str]:
    """The statements that make an account which may do what the publisher does, and no more."""
    name = "'" + user.replace("\\", "\\\\").replace("'", "''") + "'@'%'"
    role = "SLAVE MONITOR" if is_mariadb else "REPLICATION CLIENT"
    return [
        f"CREATE USER IF NOT EXISTS {name} IDENTIFIED BY '…';",
        f"GRANT SELECT ON {quote(database)}.{quote(table)} TO {name};",
        f"GRANT PROCESS ON *.* TO {name};  -- recommended: shows open transactions",
        f"GRANT {role} ON *.* TO {name};  -- optional: shows whether it is a replica",
    ]


def exists(file: Path) -> ConfigError:
    """The error that a file is there already."""
    return ConfigError(
        "init.file_exists",
        f"{file} is there already",
        where="--output",
        suggestion=f"to check it: eventpub doctor --config {file}; to write another one, name it"
        " with --output, or write over it with --force",
    )


def _chosen(found: Proposal, table: str | None) -> Candidate:
    """The table that a configuration is written for.

    Raises:
        NoTableError: there is none, or none that is likelier than another.
        StoreError: store.is_view
    """
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
            suggestion="publish a table in which each row has the version that it has in its"
            " aggregate: 1, 2, 3, …",
        )
    if found.views:
        return is_view(found.views[0], f"database {found.database}")
    # of those that are like one, the likest
    near = sorted((len(lacks), name) for name, lacks in found.lacking.items() if len(lacks) < 3)
    if table is None and not near:
        return NoTableError(
            "init.no_table",
            f"no table of database {found.database} looks like an event table: aggregate id,"
            " version, event type, payload and creation time",
            where="store.url",
            suggestion="name it with --table, or have `eventpub migrate --sql` print one",
        )
    names = [table] if table else [name for size, name in near if size == near[0][0]]
    lacking = found.lacking[names[0]]
    said = "" if table else f"no table of database {found.database} is surely an event table: "
    said += ", ".join(
        f"no column of table {name} looks by name and type like {', '.join(found.lacking[name])}"
        for name in names
    )
    if "version" in lacking:
        said += "; a table without versions (1, 2, 3, … in each aggregate) cannot be published"
    return NoTableError(
        "init.column_unknown",
        said,
        where=f"table {', '.join(names)}",
        suggestion=f"if it is the one, name its columns: --table {' or '.join(names)} "
        + " ".join(f"--set store.columns.{role.split()[0]}=…" for role in lacking),
    )


def _plain(name: str) -> str:
    """A name for an application or a topic."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")[:100] or "events"


def _without_password(url: str) -> str:
    """As the file has it; who has tried it as root gets an account of its own."""
    parts = urlsplit(url)
    user = unquote(parts.username or "root")
    if user == "root":
        user = _ACCOUNT
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote_url(user, safe='')}@{place}"))


def _columns(chosen: Candidate) -> dict[str, str | tuple[str, ...]]:
    """Those whose names differ; empty where a column of our name stands for something else."""
    differ = {}
    own = {**Columns().model_dump(), "aggregate_id": "aggregate_id"}
    for ours, default in own.items():
        name = chosen.columns.get(ours, "")
        if name != default and (name or default in chosen.names):
            differ[ours] = name
    return differ


def _toml(value: str | tuple[str, ...]) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _text(  # noqa: PLR0913 (what is written)
    config: Config,
    chosen: Candidate,
    columns: dict[str, str | tuple[str, ...]],
    *,
    url: str,
    app_id: str,
    topic: str,
) -> str:
    lines = [
        "# Configuration of eventpub; all keys: docs/configuration.md, `eventpub config show`",
        "",
        "[app]",
        f"id = {_toml(app_id)}  # name of this publisher; only one of a name may run",
        'state_dir = "./state"  # index and position: keep it between runs',
        "",
        "[store]",
        '# the password: EVENTPUB_STORE__PASSWORD, or password_file = "/run/secrets/…"',
        f"url = {_toml(url)}",
        f"table = {_toml(chosen.table)}",
    ]
    if chosen.first_version == 0:
        lines.append("first_version = 0  # aggregates of this table begin with version 0")
    if chosen.without_identity == "skip":
        lines.append(
            'without_identity = "skip"  # rows of no aggregate are left out; "stop": an error'
        )
    if columns:
        lines += ["", "[store.columns]  # only those whose names differ"]
        for ours, name in columns.items():
            why = "" if name else "  # the table has none"
            lines.append(f"{ours} = {_toml(name)}{why}")
    lines += [
        "",
        "[read]",
        'start = "beginning"  # or "now", or an RFC 3339 time: what was created before is left out',
        "",
        "[sink]",
        f"topic = {_toml(topic)}",
        f"bootstrap_servers = {_toml(config.sink.bootstrap_servers)}",
        "# [sink.properties]  # librdkafka's own, where the broker asks for a login",
        '# "security.protocol" = "SASL_SSL"',
        "",
        "[run]",
        'engine = "threads"  # one process; "spark": Structured Streaming, also on a cluster',
        "",
    ]
    return "\n".join(lines)
