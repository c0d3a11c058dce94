"""Pages that are made from the code say what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_page_is_current(page: str) -> None:
    current = (DOCS / page).read_text(encoding="utf-8") == PAGES[page]()
    assert current, "run: python docs/generate.py"


def test_codes_of_all_rooms_are_listed() -> None:
    page = PAGES["errors.md"]()
    for code in (
        "config.unknown_key",
        "config.unknown_environment",
        "store.index_missing",
        "sink.fenced",
        "verify.empty_range",
        "internal.unexpected",
        "state.disk_full",
    ):
        assert f"| `{code}` |" in page


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} → {target}"
