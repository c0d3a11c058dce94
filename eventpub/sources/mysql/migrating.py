"""`migrate`: brings the event table to what this version wants, by Alembic.

The migrations stand in the folder `migrations/` of the source, which a wheel carries as
`eventpub/migrations`. Alembic's own table is `eventpub_alembic_version`: the user's application
may well keep one of its own in the same database.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal, TypeAlias

import pymysql.err
import sqlalchemy
import structlog
from alembic import command
from alembic.config import Config
from sqlalchemy.pool import NullPool

import eventpub
from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import Connection, connect, display_name, run
from eventpub.sources.mysql.failures import mapped
from eventpub.sources.mysql.schema import ALTERS, copies_the_table, create_table, missing, offline

VERSION_TABLE = "eventpub_alembic_version"

Dialect: TypeAlias = Literal["mysql", "mariadb"]

_LOCK = "eventpub.migrate"
_LOCK_SECONDS = 60
_NOT_ONLINE = {1845, 1846}  # this algorithm, this lock

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


def would_execute(config: Store, dialect: Dialect | None = None) -> tuple[list[str], bool]:
    """What `migrate` would execute, and whether the database was looked at.

    Where it was not, the statements make the whole table.

    Args:
        dialect: do not connect, and return what makes the table on such a server; None: connect,
            and assume MySQL where the database cannot be reached.

    Raises:
        StoreError: the database refused a query, or the table holds something else.
    """
    if dialect is None:
        where = f"{display_name(config)}, table {config.table}"
        try:
            connection = connect(config)
        except StoreError as error:
            if error.code != "store.unreachable":
                raise
            log.warning("the database cannot be reached", error=error.message)
        else:
            with closing(connection), mapped(where):
                return _ended(missing(config, connection)), True
    return [f"{create_table(config, mariadb=dialect == 'mariadb')};"], False


def migrate(
    config: Store, before_altering: Callable[[list[str]], None] = lambda _: None
) -> list[str]:
    """Creates the event table, or adds what an existing one lacks.

    A second run adds what has been dropped since, or makes the table of another configuration.

    Args:
        before_altering: called with the statements before a table that exists is altered; what it
            raises ends this, and nothing was executed.

    Returns:
        The statements that were executed, each ending in a semicolon.

    Raises:
        StoreError: the database refused, or the table holds something else.
    """
    where = f"{display_name(config)}, table {config.table}"
    connection = connect(config)
    try:
        with mapped(where):
            wanted = _ended(missing(config, connection))
        if any(statement.startswith(ALTERS) for statement in wanted):
            before_altering(wanted)
        with mapped(where):
            # two that start at once (containers of one deployment) take turns
            if run(connection, f"SELECT GET_LOCK('{_LOCK}', {_LOCK_SECONDS})")[0][0] != 1:
                raise StoreError(
                    "store.timeout",
                    "another migration is running",
                    where=where,
                    suggestion="run it again when that is done",
                    retriable=True,
                )
            wanted = missing(config, connection)
            for statement in wanted:
                _execute(config, connection, statement)
            _upgrade(config)
            return _ended(wanted)
    except StoreError as error:
        if error.code == "store.privilege_missing":
            error.suggestion = (
                "migrate with an account that may CREATE and ALTER the table, or hand the "
                "statements of `eventpub migrate --sql` to somebody who may"
            )
        raise
    finally:
        connection.close()


def _ended(statements: list[str]) -> list[str]:
    return [f"{statement};" for statement in statements]


def _execute(config: Store, connection: Connection, statement: str) -> None:
    """Without keeping writers waiting, where the engine can do that."""
    if not copies_the_table(statement):
        try:
            run(connection, statement)
        except pymysql.err.MySQLError as error:
            if error.args[0] not in _NOT_ONLINE:
                raise
            statement = offline(statement)
        else:
            return
    log.warning(
        "the table is copied, and writers wait until that is done; where the publisher may not see "
        "open transactions (PROCESS), stop it meanwhile, or set recount.horizon above the time "
        "that it takes",
        table=config.table,
        statement=statement,
    )
    run(connection, statement)


def script_location() -> Path:
    """The folder of the migrations: inside the installed package, or beside it in the source.

    Raises:
        StoreError: store.migrations_missing
    """
    package = Path(eventpub.__file__).parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise StoreError(
        "store.migrations_missing",
        "the migrations were not installed with eventpub",
        where=str(package),
        suggestion="install eventpub again from a wheel or a source checkout",
    )


def _upgrade(config: Store) -> None:
    """Runs Alembic's migrations that this database has not seen."""
    alembic = Config()
    # a percent sign in a path would be taken for an interpolation
    alembic.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    engine = sqlalchemy.create_engine(
        "mysql+pymysql://", creator=lambda: connect(config), poolclass=NullPool
    )
    with engine.connect() as connection:
        alembic.attributes.update(connection=connection, store=config, version_table=VERSION_TABLE)
        command.upgrade(alembic, "head")
        connection.commit()
