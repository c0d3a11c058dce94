"""Each command line of the pages is one that the program takes; what they configure exists.

Those that need servers are run in `test_how_to` and in `tests/release`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from eventpub.cli import eventpub
from eventpub.settings import KEYS, MAPS, variable_of
from tests.docs.pages import PAGES, ROOT, blocks, command_lines

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FOR_USERS = [page for page in PAGES if page.parent.name != "dev"]


def parse(arguments: list[str]) -> str:
    """As the program parses it, without doing it; the command's path."""
    context = eventpub.make_context("eventpub", list(arguments))
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context.command_path


@pytest.mark.parametrize("page", FOR_USERS, ids=[str(p.relative_to(ROOT)) for p in FOR_USERS])
def test_each_command_line_is_taken(page: Path) -> None:
    for arguments in command_lines(page):
        try:
            parse(arguments)
        except click.ClickException as error:
            pytest.fail(f"eventpub {' '.join(arguments)}: {error.format_message()}")


def test_a_wrong_command_line_would_be_seen() -> None:
    for wrong in (
        ["publish"],
        ["publsh", "a"],
        ["run", "--until", "now"],
        ["gaps", "skip"],
        ["run", "now"],
    ):
        with pytest.raises(click.ClickException):
            parse(wrong)
    assert parse(["gaps", "skip", "a", "--yes"]) == "eventpub gaps skip"
    found = {tuple(a[:2]) for page in FOR_USERS for a in command_lines(page)}
    assert {("run",), ("verify",), ("gaps", "list"), ("status",)} <= found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_modules_and_scripts_that_are_called_exist(page: Path) -> None:
    for block in blocks(page):
        for module in re.findall(r"python3? -m ((?:eventpub|bench)[\w.]*)", block.text):
            assert importlib.util.find_spec(module), module
        for script in re.findall(r"^\s*(script/\w+)", block.text, re.MULTILINE):
            assert (ROOT / script).is_file(), script


@cache
def help_of(module: str) -> str:
    """What a module says of its options."""
    command = [sys.executable, "-m", module, "--help"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout


@pytest.mark.parametrize("page", FOR_USERS, ids=[str(p.relative_to(ROOT)) for p in FOR_USERS])
def test_modules_that_are_called_have_the_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for module, rest in re.findall(r"python3? -m ((?:eventpub|bench)[\w.]*)([^`\n#]*)", text):
        for option in re.findall(r"(?<!\S)--[\w-]+", rest):
            assert option in help_of(module), f"{module} {option}"


def test_the_script_of_the_unit_gives_a_command_the_services_configuration(tmp_path: Path) -> None:
    (script,) = (
        block.text
        for block in blocks(ROOT / "docs" / "how-to" / "deploy.md")
        if block.language == "sh" and block.text.startswith("#!/bin/sh")
    )
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nenv | grep ^EVENTPUB_ | sort\npwd\necho "$@"\n')
    program.chmod(0o755)
    (tmp_path / "secrets").write_text("EVENTPUB_STORE__PASSWORD='a $b c'\n")
    for named, is_here in (
        ("setpriv --reuid=eventpub --regid=eventpub --init-groups ", ""),
        ("/opt/eventpub/bin/eventpub", str(program)),
        ("/etc/eventpub/secrets", str(tmp_path / "secrets")),
        ("cd /var/lib/eventpub", f"cd {tmp_path}"),
    ):
        assert named in script
        script = script.replace(named, is_here)
    command = ["sh", "-c", script, "eventpub", "trace", "an id"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout.splitlines() == [
        "EVENTPUB_APP__STATE_DIR=/var/lib/eventpub/state",
        "EVENTPUB_CONFIG=/etc/eventpub/eventpub.toml",
        "EVENTPUB_STORE__PASSWORD=a $b c",
        str(tmp_path),
        "trace an id",
    ]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_configurations_have_only_keys_that_exist(page: Path) -> None:
    for block in blocks(page):
        texts = [block.text] if block.language == "toml" else []
        if block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                texts += (document.get("data") or {}).values()
        for text in texts:
            for name in flat(tomllib.loads(text)):
                assert name in KEYS, f"{page.name}: {name}"
        if block.language in {"toml", "yaml", "ini", ""}:
            for variable in re.findall(r"\bEVENTPUB_[A-Z_]*__[A-Z_]+", block.text):
                assert any(
                    variable == variable_of(name)
                    or (name in MAPS and variable.startswith(f"{variable_of(name)}__"))
                    for name in KEYS
                ), variable


def flat(found: dict[str, object], before: str = "") -> list[str]:
    """The names of all keys, those of a map (`sink.properties`) as the map's."""
    names: list[str] = []
    for key, value in found.items():
        name = before + key
        if isinstance(value, dict) and name not in MAPS:
            names += flat(value, f"{name}.")
        else:
            names.append(name)
    return names


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("systemd-analyze is not installed")
    (unit,) = (
        block.text
        for block in blocks(ROOT / "docs" / "how-to" / "deploy.md")
        if block.language == "ini" and "[Service]" in block.text
    )
    unit = unit.replace("/opt/eventpub/bin/eventpub", "/bin/true").replace("User=eventpub\n", "")
    path = tmp_path / "eventpub.service"
    path.write_text(unit)
    done = subprocess.run([systemd, "verify", path], capture_output=True, text=True, check=False)
    about_it = [line for line in done.stderr.splitlines() if "eventpub.service" in line]
    assert not about_it, done.stderr
    path.write_text(unit.replace("Restart=on-failure", "Restart=whenever"))
    done = subprocess.run([systemd, "verify", path], capture_output=True, text=True, check=False)
    assert "eventpub.service" in done.stderr
