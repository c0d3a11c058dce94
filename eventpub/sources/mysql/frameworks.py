"""What `frameworks.toml` says of the names of columns and of the tables of frameworks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files

_DATA = tomllib.loads(files(__package__).joinpath("frameworks.toml").read_text("utf-8"))
BESIDE_ID: list[str] = _DATA["beside_id"]
_OTHER_TABLES: list[str] = _DATA["other_tables"]
_NAMES: dict[str, list[str]] = _DATA["names"]


@dataclass(frozen=True)
class Framework:
    """A kind of table that is known, as `frameworks.toml` describes it; unknown without a name."""

    name: str = ""
    has: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    columns: dict[str, str | list[str]] = field(default_factory=dict)
    add: dict[str, str] = field(default_factory=dict)
    first_version: int = 1
    without_identity: str = "stop"
    note: str = ""
    refused: str = ""


FRAMEWORKS = [Framework(**entry) for entry in _DATA["framework"]]


def plain(name: str) -> str:
    """A name as it is compared."""
    return name.lower().replace("_", "").replace("-", "")


def rank(role: str, name: str) -> int:
    """How well a name fits one of our columns; 0: it is none that such columns have."""
    known, name = _NAMES[role], plain(name)
    return len(known) - known.index(name) if name in known else 0


def recognise(columns: Iterable[str]) -> Framework:
    """The framework whose table has these columns."""
    there = {plain(name) for name in columns}
    known = (f for f in FRAMEWORKS if there.issuperset(f.has) and there.isdisjoint(f.lacks))
    return next(known, Framework())


def holds_no_events(table: str) -> bool:
    """Whether a table of this name belongs to a framework, and is not the one of its events."""
    return any(part in plain(table) for part in _OTHER_TABLES)
