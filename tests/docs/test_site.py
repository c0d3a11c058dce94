"""The documentation's site: it builds, no link leads nowhere, nothing is fetched from elsewhere.

Its search finds what users ask for.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.ops.browser import chromium

ROOT = Path(__file__).parents[2]
CHECK = runpy.run_path(str(ROOT / "docs" / "check_site.py"))
FINISH = runpy.run_path(str(ROOT / "docs" / "finish_site.py"))
NAVIGATION = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def copied(to: Path) -> Path:
    shutil.copy(ROOT / "zensical.toml", to)
    shutil.copytree(ROOT / "docs", to / "docs")
    return to


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copied(tmp_path_factory.mktemp("docs"))
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    FINISH["finish"](folder / "site")
    return folder / "site"


def entries(of: list[dict[str, Any]]) -> Iterator[str]:
    for entry in of:
        for aim in entry.values():
            yield from [aim] if isinstance(aim, str) else entries(aim)


def test_every_link_leads_somewhere_and_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    assert not list(CHECK["problems"](site))


def test_every_item_of_a_list_is_one(site: Path) -> None:
    """Paragraphs below an item are indented by four, or the next item is text."""
    for page in site.rglob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", page.read_text(), re.DOTALL):
            assert not re.search(r"^\s*(?:\d+\.|[-*]) ", paragraph, re.MULTILINE), (
                f"{page}: {paragraph}"
            )


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """Of the developers' notes only the list."""
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    listed = list(entries(NAVIGATION))
    assert len(listed) == len(set(listed))
    assert pages - set(listed) == {page for page in pages if page.startswith("dev/2")}
    assert set(listed) - pages <= {"bench/index.html"}
    assert all((site / aim.replace("README.md", "index.html")).with_suffix(".html").exists()
               for aim in listed)  # fmt: skip


QUESTIONS = {
    "what if my table has no version": "how-to/eligible.html",
    "add a consumer": "how-to/consume.html",
    "dead letter": "operations.html",
}


def test_the_search_finds_the_page_of_a_question(site: Path) -> None:
    """Served as `script/docs --serve` does; pages that are opened as files have no search."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with chromium() as browser, ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if browser is None:
            pytest.skip("no Chromium on the PATH: apt-get install chromium")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        for question, aim in QUESTIONS.items():
            page.goto(f"http://127.0.0.1:{server.server_address[1]}/index.html")
            page.get_by_role("button", name="Search").click()
            page.keyboard.type(question)
            first = page.locator("a[href*='?h=']").first
            expect(first).to_have_attribute("href", re.compile(re.escape(f"/{aim}?")))
        server.shutdown()


def test_the_search_finds_no_notes_of_developers(site: Path) -> None:
    found = {item["location"] for item in json.loads((site / "search.json").read_text())["items"]}
    assert "tutorial.html" in found
    assert not [location for location in found if location.startswith("dev/")]
    assert not list(site.rglob("*.py"))


@pytest.mark.parametrize("link", ["[a](nowhere.md)", "[a](errors.md#nowhere)"])
def test_a_broken_link_fails_the_build(link: str, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    with (folder / "docs" / "source.md").open("a") as page:
        page.write(f"\n{link}\n")
    done = build(folder)
    assert done.returncode != 0
    assert "does not exist" in done.stdout + done.stderr


def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<link rel="canonical" href="https://docs.example/"><a href="https://x.example/">out</a>'
        '<a href="#there" id="there">ok</a><a href="#gone">1</a><a href="none.html">2</a>'
        '<img src="https://x.example/a.png"><script src="//x.example/a.js"></script>'
    )
    (tmp_path / "a.css").write_text("@font-face { src: url('https://x.example/a.woff2') }")
    said = list(CHECK["problems"](tmp_path))
    assert [line.partition("index.html ")[2] for line in said[:4]] == [
        "fetches https://x.example/a.png",
        "fetches //x.example/a.js",
        "→ #gone: no such anchor",
        "→ none.html: no such page",
    ]
    assert said[4:] == ["a.css fetches https://x.example/a.woff2"]
