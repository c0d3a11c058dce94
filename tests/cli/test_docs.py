"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from eventpub.cli import eventpub
from eventpub.settings import KEYS, SECTIONS

DOCS = Path(__file__).parents[2] / "docs"
TESTS = DOCS.parent / "tests"
WRITTEN = sorted([*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")])
NAMES = [str(page.relative_to(DOCS.parent)) for page in WRITTEN]
PAGES = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_page_is_current(page: str) -> None:
    current = (DOCS / page).read_text(encoding="utf-8") == PAGES[page]()
    assert current, "run: python docs/generate.py"


def test_every_code_of_an_error_is_listed() -> None:
    listed = _sections()
    for code in ("sink.fenced", "run.paused", "shard.failed", "internal.unexpected"):
        assert code in listed
    for path in sorted(DOCS.parent.glob("eventpub/**/*.py")):
        for code in _codes_raised(path):
            assert code in listed, f"{path}: {code}"


def test_every_error_says_how_to_fix_it() -> None:
    sections = _sections()
    assert len(sections) > 100
    # who stops a command knows how to start it again
    without = [code for code, text in sections.items() if "\n**Fix:**" not in text]
    assert without == ["cli.stopped"]


def test_every_error_has_one_anchor_and_says_whether_it_is_retriable() -> None:
    sections = _sections()
    assert len({_anchor(code) for code in sections}) == len(sections)
    assert _anchor("store.row_invalid") == "storerow_invalid", "as the page says"
    retriable = {code for code, text in sections.items() if "\nRetriable" in text}
    assert {"sink.unreachable", "store.unreachable", "index.locked"} <= retriable
    assert not retriable & {"store.row_invalid", "sink.fenced", "internal.unexpected"}
    for code, text in sections.items():
        # a table is wider than a phone
        assert "\n|" not in text, code


@cache
def _sections() -> dict[str, str]:
    """What the page says of each code."""
    parts = re.split(r"^### (\S+)\n", PAGES["errors.md"](), flags=re.MULTILINE)[1:]
    codes = parts[::2]
    assert len(set(codes)) == len(codes)
    return dict(zip(codes, parts[1::2], strict=True))


def test_the_pictures_are_current() -> None:
    drawing = runpy.run_path(str(DOCS / "explanation" / "draw.py"))
    for name, picture in drawing["PICTURES"].items():
        current = (DOCS / "explanation" / name).read_text(encoding="utf-8") == picture()
        assert current, "run: python docs/explanation/draw.py"


@pytest.mark.parametrize("name", ["scenarios.md", "hazards.md"])
def test_the_tests_that_a_page_names_exist(name: str) -> None:
    for file, test in re.findall(r"(test_\w+\.py)(?:::(\w+))?", _text(DOCS / name)):
        there = [_text(found) for found in TESTS.rglob(file)]
        assert any(f"def {test}" in code for code in there), f"{name}: {file}::{test}"


@pytest.mark.parametrize("page", WRITTEN, ids=NAMES)
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", _text(page)):
        aim = page.parent / target if target else page
        assert aim.exists(), f"{page.name} → {target}"
        if anchor:
            assert anchor in _anchors(aim), f"{page.name} → {target}#{anchor}"


@pytest.mark.parametrize("page", WRITTEN, ids=NAMES)
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in _commands(_text(page)):
        command: click.Command = eventpub
        for word in shlex.split(line, comments=True)[1:]:
            if word.startswith("--"):
                context = click.Context(command, help_option_names=["-h", "--help"])
                options = {o for p in command.get_params(context) for o in p.opts}
                assert word.partition("=")[0] in options, f"{page.name}: {line}"
            elif isinstance(command, click.Group) and re.fullmatch("[a-z]+", word):
                assert word in command.commands, f"{page.name}: {line}"
                command = command.commands[word]


@pytest.mark.parametrize("page", WRITTEN, ids=NAMES)
def test_keys_and_codes_exist(page: Path) -> None:
    codes = _sections().keys()
    modules = {f"{path.parent.name}/{path.name}" for path in DOCS.parent.rglob("eventpub/**/*.py")}
    sections = "|".join(re.escape(section) for section in SECTIONS)
    for name in re.findall(
        rf"`((?:{sections}|state|index)\.[a-z_]+)(?<!\.json)(?:`| = )", _text(page)
    ):
        known = name in KEYS or name in codes or name in SECTIONS
        assert known or f"{name.replace('.', '/')}.py" in modules, f"{page.name}: {name}"


def _codes_raised(path: Path) -> Iterator[str]:
    """What stands first in calls of an error's class."""
    for call in ast.walk(ast.parse(_text(path))):
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            code = str(call.args[0].value)
            if name.endswith("Error") and re.fullmatch(r"[a-z]+\.[a-z_]+", code):
                yield code


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    return {_anchor(h) for h in re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _commands(text: str) -> Iterator[str]:
    """What begins with ``eventpub`` in code."""
    for line in re.findall(r"^(?:    |```\n)(eventpub .*)$", text, re.MULTILINE):
        yield from line.split(" && ")
    for line in re.findall(r"`(eventpub [^`\n]+)`", text):
        yield line.replace("[", "").replace("]", "")
