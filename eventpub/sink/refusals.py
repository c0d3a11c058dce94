"""The rows that the broker refuses: the error that names them, and how many come in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eventpub.errors import SinkError
from eventpub.terminal import counted

Refused = dict[str, dict[int, str]]
"""By topic, the rows that the broker refuses, and why."""


class RecordRefusedError(SinkError):
    """The broker or the client will never take some records; nothing of the batch was published.

    Args:
        by_topic: of each topic, indices into the rows given to it.
        reason: what the refusal said.

    Attributes:
        rows: all of them.
    """

    def __init__(self, by_topic: Mapping[str, Sequence[int]], reason: str) -> None:
        self.by_topic, self.reason = by_topic, reason
        self.rows = [row for rows in by_topic.values() for row in rows]
        super().__init__(
            "sink.record_refused",
            f"{counted(len(self.rows), 'record')} can never be published: {reason}",
            where=f"topic {next(iter(by_topic))}",
            suggestion="if the size is the reason, raise the topic's max.message.bytes and, in"
            " [sink.properties], message.max.bytes",
            retriable=True,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "type": SinkError.__name__}


class Refusals:
    """The rows that the broker has refused, for each part of a task.

    Attributes:
        before: how many in a row at the end of the task's last batch.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Refused] = {}
        self._rows: dict[int, dict[str, int]] = {}
        self._part = 0
        self.before = 0

    def begin(self, part: int) -> Refused:
        """A part is produced; the rows of it that are known to be refused."""
        self._part = part
        return self._parts.setdefault(part, {})

    def made(self, kept: Mapping[str, int]) -> None:
        """How many rows of the part in work are produced, by topic."""
        part = self._parts[self._part]
        topics = dict.fromkeys([*kept, *part])
        self._rows[self._part] = {t: kept.get(t, 0) + len(part.get(t, {})) for t in topics}

    def take(self, refusal: RecordRefusedError) -> bool:
        """Note what was refused of the part in work; False where nothing of it is new."""
        part = self._parts[self._part]
        before = sum(map(len, part.values()))
        for topic, rows in refusal.by_topic.items():
            known = part.setdefault(topic, {})
            numbers = [_among_all(row, known) for row in rows]
            known |= dict.fromkeys(numbers, f"{refusal.code}: {refusal.reason}")
        return sum(map(len, part.values())) > before

    def in_a_row(self) -> tuple[int, int]:
        """How many at most, and how many up to the last row of the parts that were produced."""
        longest, run = 0, self.before
        for number, topics in self._rows.items():
            for topic, rows in topics.items():
                last = -1
                for row in sorted(self._parts[number].get(topic, ())):
                    run = run + 1 if row == last + 1 else 1
                    longest, last = max(longest, run), row
                run = run if last == rows - 1 else 0
        return longest, run


def _among_all(row: int, refused: Mapping[int, str]) -> int:
    """The number that a row has among all, which it has among those that are not refused."""
    for each in sorted(refused):
        row += each <= row
    return row
