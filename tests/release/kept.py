"""State directories of released versions, and how one is made.

    python -m tests.release.kept        keeps one of the present version in tests/release/states

To be called once for each release, by its code. What is in the store is `PUBLISHED`, which the test
makes again.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from eventpub import __version__
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, create_table, eventually, insert, transaction
from tests.servers.databases import mysql
from tests.servers.kafka import kafka

STATES = Path(__file__).parent / "states"
APP = "orders"
PUBLISHED = {"whole": (1, 2, 3), "held": (1, 3), "skipped": (1, 3)}
"""Versions in the store. Of "held" the last one waits for version 2, of "skipped" it does not."""
DATABASE = "kept"
"""Its name: the state is one of its table."""
_LEFT_OUT = ("eventpub.lock", "LOG", "spark", "requests")


def named(server: Any) -> FreshDatabase:
    """The database, empty."""
    with server.connect(None, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {DATABASE}")
        cursor.execute(f"CREATE DATABASE {DATABASE}")
    return FreshDatabase(server, DATABASE)


def write(database: FreshDatabase) -> None:
    """These rows, with the times that they had."""
    with transaction(database) as cursor:
        for name, versions in PUBLISHED.items():
            for version in versions:
                insert(cursor, name, version, create_time=f"2026-11-25 08:00:0{version}.5")
        cursor.connection.commit()


def keep(archive: Path) -> None:
    """A publisher's state after it has published these rows and was stopped."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        with (
            mysql(at / "mysql", options=["--skip-log-bin"]) as server,
            kafka(at / "kafka") as broker,
        ):
            database = named(server)
            create_table(database)
            write(database)
            servers = broker.bootstrap_servers
            with Publisher(at / "publisher", database.url, "orders.events", servers) as publisher:
                publisher.settings["app"]["id"] = APP
                publisher.start()
                eventually(lambda: len(publisher.topic.follow()) == 5)
                publisher.command("gaps", "skip", "skipped", "--yes")
                eventually(lambda: len(publisher.topic.follow()) == 6)
                publisher.stop()
                with tarfile.open(archive, "w:gz", compresslevel=9) as tar:
                    tar.add(publisher.state, "state", filter=_without_what_is_of_the_process)


def _without_what_is_of_the_process(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uname = entry.gname = ""
    entry.uid = entry.gid = 0
    return None if Path(entry.name).name.startswith(_LEFT_OUT) else entry


if __name__ == "__main__":
    STATES.mkdir(exist_ok=True)
    made = STATES / f"{__version__}.tar.gz"
    keep(made)
    print(made, file=sys.stderr)
