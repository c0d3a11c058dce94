"""The tutorial word by word: each of its commands, in its order, on real servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.docs.pages import ROOT, blocks
from tests.publisher.harness import EVENTPUB, eventually

PAGE = ROOT / "docs" / "tutorial.md"
NOT_HERE = (
    r"python3 -m venv|pip install|python -m eventpub\.(local\.servers (mariadb|kafka)|spark\.jvm)"
)
"""What `tests/release` does, and servers and a cache that the tests share."""
NOT_OURS = r"export "


def commands() -> Iterator[str]:
    """The lines of its blocks, without comments, as they are to be typed."""
    for block in blocks(PAGE):
        if block.language == "":
            for line in block.text.splitlines():
                yield line.partition(" #")[0].strip()


def programs() -> dict[str, str]:
    """The page's programs by the name of their file, which is their first line."""
    texts = [block.text for block in blocks(PAGE) if block.language == "python"]
    return {text.partition("\n")[0].removeprefix("# "): text for text in texts}


def shown() -> set[str]:
    """The names of checks in the answers of `doctor` that the page shows."""
    answers = (block.text for block in blocks(PAGE) if block.language == "text")
    return {
        name
        for answer in answers
        for name in re.findall(r"^ *(?:ok|warn|wrong)  ((?:event store: )?[\w .]+):", answer, re.M)
    }


@pytest.fixture
def typed(
    database: FreshDatabase, kafka_server: Kafka, tmp_path: Path
) -> Callable[[str], subprocess.Popen[str]]:
    """Starts a line in a folder of its own, with this test's servers in place of the page's."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("EVENTPUB_")}
    environ |= {"EVENTPUB_STORE__URL": database.url, "EVENTPUB_OPS__HTTP": ""}
    environ["PYTHONPATH"] = str(ROOT)
    here = {
        r"mysql\+pymysql://\S+|\$EVENTPUB_STORE__URL": database.url,
        r"127\.0\.0\.1:19092|kafka-1:9092\S*": kafka_server.bootstrap_servers,
        "--seconds 30": "--seconds 3",
        "^eventpub ": f"{EVENTPUB} ",
        "^python ": f"{sys.executable} ",
    }

    def start(line: str) -> subprocess.Popen[str]:
        for named, is_here in here.items():
            line = re.sub(named, is_here, line)
        return subprocess.Popen(
            line.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=tmp_path, env=environ,
        )  # fmt: skip

    return start


def test_the_tutorial(typed: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    done: list[str] = []
    running: subprocess.Popen[str] | None = None

    for name, program in programs().items():
        (tmp_path / name).write_text(program)

    def answer(line: str) -> tuple[int, str]:
        child = typed(line)
        said, _ = child.communicate(timeout=900)
        return child.returncode, said

    def is_published(line: str) -> bool:
        return " published " in answer(line)[1]

    for line in commands():
        if re.match(NOT_OURS, line) or re.match(NOT_HERE, line):
            continue
        done.append(line)
        if line == "eventpub run":
            running = typed(line)
            eventually(lambda: answer("eventpub status")[0] == 0, 180)  # Spark starts slowly
            continue
        if line == "eventpub run --available-now":
            assert running is not None
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=60)
            assert running.returncode == 130
        if line.startswith("eventpub init"):  # it is there twice: with servers to try, and without
            (tmp_path / "eventpub.toml").unlink(missing_ok=True)
        if line.startswith("eventpub trace"):
            assert eventually(partial(is_published, line))
        status, said = answer(line)
        assert status == 0, f"{line}: {said}"
        if line == "eventpub doctor":
            assert {name for name in shown() if f" {name}: " not in said} == set()
        if line == "python look.py":
            assert len(re.findall(r"^b'.*' b'1' b'\w+' b'.*'$", said, re.M)) >= 1, said
    assert {" ".join(line.split()[:2]) for line in done if line.startswith("eventpub")} == {
        *("eventpub migrate", "eventpub init", "eventpub doctor", "eventpub run"),
        *("eventpub status", "eventpub verify", "eventpub trace"),
    }
    assert [line for line in done if line.startswith("python")][1:] == [
        *(f"python {name}" for name in programs()),
    ]


def test_append_writes_the_table_that_the_configuration_names(
    typed: Callable[[str], subprocess.Popen[str]], database: FreshDatabase, tmp_path: Path
) -> None:
    """It wrote a table called `events`, with the columns that `migrate` gives it."""
    database.execute(
        "CREATE TABLE ledger (no BIGINT AUTO_INCREMENT PRIMARY KEY, stream VARCHAR(64) NOT NULL,"
        " seq INT NOT NULL, what VARCHAR(64) NOT NULL, body JSON, at TIMESTAMP(6) NOT NULL DEFAULT"
        " CURRENT_TIMESTAMP(6), UNIQUE (stream, seq), KEY (at))"
    )
    (tmp_path / "append.py").write_text(programs()["append.py"])
    init = "eventpub init --table ledger --bootstrap-servers 127.0.0.1:19092"
    init += " --set store.columns.event_type=what --set store.columns.version=seq"
    for line in (init, "python append.py"):
        child = typed(line)
        said, _ = child.communicate(timeout=900)
        assert child.returncode == 0, said
    assert database.execute("SELECT stream, seq, what FROM ledger") == (("order-1", 1, "Created"),)
