"""A real browser, and what the dashboard shows in it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

SIZES = {"wide": (1200, 900), "phone": (390, 844)}


@contextmanager
def chromium() -> Iterator[Browser | None]:
    """Chromium; None: this machine has none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        yield None
        return
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=arguments)
        yield launched
        launched.close()


class Dashboard:
    """The dashboard of one publisher, open from before something breaks until after.

    With the environment variable EVENTPUB_SCREENSHOTS each state that is asserted is kept in that
    folder: wide and as on a phone, light and dark.

    Args:
        page: None: nothing is asserted.
        name: of its pictures.
    """

    def __init__(self, page: Page | None, name: str) -> None:
        self._page = page
        self._name = name
        self._taken = 0

    def open(self, address: str) -> None:
        """Open it, and wait until it has shown a status."""
        if self._page is not None:
            self._page.goto(address)
            expect(self._page.locator("#shards tbody tr")).not_to_have_count(0)

    def says(
        self, pill: str, colour: str, wrong: str = "", within: float = 10.0, **shown: str
    ) -> None:
        """Assert what it shows, once it does.

        Args:
            pill: the word at its top; `colour`: ok, warn or error.
            wrong: below the pill, a regular expression; "": nothing.
            within: seconds.
            shown: regular expressions by id, with _ in place of -.
        """
        if self._page is None:
            return
        timeout = within * 1000
        expect(self._page.locator("#state")).to_have_text(pill, timeout=timeout)
        expect(self._page.locator("#state")).to_have_class(f"mark {colour}")
        words = re.compile(wrong or "^$", re.DOTALL)
        expect(self._page.locator("#wrong")).to_have_text(words, timeout=timeout)
        for name, pattern in shown.items():
            where = self._page.locator(f"#{name.replace('_', '-')}")
            expect(where).to_have_text(re.compile(pattern, re.DOTALL), timeout=timeout)
        if folder := os.environ.get("EVENTPUB_SCREENSHOTS"):
            self._take(self._page, Path(folder))

    def _take(self, page: Page, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._taken += 1
        for size, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                name = f"{self._name.replace(' ', '-')}-{self._taken}-{size}-{scheme}.png"
                page.screenshot(path=folder / name, full_page=True)
