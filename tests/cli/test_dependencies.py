"""A plain install has what the commands import: what only extras install is not needed by them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

_IMPORTS_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import eventpub
for module in pkgutil.walk_packages(eventpub.__path__, "eventpub."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def test_every_module_is_imported_without_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {_name(r) for r in project["dependencies"]}
    extras = {_name(r) for of in project["optional-dependencies"].values() for r in of}
    absent = sorted(name.replace("-", "_") for name in extras - needed - {"eventpub"})
    assert "psutil" in absent
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS_ALL, *absent], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0].lower()
