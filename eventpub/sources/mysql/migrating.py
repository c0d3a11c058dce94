"""`migrate`: creates the event table or adds what it lacks, with Alembic.

Alembic's table is `eventpub_alembic_version`: the application may have one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import sqlalchemy
import structlog
from alembic import command
from alembic.config import Config
from sqlalchemy.pool import NullPool

import eventpub
from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import (
    Connection,
    connect,
    display_name,
    is_mariadb,
    mapped,
    run,
)
from eventpub.sources.mysql.layout import TIME, additions, roles_of, slice_type
from eventpub.sources.mysql.table import free_name, listed, quote, read_table

_VERSION_TABLE = "eventpub_alembic_version"
_LOCK = "eventpub.migrate"
_LOCK_SECONDS = 60

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


def would_execute(config: Store) -> list[str]:
    """The statements `migrate` would execute; CREATE TABLE if the database is unreachable."""
    try:
        connection = connect(config)
    except StoreError as error:
        if error.code != "store.unreachable":
            raise
        log.warning("the database cannot be reached", error=error.message)
        return ["-- without looking at a database", create_table(config, mariadb=False)]
    with closing(connection), mapped(_where(config)):
        return missing(config, connection)


def migrate(
    config: Store, before_altering: Callable[[list[str]], None] = lambda _: None
) -> list[str]:
    """Create the event table, or add what it lacks; returns the executed statements.

    Args:
        before_altering: called with the statements before an existing table is altered; may raise.
    """
    where, connection = _where(config), connect(config)
    # copying a table sends nothing for long; TCP keep-alive notices a lost server
    connection._read_timeout = None  # type: ignore[attr-defined]
    try:
        with mapped(where):
            # writers wait behind an ALTER TABLE that waits
            run(connection, "SET SESSION lock_wait_timeout = 10")
            wanted = missing(config, connection)
        if any(statement.startswith("ALTER TABLE") for statement in wanted):
            before_altering(wanted)
        with mapped(where):
            if run(connection, f"SELECT GET_LOCK('{_LOCK}', {_LOCK_SECONDS})")[0][0] != 1:
                raise StoreError(
                    "store.timeout",
                    "another migration is running",
                    where=where,
                    suggestion="run it again when that one has finished",
                    retriable=True,
                )
            wanted = missing(config, connection)
            for statement in wanted:
                if "ADD COLUMN" in statement:
                    log.warning(
                        "the table is copied, and writers wait until that is done; if the"
                        " publisher's account lacks PROCESS, stop the publisher meanwhile, or set"
                        " recount.horizon above the time it takes",
                        table=config.table,
                        statement=statement,
                    )
                run(connection, statement)
            _upgrade(config)
            return wanted
    except StoreError as error:
        if error.code == "store.privilege_missing":
            error.suggestion = (
                "migrate with an account that may CREATE and ALTER the table, or have the output "
                "of `eventpub migrate --sql` executed by one"
            )
        elif error.code == "store.timeout" and error.__cause__ is not None:  # it waited for a lock
            error.suggestion = (
                "end the transaction that has the table open (SHOW FULL PROCESSLIST), and run"
                " `eventpub migrate` again"
            )
        raise
    finally:
        connection.close()


def _where(config: Store) -> str:
    return f"{display_name(config)}, table {config.table}"


def missing(config: Store, connection: Connection) -> list[str]:
    try:
        table = read_table(config, connection)
    except StoreError as error:
        if error.code != "store.table_missing":
            raise
        return [create_table(config, mariadb=is_mariadb(connection))]
    added = additions(table, roles_of(config, table), with_slice=True)
    # one statement: each stored column added alone would copy the table
    return [table.alter(added) + ";"] if added else []


def create_table(config: Store, *, mariadb: bool) -> str:
    """The statement that creates the event table; its collation compares ids by bytes."""
    names = config.columns
    if len(names.aggregate_id) > 1:
        raise StoreError(
            "store.several_id_columns",
            "eventpub creates only tables whose store.columns.aggregate_id is one column",
            where=f"table {config.table}",
            suggestion="create the table as your application does; `eventpub doctor` names what"
            " is missing",
        )
    bytewise = "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"
    text = f"VARCHAR(255) CHARACTER SET utf8mb4 COLLATE {bytewise} NOT NULL"
    [aggregate_id] = names.aggregate_id
    types = {
        names.id: "BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY",
        aggregate_id: text,
        names.version: "BIGINT NOT NULL",
        names.event_type: text,
        names.payload: "LONGBLOB NULL",
        names.metadata: "JSON NULL",
        names.create_time: TIME,
    }
    columns = {name: kind for name, kind in types.items() if name}
    slice_name = free_name("slice", columns)
    columns[slice_name] = f"{slice_type(quote(aggregate_id))} INVISIBLE"
    lines = [f"{quote(name)} {kind}" for name, kind in columns.items()]
    key = "UNIQUE KEY" if names.id else "PRIMARY KEY"
    lines.append(f"{key} ({listed([aggregate_id, names.version])})")
    lines.append(f"KEY ({listed([names.create_time, slice_name])})")
    body = ",\n  ".join(lines)
    return f"CREATE TABLE IF NOT EXISTS {quote(config.table)} (\n  {body}\n) ENGINE = InnoDB;"


def script_location() -> Path:
    package = Path(eventpub.__file__).parent
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def _upgrade(config: Store) -> None:
    alembic = Config()
    # a percent sign in a path would be taken for an interpolation
    alembic.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    engine = sqlalchemy.create_engine(
        "mysql+pymysql://", creator=lambda: connect(config), poolclass=NullPool
    )
    with engine.connect() as connection:
        alembic.attributes.update(connection=connection, store=config, version_table=_VERSION_TABLE)
        command.upgrade(alembic, "head")
        connection.commit()
