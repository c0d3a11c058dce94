"""`migrate`: brings the event table to what this version wants, by Alembic.

The migrations stand in the folder `migrations/` of the source, which a wheel carries as
`eventpub/migrations`. Alembic's own table is `eventpub_alembic_version`: the user's application
may well keep one of its own in the same database.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy.pool import NullPool

import eventpub
from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.store.connection import connect, display_name, run
from eventpub.store.failures import mapped
from eventpub.store.schema import missing

VERSION_TABLE = "eventpub_alembic_version"

_LOCK = "eventpub.migrate"
_LOCK_SECONDS = 60


def migrate(config: Store, *, sql: bool = False) -> list[str]:
    """Creates the event table, or adds what an existing one lacks.

    A second run adds what has been dropped since, or makes the table of another configuration.

    Args:
        sql: only say what would be executed.

    Returns:
        The statements that were (or would be) executed, each ending in a semicolon.

    Raises:
        StoreError: the database refused, or the table holds something else.
    """
    where = f"{display_name(config)}, table {config.table}"
    connection = connect(config)
    try:
        with mapped(where):
            if sql:
                return [f"{statement};" for statement in missing(config, connection)]
            # two that start at once (containers of one deployment) take turns
            if run(connection, f"SELECT GET_LOCK('{_LOCK}', {_LOCK_SECONDS})")[0][0] != 1:
                raise StoreError(
                    "store.timeout", "another migration is running", where=where, retriable=True
                )
            wanted = missing(config, connection)
            _upgrade(config)
            for statement in missing(config, connection):
                run(connection, statement)
            return [f"{statement};" for statement in wanted]
    except StoreError as error:
        if error.code == "store.privilege_missing":
            error.suggestion = (
                "migrate with an account that may CREATE and ALTER the table, or hand the "
                "statements of `eventpub migrate --sql` to somebody who may"
            )
        raise
    finally:
        connection.close()


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
