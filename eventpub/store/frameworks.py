"""What `frameworks.toml` says of the names of columns and of the tables of frameworks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

_DATA = tomllib.loads(files("eventpub.store").joinpath("frameworks.toml").read_text("utf-8"))

NAMES: Mapping[str, list[str]] = _DATA["names"]
"""By our name of a column: what it is often called, as `plain` has it, the likeliest first."""
BESIDE_ID: list[str] = _DATA["beside_id"]


@dataclass(frozen=True)
class Framework:
    """A kind of table that is known.

    Attributes:
        name: of the framework.
        has, lacks: the columns by which its table is known, as `plain` has them.
        columns: by our names its own, as `plain` has them, where `NAMES` would take others.
        add: definitions of columns that are to be added, by name.
        first_version: version of an aggregate's first event.
        without_identity: what `store.without_identity` should be.
        note: what is to be known of what is published.
        refused: why the table cannot be published; "": it can.
    """

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


def recognise(columns: Iterable[str]) -> Framework:
    """The framework whose table has these columns; one without a name where none is known."""
    there = {plain(name) for name in columns}
    known = (f for f in FRAMEWORKS if there.issuperset(f.has) and there.isdisjoint(f.lacks))
    return next(known, Framework())


def holds_no_events(table: str) -> bool:
    """Whether a table of this name belongs to a framework, and is not the one of its events."""
    return any(part in plain(table) for part in _DATA["other_tables"])
