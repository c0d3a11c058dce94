"""What the planner sees of the database: for the log and the status of the publisher.

A planner runs in a process of Spark's, so the publisher learns it by notes, about one a second. In
a user's own job the lines go to that process's log, and there is no status.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from eventpub.config import Config
from eventpub.coordinator.database_changes import DatabaseChanges
from eventpub.coordinator.events import Command, Log, Reassign
from eventpub.coordinator.newest import NewestRows
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.recounting import Recounting
from eventpub.errors import EventpubError, StoreError
from eventpub.sources.mysql import Layout

_NOTED_EVERY = 1.0
_SAID_EVERY = 60.0
"""Seconds between two warnings that something does not answer."""

_SEEN = ("server", "watermark", "ahead_seconds", "rows_ahead")
_COUNTED = ("rows_in_past", "comparisons", "passed")
"""What a note has of `Progress`: as it is, and by how much it has grown since the note before."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


@dataclass
class Table:
    """As of `database_changes.Known`."""

    position: int
    layout: Layout
    newest: tuple[int, int] | None
    open_hidden_since: int | None = None


class Observed:
    """See the module. Pure but for the notes: times are the machine's, s, and arguments.

    Args:
        put: takes notes; None: of a user's own job.
    """

    def __init__(self, put: Callable[[dict[str, Any]], None] | None) -> None:
        self.progress = Progress()
        self._put = put
        self._lines: list[tuple[str, str, dict[str, Any]]] = []
        self._checks: dict[str, tuple[str, str]] = {}
        self._counted = dict.fromkeys(_COUNTED, 0)
        self._is_altered = False
        self._at = self._said_at = float("-inf")

    @property
    def is_of_publisher(self) -> bool:
        """Whether a publisher takes the notes."""
        return self._put is not None

    def begin(
        self, config: Config, start: int | None, server: str, table: Table, recounting: Recounting
    ) -> DatabaseChanges:
        """What judges polls and samples, and has what is odd counted again.

        Args:
            start: nothing created at or before is of interest, µs.
            server: identity of the database server that was read before; "": not known.
        """
        self.progress.server = server
        newest = NewestRows(config.recount.horizon, start or 0, table.newest)
        is_fatal = config.recount.rows_in_past == "stop"
        return DatabaseChanges(newest, recounting, table, self.progress, self.do, is_fatal=is_fatal)

    def do(self, command: Command) -> None:
        """Take what is to be logged, or what the table looks like now."""
        self._is_altered = self._is_altered or isinstance(command, Reassign)
        if isinstance(command, Log):
            if self._put is None:
                getattr(log, command.level)(command.text, **command.facts)
            else:
                self._lines.append((command.level, command.text, dict(command.facts)))

    def mark(self, check: str, message: str) -> None:
        """A check warns of this; of nothing where the message is empty."""
        self._checks[check] = "warn" if message else "ok", message

    def polled(self, now: float) -> None:
        """The database has answered."""
        self._checks |= {"database": ("ok", ""), "boundary": ("ok", "")}
        self._note(now)

    def failed(self, error: EventpubError, now: float) -> None:
        """The database, or the state's location, did not answer."""
        is_of_store = isinstance(error, StoreError)
        failing = ["boundary", *["database"] * is_of_store]
        self._checks |= dict.fromkeys(failing, ("error", f"{error.code}: {error.message}"))
        self._note(now, str(error))
        if self._put is None and now - self._said_at > _SAID_EVERY:
            self._said_at = now
            what = "the database" if is_of_store else "the state's location"
            log.warning(f"waiting for {what}", code=error.code, error=error.message)

    def _note(self, now: float, error: str | None = None) -> None:
        if self._put is None or (now - self._at < _NOTED_EVERY and not self._lines):
            return
        before = self._counted
        self._counted = {name: getattr(self.progress, name) for name in _COUNTED}
        seen = {name: getattr(self.progress, name) for name in _SEEN}
        if not self.progress.server:  # before the first poll
            del seen["server"]
        note = {
            "lines": self._lines,
            "checks": self._checks,
            "seen": seen,
            "error": error,
            "altered": self._is_altered,
            "counted": {name: count - before[name] for name, count in self._counted.items()},
        }
        self._lines, self._at, self._is_altered = [], now, False
        self._put(note)
