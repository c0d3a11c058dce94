"""The size of the package may only fall.

`tests/size.json` has the numbers that are kept. A change that makes `eventpub/` larger is paid for
by removing something; one that makes it much smaller lowers the numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SLACK = {"lines": 300, "files": 5}
"""By how much the kept numbers may be above the truth."""


def size(folder: Path) -> dict[str, int]:
    """Lines and files of the Python code in a folder."""
    files = [file for file in folder.rglob("*.py") if "__pycache__" not in file.parts]
    lines = sum(len(file.read_bytes().splitlines()) for file in files)
    return {"lines": lines, "files": len(files)}


def problems(kept: dict[str, int], found: dict[str, int]) -> list[str]:
    """What is wrong with the kept numbers, in words."""
    wrong = []
    for name, limit in kept.items():
        if found[name] > limit:
            wrong.append(f"eventpub/ has {found[name]:,} {name}, more than {limit:,}: remove some")
        elif limit - found[name] > SLACK[name]:
            wrong.append(
                f"eventpub/ has only {found[name]:,} {name}: lower the {limit:,} of tests/size.json"
            )
    return wrong


def test_the_package_does_not_grow() -> None:
    kept = json.loads((TESTS / "size.json").read_text())
    found = size(TESTS.parent / "eventpub")
    assert kept.keys() == found.keys()
    assert not problems(kept, found), found


@pytest.mark.parametrize(
    ("lines", "files", "said"),
    [
        (1_000, 10, []),
        (700, 5, []),
        (1_001, 10, ["1,001 lines, more than 1,000: remove some"]),
        (1_000, 11, ["11 files, more than 10: remove some"]),
        (699, 4, ["only 699 lines: lower the 1,000", "only 4 files: lower the 10"]),
    ],
)
def test_the_numbers_may_only_fall_and_are_lowered(lines: int, files: int, said: list[str]) -> None:
    kept = {"lines": 1_000, "files": 10}
    found = problems(kept, {"lines": lines, "files": files})
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))
