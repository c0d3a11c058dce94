"""Checks the built site for broken links and for anything that a page would fetch from elsewhere.

python docs/check_site.py SITE

Zensical checks the links in Markdown. This checks the generated HTML: also the navigation,
pictures, and pages that are HTML from the start.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href",
}  # fmt: skip
"""What a browser loads by itself; for `link`, except the relations below."""
_NAMES_ONLY = {"canonical", "next", "prev", "alternate", "author", "license"}


class _Page(HTMLParser):
    """Ids, links and fetched addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        names_only = tag == "link" and found.get("rel", "") in _NAMES_ONLY
        if FETCHED.get(tag) in found and not names_only:
            self.fetched.append(found[FETCHED[tag]])


def problems(site: Path) -> Iterator[str]:
    """The problems, a line each."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        if name.name == "404.html":  # its links are those of the site's root
            continue
        for address in page.fetched:
            if urlsplit(address).scheme not in {"", "data"} or address.startswith("//"):
                yield f"{name} fetches {address}"
        for address in [*page.links, *page.fetched]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            aim = aim / "index.html" if aim.is_dir() else aim
            if not aim.is_file():
                yield f"{name} → {address}: no such page"
            elif parts.fragment and aim in pages and unquote(parts.fragment) not in pages[aim].ids:
                yield f"{name} → {address}: no such anchor"
    for path in sorted(site.rglob("*.css")):
        for address in re.findall(r"url\(\s*[\"']?((?:https?:)?//[^\"')]+)", _text(path)):
            yield f"{path.relative_to(site)} fetches {address}"


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(_text(path))
    return page


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1]).resolve()))
    print("\n".join(found))
    sys.exit(bool(found))
