"""What people see on a terminal, and what scripts get who have none."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eventpub.cli import terminal
from eventpub.cli.output import Table
from eventpub.cli.terminal import Lines
from eventpub.local.servers import Kafka
from tests.cli.terminal import Shown, on_terminal
from tests.cli.test_command import MAIN, _environ
from tests.conftest import FreshDatabase
from tests.publisher.harness import create_table, insert, transaction

ESTIMATE = r"\d:\d\d:\d\d"
EVENTPUB = [sys.executable, "-c", MAIN]
BAR = """
import logging, time
from eventpub.cli.terminal import progress
with progress(logging.getLogger("test")) as show:
    show("reading store and topic", None)
    for step in range(31):
        show(f"reading store and topic: {step},000,000 rows, {step},000,000 records", step / 30)
        time.sleep(0.1)
print("done")
"""


def python(folder: Path, program: str, width: int, **environ: str) -> Shown:
    return on_terminal(
        [sys.executable, "-c", program], cwd=folder, environ=_environ(environ), width=width
    )


@pytest.mark.parametrize("width", [80, 40])
def test_a_bar_moves_says_how_long_it_will_take_and_goes(tmp_path: Path, width: int) -> None:
    shown = python(tmp_path, BAR, width)
    assert shown.status == 0
    shares = [int(share) for share in re.findall(r"(\d+)%", shown.text)]
    assert shares == sorted(shares)
    assert len(set(shares)) > 5
    assert re.search(ESTIMATE, shown.text)
    assert "reading store" in shown.text
    assert max(map(len, shown.text.split("\n"))) <= width - 2
    assert not shown.is_cursor_hidden
    assert shown.raw.count("\n") == 2, "one line, which is taken away, and what is printed"


def test_a_terminal_that_cannot_redraw_gets_no_bar(tmp_path: Path) -> None:
    shown = python(tmp_path, BAR, 80, TERM="dumb")
    assert shown.raw == "done\r\n"


def test_lines_say_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    with caplog.at_level(logging.INFO):
        lines = Lines(logging.getLogger("test"), lambda: now)
        for step in range(41):
            lines.show(f"{step} rows", None if step < 15 else step / 50)
            now += 1.0
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "10 rows",
        "20 rows: 40%",
        "30 rows: 60%",
        "40 rows: 80%",
    ]


def drawn(table: Table, width: int, *, is_terminal: bool = True) -> list[str]:
    out = io.StringIO()
    options: dict[str, Any] = {"force_terminal": is_terminal, "color_system": None}
    Console(file=out, width=width, **options).print(terminal.drawn(table))
    return [line.rstrip() for line in out.getvalue().splitlines()]


ROWS = Table(
    ("aggregate id", "", "created", "reason"),
    [["order-1", "held", "2026-11-25T13:08:28.532779Z", "version 2 is missing"]],
    "open",
)


def test_a_table_that_is_too_wide_is_folded_and_nothing_of_it_is_left_out() -> None:
    wide, narrow = drawn(ROWS, 72), drawn(ROWS, 50)
    assert wide[1] == "aggregate id        created                      reason"
    assert max(map(len, narrow)) <= 50
    for rows in (wide, narrow):
        assert sorted("".join(rows[2:]).replace(" ", "")) == sorted(
            "".join(map(str, ROWS.rows[0])).replace(" ", "")
        )
    assert drawn(Table(("shard", "position"), []), 60) == ["shard  position"]


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(tmp_path: Path) -> None:
    program = """
import builtins, sys
from eventpub.__main__ import main
def interrupted(*_):
    raise KeyboardInterrupt
builtins.__import__ = interrupted
sys.exit(main())
"""
    shown = python(tmp_path, program, 80)
    assert (shown.status, shown.raw) == (130, "")


@pytest.fixture
def environ(
    tmp_path: Path, database: FreshDatabase, kafka_server: Kafka, topic_name: str
) -> dict[str, str]:
    """Of a publisher whose table has some rows."""
    create_table(database)
    with transaction(database) as cursor:
        for version in range(1, 1001):
            insert(cursor, f"order-{version % 10}", (version + 9) // 10)
        cursor.connection.commit()
    return _environ(
        {
            "EVENTPUB_APP__ID": "orders",
            "EVENTPUB_APP__STATE_DIR": str(tmp_path / "state"),
            "EVENTPUB_STORE__URL": database.url,
            "EVENTPUB_SINK__TOPIC": topic_name,
            "EVENTPUB_SINK__BOOTSTRAP_SERVERS": kafka_server.bootstrap_servers,
            "EVENTPUB_RUN__ENGINE": "threads",
            "EVENTPUB_OPS__HTTP": "",
        }
    )


RANGE = ("--from", "2026-01-01T00:00:00Z", "--to", "2100-01-01T00:00:00Z")


def is_clean(shown: Shown, status: int) -> None:
    """Whether the terminal is as it was, and nothing is said that only we understand."""
    assert shown.status == status, shown.text
    assert "Traceback" not in shown.text
    assert not shown.is_cursor_hidden


def test_commands_on_a_terminal(tmp_path: Path, environ: Mapping[str, str]) -> None:
    """What each draws, that stdout has its answer alone, and that Ctrl-C leaves nothing behind."""

    def command(
        *arguments: str, interrupt_at: str | None = None, out_is_pipe: bool = False
    ) -> Shown:
        return on_terminal(
            [*EVENTPUB, *arguments],
            cwd=tmp_path,
            environ=environ,
            interrupt_at=interrupt_at,
            out_is_pipe=out_is_pipe,
        )

    stopped = command("run", interrupt_at="published 1,000")
    is_clean(stopped, 130)
    assert "published 1,000 events" in stopped.text
    assert "Failed to acquire" not in stopped.text
    is_clean(command("run", interrupt_at="starting"), 130)

    compared = command("verify", "--json", out_is_pipe=True)
    is_clean(compared, 0)
    assert json.loads(compared.out)["result"]["events"] == 1000
    assert "1,000 rows" in compared.text  # what is drawn last; the rest may be too quick
    interrupted = command("verify", interrupt_at="\x1b\\[\\?25l")
    is_clean(interrupted, 130)
    assert "error: cli.stopped: interrupted before it was done" in interrupted.text

    again = command("replay", *RANGE, "--topic", f"{environ['EVENTPUB_SINK__TOPIC']}.again")
    is_clean(again, 0)
    assert "1,000 events published" in again.text

    traced = command("trace", "order-1", "--limit", "2", "--timeout", "7")
    is_clean(traced, 0)
    assert "reading the topics, for at most 7 s" in traced.text
    assert "2 published" in traced.text
    is_clean(command("dead", "list"), 0)

    coloured = command("status", out_is_pipe=True)
    is_clean(coloured, 1)
    assert "\x1b" not in coloured.out


def test_migrate_asks_before_it_alters_a_table_that_exists(
    tmp_path: Path, database: FreshDatabase
) -> None:
    columns = "aggregate_id VARCHAR(64), version BIGINT, event_type VARCHAR(64), payload BLOB"
    database.execute(f"CREATE TABLE events ({columns}, create_time TIMESTAMP(6))")
    environ = _environ({"EVENTPUB_STORE__URL": database.url})

    def migrate(*flags: str, interrupt_at: str | None = None, press: str = "\x03") -> Shown:
        return on_terminal(
            [*EVENTPUB, "migrate", *flags],
            cwd=tmp_path,
            environ=environ,
            interrupt_at=interrupt_at,
            press=press,
        )

    def indexes() -> int:
        return len(database.execute("SHOW INDEX FROM events"))

    asked = r"alter events like this now\? \[y/N\]"
    refused = migrate(interrupt_at=asked, press="n\r")
    is_clean(refused, 1)
    assert "ADD UNIQUE INDEX" in refused.text
    assert "not done: nothing was altered" in refused.text
    is_clean(migrate(interrupt_at=asked), 130)
    assert indexes() == 0
    agreed = migrate(interrupt_at=asked, press="y\r")
    is_clean(agreed, 0)
    assert "done, events is ready" in agreed.text
    assert indexes() > 0
    database.execute("DROP TABLE events")
    is_clean(migrate(), 0)  # nobody is asked about a table that is made
    database.execute("ALTER TABLE events DROP INDEX create_time")
    is_clean(migrate("--yes"), 0)
