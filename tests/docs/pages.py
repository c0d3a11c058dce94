"""The pages as tests read them: their blocks of code, and the command lines in these."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
_CALLER = re.compile(
    r"(?:sudo |kubectl exec \S+ -- |docker compose exec publisher )?eventpub "
    r"|docker compose run --rm publisher "
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@dataclass(frozen=True)
class Block:
    """A block of code: its language ("" where it names none) and its lines, not indented."""

    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Of a page, between fences or indented, also those inside of lists."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    indented: list[str] = []
    for line in lines:
        if fence := re.fullmatch(r"( *)```(\w*)", line):
            inside = []
            for inner in lines:
                if inner.strip() == "```":
                    break
                inside.append(inner.removeprefix(fence[1]))
            yield Block(fence[2], "\n".join(inside) + "\n")
        elif re.match(r" {4}", line):
            indented.append(line.strip())
            continue
        if indented and line.strip():
            yield Block("", "\n".join(indented) + "\n")
            indented = []
    if indented:
        yield Block("", "\n".join(indented) + "\n")


def command_lines(page: Path) -> Iterator[list[str]]:
    """Each call of `eventpub` in the code of a page, as its arguments.

    Those of a shell, in a systemd unit, and what a container gets whose entry point it is.
    """
    for block in blocks(page):
        if block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                yield from _of_containers(document)
        elif block.language == "ini":
            yield from (shlex.split(line)[1:] for line in re.findall("ExecStart=(.*)", block.text))
        elif block.language in {"", "sh", "bash"}:
            yield from _of_shell(block.text)


def _of_shell(text: str) -> Iterator[list[str]]:
    text = re.sub(r"[\[\]]", "", text.replace("\\\n", " "))  # in a synopsis what may be left out
    for line in re.split(r"\n| && ", text):
        command = line.strip().removeprefix("$ ")
        if caller := _CALLER.match(command):
            yield shlex.split(command[caller.end() :], comments=True)


def _of_containers(found: object) -> Iterator[list[str]]:
    if isinstance(found, dict):
        if "image" in found and "args" in found:
            yield list(found["args"])
        for value in found.values():
            yield from _of_containers(value)
    elif isinstance(found, list):
        for value in found:
            yield from _of_containers(value)
