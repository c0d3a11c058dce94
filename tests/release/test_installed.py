"""What somebody gets who installs the wheel: all it needs comes with it, and it publishes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from eventpub import __version__
from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.harness import Topic, insert, transaction

ROOT = Path(__file__).parents[2]
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
STEPS = {("doctor",): 0, ("run", "--available-now"): 0, ("status",): 1, ("verify",): 0}
"""As a newcomer calls them, after `migrate` has made a table and `init` has found it; and how they
end: `status` says that no publisher runs any more."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of this clone."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, *PIP, "wheel", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_neither_bench_nor_tests_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        described = opened.read(f"eventpub-{__version__}.dist-info/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {
        "eventpub",
        f"eventpub-{__version__}.dist-info",
    }
    assert not [name for name in names if "bench/" in name or "test" in name]
    assert {"eventpub/py.typed", "eventpub/migrations/env.py"} <= set(names)
    assert f"Version: {__version__}\n" in described
    assert "License-Expression: Apache-2.0\n" in described
    assert len(re.findall("^Classifier: ", described, re.MULTILINE)) > 5


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## (Unreleased: )?{re.escape(__version__)}\b", changelog, re.MULTILINE)


def git(*arguments: str) -> list[str]:
    """The lines that it answers."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_a_tagged_commit_has_no_placeholders_and_they_are_listed_until_then() -> None:
    """Where documentation, source and issues are, only who publishes the project knows."""
    listed = (ROOT / "CONTRIBUTING.md").read_text().partition("## Before the first publication")[2]
    files = git("grep", "-l", "--fixed-strings", "docs.example.com", "--", ":!tests")
    places = {name for name in files if name != "CONTRIBUTING.md"}
    for name in places:
        assert f"`{name}`" in listed
    if any(re.fullmatch(r"v\d.*", tag) for tag in git("tag", "--points-at", "HEAD")):
        assert not places, "as CONTRIBUTING.md says: before the first publication"
        urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
        assert {"Documentation", "Repository", "Issues", "Changelog"} <= urls.keys()


@pytest.mark.long
def test_the_wheel_alone_publishes(
    wheel: Path, database: FreshDatabase, kafka_server: Kafka, topic_name: str, tmp_path: Path
) -> None:
    """In an environment of its own, with the libraries that it names itself, beside no clone."""
    environment, folder = tmp_path / "environment", tmp_path / "here"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python, program = (environment / "bin" / name for name in ("python", "eventpub"))
    subprocess.run([python, *PIP, "install", str(wheel)], check=True)
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("EVENTPUB_", "PYTHON", "VIRTUAL_ENV"))
    }

    def eventpub(*arguments: str) -> tuple[int, dict[str, object], str]:
        done = subprocess.run(
            [program, *arguments, "--json"],
            capture_output=True,
            text=True,
            cwd=folder,
            env=variables,
            check=False,
        )
        return done.returncode, json.loads(done.stdout), done.stderr

    status, said, log = eventpub("migrate", "--store-url", database.url)
    assert status == 0, (said, log)
    with transaction(database) as cursor:
        for version in range(1, 101):
            insert(cursor, f"order-{version % 3}", (version + 2) // 3)
        cursor.connection.commit()
    servers = ["--bootstrap-servers", kafka_server.bootstrap_servers]
    status, said, log = eventpub("init", "--url", database.url, *servers, "--topic", topic_name)
    assert status == 0, (said, log)
    assert said["result"]["table"] == "events"  # type: ignore[index]
    variables["EVENTPUB_STORE__URL"] = database.url  # not the account that has yet to be made
    for arguments, expected in STEPS.items():
        status, said, log = eventpub(*arguments)
        assert status == expected, (arguments, said, log)
    assert len(Topic(kafka_server.bootstrap_servers, topic_name).read()) == 100
    status, said, _ = eventpub("status")
    assert (status, said["result"]["kind"]) == (1, "stopped")  # type: ignore[index]
    assert said["result"]["status"]["counters"]["published"] == 100  # type: ignore[index]
    status, said, _ = eventpub("bench", "idle")
    assert (status, said["error"]["code"]) == (2, "bench.not_installed")  # type: ignore[index]
    imported = [str(python), "-X", "importtime", str(program), "run", "--help"]
    listed = subprocess.run(imported, capture_output=True, text=True, cwd=folder, check=True).stderr
    assert "eventpub.cli" in listed
    assert "eventpub.local" not in listed
