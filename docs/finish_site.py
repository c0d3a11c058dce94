"""Removes from the built site what is not for its readers.

python docs/finish_site.py SITE

Scripts are deleted. Developers' notes stay, but are left out of the search: they contain the words
of every other page and answer no user's question.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NOTES = ("dev/", "hazards.", "scenarios.", "simulation.")


def finish(site: Path) -> None:
    """Change the site in place."""
    for program in site.rglob("*.py"):
        program.unlink()
    file = site / "search.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    index["items"] = [item for item in index["items"] if not item["location"].startswith(NOTES)]
    file.write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    finish(Path(sys.argv[1]))
