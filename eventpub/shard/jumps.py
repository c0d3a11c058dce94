"""Versions that a fold finds on the topic, and that cannot have been published there in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eventpub.admission import Known, in_ranges

_MOST_SHOWN = 20
_LARGEST = 1000
"""Versions between two that are looked for one by one."""


class Jumps:
    """Collects, while an index that knew something is brought up to the topic.

    A publisher writes each version behind the one before; what is missing between is a recorded
    skip or a dead letter. Anything else was written by another program under this application's id,
    or the store was restored to an earlier time.

    Args:
        known: what the index knows of aggregates.
    """

    def __init__(self, known: Callable[[list[str]], Known]) -> None:
        self._known = known
        self._open: dict[str, tuple[int, int]] = {}
        self._dead: dict[str, set[int]] = {}

    def add(self, kind: str, versions: Mapping[str, Sequence[int]]) -> None:
        """One chunk, before the index takes it over."""
        if kind != "events":
            for aggregate_id, found in versions.items():
                self._dead.setdefault(aggregate_id, set()).update(found)
            return
        known = self._known(list(versions))
        for aggregate_id, found in versions.items():
            last = known.last.get(aggregate_id)
            if last is None or aggregate_id in self._open:
                continue
            skipped = known.skipped.get(aggregate_id, ())
            for version in sorted(v for v in found if v > last):
                between = range(last + 1, version)
                is_known = len(between) <= _LARGEST and all(in_ranges(v, skipped) for v in between)
                if not is_known:
                    self._open[aggregate_id] = (last, version)
                    break
                last = version

    def found(self) -> list[dict[str, Any]]:
        """The first few: `aggregate_id`, the last version that was `known`, and the one `found`."""
        return [
            {"aggregate_id": aggregate_id, "known": last, "found": version}
            for aggregate_id, (last, version) in self._open.items()
            if version - last > _LARGEST
            or not set(range(last + 1, version)) <= self._dead.get(aggregate_id, set())
        ][:_MOST_SHOWN]
