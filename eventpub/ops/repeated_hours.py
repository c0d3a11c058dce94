"""The hours that a local time has twice, where the clocks go back, as `replay` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from eventpub.admission import EVENTS, values
from eventpub.config import Config
from eventpub.sink import records
from eventpub.sink.reading import Place, offsets_at, own_records, read_committed
from eventpub.sink.topics import partition_counts
from eventpub.sources.mysql import Layout

Key: TypeAlias = tuple[str, int]
"""Aggregate and version."""

_DAY = 24 * 3600 * 1_000_000
"""µs: where an event created so much later was published, what comes behind it is later, too."""


def keys_of(rows: pa.Table) -> list[Key]:
    """Aggregate and version of each row."""
    return list(zip(values(rows, "aggregate_id"), values(rows, "version"), strict=True))


@dataclass(frozen=True)
class RepeatedHours:
    """Which instant a local time is that stands for two, since the clocks went back.

    The publisher reads these rows before the change, as of the first pass, and again behind it, as
    of the second: what it has not published by then was written in the second. The table cannot
    tell afterwards, but the topic can. What is not there any more counts as of the first pass.

    Attributes:
        changes: the instants at which the clocks go back within the range, and by how much, µs.
        second: the events of the second passes.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    second: set[Key] = field(default_factory=set)

    def once(self, rows: pa.Table) -> pa.Table:
        """Rows of a window without those that are of the other pass."""
        created = rows.column("create_time").to_numpy()
        is_first, is_second = self._passes(created)
        if not (is_first.any() or is_second.any()):
            return rows
        keys = (key in self.second for key in keys_of(rows))
        was_second = np.fromiter(keys, bool, rows.num_rows)
        return rows.filter(pa.array(~((is_first & was_second) | (is_second & ~was_second))))

    def timed(self, rows: pa.Table) -> pa.Table:
        """Rows that were read as of the first pass, each with its time."""
        created = rows.column("create_time").to_numpy()
        if not self._passes(created)[0].any():
            return rows
        of_each = zip(keys_of(rows), created.tolist(), strict=True)
        times = [self.instant(key, at) for key, at in of_each]
        place = rows.schema.get_field_index("create_time")
        return rows.set_column(place, EVENTS.field("create_time"), pa.array(times, pa.int64()))

    def instant(self, key: Key, created: int) -> int:
        """When an event was created, by what it would be of the first pass."""
        if key in self.second:
            for change, back in self.changes:
                if change - back <= created < change:
                    return created + back
        return created

    def _passes(self, created: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_first, is_second = np.zeros((2, len(created)), bool)
        for change, back in self.changes:
            is_first |= (created >= change - back) & (created < change)
            is_second |= (created >= change) & (created < change + back)
        return is_first, is_second

    @classmethod
    def of_range(cls, config: Config, layout: Layout, first: int, last: int) -> RepeatedHours:
        """What the topic says of the repeated hours of a range."""
        changes = [
            (change, back)
            for change, back in layout.repeated
            if change - back <= last and first < change + back
        ]
        hours = cls(changes)
        if not changes:
            return hours
        sink = config.sink
        counts = partition_counts(sink)
        places: list[Place] = [
            (topic, number)
            for topic in (sink.topic, sink.late_topic)
            for number in range(counts.get(topic, 0))
        ]
        ids = {config.app.id, *config.app.former_ids}
        for change, back in changes:
            reading, passed = read_committed(sink, offsets_at(sink, places, change // 1000)), set()
            for message, headers in own_records(reading, ids):
                if records.TIME not in headers:
                    continue
                created = int(records.parse_times([headers[records.TIME].decode()])[0])
                if change <= created < change + back:
                    hours.second.add((message.key().decode(), int(headers[records.SEQUENCE])))
                elif created >= change + back + _DAY:
                    passed.add((message.topic(), message.partition()))
                    if reading.unread <= passed:
                        break
            reading.close()
        return hours
