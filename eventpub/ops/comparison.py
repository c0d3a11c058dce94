"""Comparing the store's rows with the topic's records, one bucket of aggregates after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub.ops.records import (
    DEAD,
    DIVERTED,
    EVENT,
    FAULTS,
    GAP,
    LATE,
)
from eventpub.ops.spill import crc32s
from eventpub.ops.verify import STORE_FIELDS, TOPIC_FIELDS, Difference, Verdict

Number = npt.NDArray[Any]


def compare(  # noqa: PLR0913 (both sides, and how they are compared)
    rows: pa.Table,
    records: pa.Table,
    verdict: Verdict,
    *,
    numbers: Sequence[int],
    late_policy: Literal["publish", "divert", "drop"] = "publish",
    clock_changes: Collection[int] = (),
    still_there: Callable[[Sequence[tuple[str, int]]], set[tuple[str, int]]] = lambda _: set(),
) -> None:
    """Compare all rows and all records of some aggregates, and add what is found to the verdict.

    Args:
        rows: of the store, as `store_columns` makes them.
        records: of all topics, as `TopicReader` gives them, each partition in its order.
        numbers: of the topic's partitions, those that it had before first.
        late_policy: `gaps.late`.
        clock_changes: by how much, µs, clocks go back: a row of the hour that is lived twice is
            read at both of its times.
        still_there: which of some events the store has now; asked for those it did not have.
    """
    _Comparison(
        rows,
        records,
        verdict,
        numbers=numbers,
        late_policy=late_policy,
        clock_changes=clock_changes,
        still_there=still_there,
    ).run()


class _Comparison:
    """One bucket: every event has a number, `key`, that ascends by aggregate, then by version."""

    def __init__(  # noqa: PLR0913 (both sides, and how they are compared)
        self,
        rows: pa.Table,
        records: pa.Table,
        verdict: Verdict,
        *,
        numbers: Sequence[int],
        late_policy: str,
        clock_changes: Collection[int],
        still_there: Callable[[Sequence[tuple[str, int]]], set[tuple[str, int]]],
    ) -> None:
        self.verdict = verdict
        self.late_policy = late_policy
        self.clock_changes = [*clock_changes]
        self.still_there = still_there
        ids = pa.chunked_array(
            [
                *rows.column("aggregate_id").chunks,
                *records.column("aggregate_id").chunks,
            ],
            pa.string(),
        )
        encoded: Any = ids.combine_chunks().dictionary_encode()
        self.names: list[str] = encoded.dictionary.to_pylist()
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        self.store = {name: _numpy(rows, name) for name in STORE_FIELDS}
        self.topic = {name: _numpy(records, name) for name in TOPIC_FIELDS}
        versions = np.concatenate([self.store["version"], self.topic["version"]])
        distinct, places = np.unique(versions, return_inverse=True)
        key = codes * max(len(distinct), 1) + places
        split = rows.num_rows
        self.store["code"], self.topic["code"] = codes[:split], codes[split:]
        self.store["key"], self.topic["key"] = key[:split], key[split:]
        hashes = crc32s(self.names)
        self._partitions_of = [(hashes % number).astype(np.int32) for number in numbers]

    def run(self) -> None:
        """Every kind of difference, one after the other."""
        if self._are_equal():
            return
        verdict, topic = self.verdict, self.topic
        known, first_row, times_stored = np.unique(
            self.store["key"], return_index=True, return_counts=True
        )
        verdict.events += len(known)
        if len(known) < len(self.store["key"]):
            self._doubled()
        kind = topic["kind"]
        verdict.skips += int((kind == GAP).sum())

        is_event = (kind == EVENT) | (kind == LATE)
        matched = np.isin(topic["key"], known)
        times = topic["create_time"]
        in_range = (times >= verdict.first) & (times <= verdict.last)
        # in the order of publishing, per event: the first is right, the others are repeats
        events = np.flatnonzero(is_event & (matched | in_range))
        verdict.records += len(events)
        events = events[np.lexsort((topic["offset"][events], topic["key"][events]))]
        keys = topic["key"][events]
        is_first = np.ones(len(events), bool)
        is_first[1:] = keys[1:] != keys[:-1]
        firsts = events[is_first]
        verdict.accounted["late"] += int((kind[firsts] == LATE).sum())

        self._report("repeated", events[~is_first], "published again")
        self._order(firsts[kind[firsts] == EVENT])
        self._altered(events[matched[events]], known, first_row, times_stored > 1)
        self._extra(firsts[~matched[firsts]])
        self._missing(first_row[~np.isin(known, keys)])

    def _are_equal(self) -> bool:
        """Whether the sides are plainly the same, as they mostly are; then they are counted.

        For a small part of what it takes to say what differs.
        """
        verdict, topic, store = self.verdict, self.topic, self.store
        times = topic["create_time"]
        inside = (times >= verdict.first) & (times <= verdict.last)
        count = len(store["key"])
        if int(inside.sum()) != count or len(self._partitions_of) > 1:
            return False
        if not inside.all():
            topic = {name: column[inside] for name, column in topic.items()}
        if topic["kind"].any() or topic["faults"].any() or self._has_kept_back(inside):
            return False
        if (topic["partition"] != self._partitions_of[0][topic["code"]]).any():
            return False
        # each aggregate's in the order of publishing: that must be the versions' order
        order = np.lexsort((topic["offset"], topic["code"]))
        published = topic["key"][order]
        if (published[1:] <= published[:-1]).any():
            return False
        stored = np.argsort(store["key"], kind="stable")
        for name in ("key", "payload", "type", "create_time", "metadata"):
            if not np.array_equal(store[name][stored], topic[name][order]):
                return False
        verdict.events += count
        verdict.records += count
        return True

    def _has_kept_back(self, inside: Number) -> bool:
        """Whether what is outside of the range is more than events of other times."""
        outside = ~inside
        if not outside.any():
            return False
        return bool(
            (self.topic["kind"][outside] != EVENT).any()
            or np.isin(self.topic["key"][outside], self.store["key"]).any()
        )

    def _order(self, events: Number) -> None:
        """Per aggregate, by offset: each version above all before it.

        Where partitions were added, what stands in its former partition came before the others.
        """
        code, partition, offset = (self.topic[n][events] for n in ("code", "partition", "offset"))
        version = np.unique(self.topic["key"][events], return_inverse=True)[1]
        epochs = self._epochs(code, partition, version)
        # versions of another aggregate are lower for all of it: only within one do they go down
        is_behind = _is_below(version, np.lexsort((offset, epochs, code)))
        most = int(partition.max(initial=0)) + 1
        place = np.unique(code * most + partition, return_inverse=True)[1]
        is_behind |= _is_below(place * len(events) + version, np.lexsort((offset, place)))
        self._report("out_of_order", events[is_behind], "after a later version")

    def _epochs(self, code: Number, partition: Number, version: Number) -> Number:
        """With which number of partitions each event was published, as its place among them.

        That of the first one that explains its partition, and that did not end before a lower
        version of its aggregate was published. (With 4, 6, then 8 partitions an aggregate's may be
        3, 1, and 3 again.) Where there is no such one, the first that explains it; else their
        number.
        """
        count = len(self._partitions_of)
        first_from: Number = np.full((count + 1, len(code)), count)
        for number in reversed(range(count)):
            fits = partition == self._partitions_of[number][code]
            first_from[number] = np.where(fits, number, first_from[number + 1])
        epochs: Number = first_from[0].copy()
        order = np.argsort(version)
        base = code[order] * count
        while True:
            known = epochs[order] % count  # what nothing explains says nothing of the others
            reached = np.maximum.accumulate(base + known) - base
            later = first_from[reached, order]
            raised = (later < count) & (later > known)
            if not raised.any():
                return epochs
            epochs[order[raised]] = later[raised]

    def _doubled(self) -> None:
        """Rows beside another one of their version, of which one at most is published."""
        store = self.store
        order = np.lexsort((store["create_time"], store["key"]))
        is_second = store["key"][order][1:] == store["key"][order][:-1]
        rows, before = order[1:][is_second], order[:-1][is_second]
        alike = np.ones(len(rows), bool)
        for name in ("payload", "type", "metadata"):
            alike &= store[name][rows] == store[name][before]
        apart = store["create_time"][rows] - store["create_time"][before]
        is_other = ~(alike & np.isin(apart, self.clock_changes))
        rows, alike = rows[is_other], alike[is_other]
        chosen = self._earliest(store["create_time"][rows])
        self.verdict.found(
            "doubled",
            len(rows),
            [
                self._of_store(
                    int(rows[i]),
                    "the same event is in the table more than once"
                    if alike[i]
                    else "the table has other events of this version, too",
                )
                for i in chosen.tolist()
            ],
        )

    def _of_store(self, row: int, note: str) -> Difference:
        store = self.store
        name, version = self.names[int(store["code"][row])], int(store["version"][row])
        return Difference(name, version, int(store["create_time"][row]), note=note)

    def _altered(self, events: Number, known: Number, first_row: Number, has_twin: Number) -> None:
        topic, store = self.topic, self.store
        places = np.searchsorted(known, topic["key"][events])
        rows = first_row[places]
        differs = {
            name: topic[name][events] != store[name][rows]
            for name in ("payload", "type", "create_time", "metadata")
        }
        differs["partition"] = ~self._is_placed(events)
        for bit, name in FAULTS.items():
            differs[name] = (topic["faults"][events] & bit) != 0
        wrong = np.flatnonzero(np.logical_or.reduce(list(differs.values())))
        excused = [has_twin[places[i]] and self._twin(events[i]) for i in wrong.tolist()]
        wrong = wrong[~np.array(excused, bool)]
        chosen = self._earliest(topic["create_time"][events[wrong]])
        self.verdict.found(
            "altered",
            len(wrong),
            [
                self._of_topic(
                    int(events[i]),
                    ", ".join(name for name, flags in differs.items() if flags[i]),
                )
                for i in wrong[chosen].tolist()
            ],
        )

    def _twin(self, event: int) -> bool:
        """Whether another row of the same event is what was published.

        Where clocks go back, the rows of the repeated hour are read at both of their times.
        """
        topic, store = self.topic, self.store
        rows = np.flatnonzero(store["key"] == topic["key"][event])
        if topic["faults"][event]:
            return False
        same = np.ones(len(rows), bool)
        for name in ("payload", "type", "create_time", "metadata"):
            same &= store[name][rows] == topic[name][event]
        return bool(same.any() and self._is_placed(np.array([event])).all())

    def _is_placed(self, events: Number) -> npt.NDArray[np.bool_]:
        """Whether one of the numbers of partitions explains where each stands."""
        partition, code = self.topic["partition"][events], self.topic["code"][events]
        is_placed = np.zeros(len(events), np.bool_)
        for own in self._partitions_of:
            is_placed |= partition == own[code]
        return is_placed

    def _extra(self, events: Number) -> None:
        """On the topic, not in the store as it was read: it may have been committed since."""
        if not len(events):
            return
        codes, versions = self.topic["code"][events], self.topic["version"][events]
        keys = [(self.names[c], v) for c, v in zip(codes.tolist(), versions.tolist(), strict=True)]
        arrived = self.still_there(keys)
        there = np.fromiter((k in arrived for k in keys), bool, len(keys))
        self.verdict.accounted["arrived"] += int(there.sum())
        self._report("extra", events[~there], "not in the store")

    def _missing(self, rows: Number) -> None:
        """In the store, not on the topic: unless its absence is recorded."""
        if not len(rows):
            return
        accounted, kind = self.verdict.accounted, self.topic["kind"]
        for name, side in (("dead", DEAD), ("diverted", DIVERTED)):
            there = np.isin(self.store["key"][rows], self.topic["key"][kind == side])
            accounted[name] += int(there.sum())
            rows = rows[~there]
        skipped = self._in_skips(rows)
        if self.late_policy == "drop":
            accounted["dropped"] += int(skipped.sum())
            rows, skipped = rows[~skipped], skipped[~skipped]
        chosen = self._earliest(self.store["create_time"][rows])
        self.verdict.found(
            "missing",
            len(rows),
            [
                self._of_store(
                    int(rows[i]), "its gap was skipped" if skipped[i] else "not on the topic"
                )
                for i in chosen.tolist()
            ],
        )

    def _in_skips(self, rows: Number) -> npt.NDArray[np.bool_]:
        gaps = np.flatnonzero(self.topic["kind"] == GAP)
        result = np.zeros(len(rows), bool)
        if not len(gaps):
            return result
        codes, versions = self.store["code"][rows], self.store["version"][rows]
        for gap in gaps.tolist():
            result |= (
                (codes == self.topic["code"][gap])
                & (versions >= self.topic["version"][gap])
                & (versions <= self.topic["to_version"][gap])
            )
        return result

    def _report(self, kind: str, events: Number, note: str) -> None:
        chosen = events[self._earliest(self.topic["create_time"][events])]
        self.verdict.found(kind, len(events), [self._of_topic(i, note) for i in chosen.tolist()])

    def _earliest(self, times: Number) -> Number:
        return np.argsort(times, kind="stable")[: self.verdict.keeps]

    def _of_topic(self, event: int, note: str) -> Difference:
        topic = self.topic
        return Difference(
            self.names[int(topic["code"][event])],
            int(topic["version"][event]),
            int(topic["create_time"][event]),
            int(topic["partition"][event]),
            int(topic["offset"][event]),
            note,
        )


def _is_below(values: Number, order: Number) -> npt.NDArray[np.bool_]:
    """Which values are below one that stands before them in some order."""
    result = np.zeros(len(values), np.bool_)
    arranged = values[order]
    result[order[1:]] = arranged[1:] < np.maximum.accumulate(arranged)[:-1]
    return result


def _numpy(table: pa.Table, name: str) -> Number:
    column = table.column(name)
    if column.num_chunks == 0:
        return np.empty(0, column.type.to_pandas_dtype())
    array: Number = column.to_numpy()
    return array
