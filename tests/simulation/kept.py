"""Schedules that failed once: `kept.json` has each, shrunk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.schedule import Schedule

_FILE = Path(__file__).with_name("kept.json")


@dataclass(frozen=True)
class Kept:
    """One of them.

    Attributes:
        seed: that made the schedule, shrunk since.
        was: what it violated.
        of: the kind of schedule that the seed made.
    """

    seed: int
    was: str
    schedule: Schedule
    of: str = "any"


def kept() -> list[Kept]:
    """All of them, the oldest first."""
    return [
        Kept(entry["seed"], entry["was"], Schedule.from_json(entry), entry.get("of", "any"))
        for entry in _entries()
    ]


def keep(seed: int, was: str, schedule: Schedule, of: str) -> None:
    """Add one."""
    entry = {"seed": seed, "was": was, "of": of, **schedule.as_json()}
    entries = [*_entries(), entry]
    text = ",\n".join(json.dumps(entry) for entry in entries)
    _FILE.write_text(f"[\n{text}\n]\n")


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(_FILE.read_text())
    return entries
