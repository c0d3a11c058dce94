"""The state directory is its user's alone, whatever the parent allows."""

from __future__ import annotations

import stat
from pathlib import Path

from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, insert


def open_to_others(root: Path) -> dict[str, str]:
    """What others may use, by its path: its mode."""
    found = {}
    for path in [root, *root.rglob("*")]:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # a file of a running publisher comes and goes
            continue
        allowed = 0o700 if stat.S_ISDIR(mode) else 0o600
        if stat.S_IMODE(mode) & ~allowed and not stat.S_ISLNK(mode):
            found[str(path.relative_to(root))] = stat.filemode(mode)
    return found


def test_nothing_of_the_state_is_open_to_others_where_the_parent_masks_nothing(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path
) -> None:
    program = tmp_path / "eventpub-of-umask-0"
    program.write_text(f'#!/bin/sh\numask 000\nexec {publisher.program} "$@"\n')
    program.chmod(0o755)
    publisher.program = str(program)
    publisher.settings["spark"] = {"master": "local[*]"}
    publisher.start()
    with database.connect() as connection, connection.cursor() as cursor:
        insert(cursor, "a", 1)
        publisher.until_published("a", [1])
        assert open_to_others(publisher.state) == {}
        publisher.until_spark_publishes()
        insert(cursor, "a", 2)
        publisher.until_published("a", [1, 2])
    assert (publisher.state / "spark.log").exists()
    assert list((publisher.state / "spark").iterdir())
    assert open_to_others(publisher.state) == {}
    publisher.command("gaps", "list", "--json")
    assert publisher.stop() == 143
    publisher.command("gaps", "retry", "a", "--later", "--json")
    assert list((publisher.state / "requests").glob("*.json"))
    assert open_to_others(publisher.state) == {}
