"""Comparing the store's rows with the topic's records, one bucket of aggregates after the other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
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
    LEFT_OUT,
)
from eventpub.ops.spill import crc32s
from eventpub.ops.verdict import Difference, Verdict
from eventpub.words import named_versions

STORE_FIELDS = {
    "version": np.int64,
    "create_time": np.int64,
    "payload": np.int64,
    "type": np.int64,
    "metadata": np.int64,
}
"""Columns of the store's rows, beside `aggregate_id`."""

TOPIC_FIELDS = STORE_FIELDS | {
    "to_version": np.int64,
    "kind": np.int8,
    "partition": np.int32,
    "offset": np.int64,
    "faults": np.int8,
}
"""Columns of the topic's records, as `Records` has them."""

MOST_LOOKED_UP = 10_000
"""Events that differ and are looked up once more, at most."""

Number = npt.NDArray[Any]
LookUp = Callable[[Sequence[tuple[str, int]]], Mapping[tuple[str, int], bool]]
"""Whether events are in the store now, whatever their time; nothing of one that was not asked."""


def compare(  # noqa: PLR0913 (both sides, and how they are compared)
    rows: pa.Table,
    records: pa.Table,
    verdict: Verdict,
    *,
    numbers: Sequence[int],
    late_policy: Literal["publish", "divert", "drop"] = "publish",
    clock_changes: Collection[int] = (),
    look_up: LookUp = lambda _: {},
    first_version: int = 1,
    held_since: int | None = None,
) -> None:
    """Compare all rows and all records of some aggregates, and add what is found to the verdict.

    Args:
        rows: of the store, as `store_columns` makes them.
        records: of all topics, as `TopicReader` gives them, each partition in its order.
        numbers: of the topic's partitions, those that it had before first.
        late_policy: `gaps.late`.
        clock_changes: by how much, µs, clocks go back: a row of the hour that is lived twice is
            read at both of its times.
        look_up: asks the store for events that it did not have when it was read.
        first_version: of each aggregate.
        held_since: events created at or after, µs, may wait for a version that is not there; None:
            any may.
    """
    _Comparison(
        rows,
        records,
        verdict,
        numbers=numbers,
        late_policy=late_policy,
        clock_changes=clock_changes,
        look_up=look_up,
        first_version=first_version,
        held_since=held_since,
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
        look_up: LookUp,
        first_version: int,
        held_since: int | None,
    ) -> None:
        self.verdict = verdict
        self.late_policy = late_policy
        self.clock_changes = [*clock_changes]
        self.look_up = look_up
        self.first_version = first_version
        self.held_since = held_since
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
            several = times_stored > 1
            first_row[several] = self._doubled(known[several])
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
        self._altered(events[matched[events]], known, first_row)
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

    def _doubled(self, known: Number) -> list[int]:
        """Of versions with several rows the one that is published, or else the first.

        Another one is a dead letter, or a difference.
        """
        rows, records = _by_key(self.store, known), _by_key(self.topic, known)
        chosen: list[int] = []
        second: dict[int, str] = {}
        for key, of_version in rows.items():
            row, others = self._apart(of_version, records.get(key, []))
            chosen.append(row)
            second |= others
        found = np.array([*second], np.int64)
        earliest = found[self._earliest(self.store["create_time"][found])].tolist()
        examples = [self._of_store(row, second[row]) for row in earliest]
        self.verdict.found("doubled", len(found), examples)
        return chosen

    def _apart(self, rows: list[int], records: list[int]) -> tuple[int, dict[int, str]]:
        """Of the rows of one version the chosen one, and what is wrong with others."""
        letters = [_content(self.topic, r) for r in records if self.topic["kind"][r] == DEAD]
        published = [_content(self.topic, r) for r in records if self.topic["kind"][r] != DEAD]

        def rank(row: int) -> tuple[bool, bool]:
            content = _content(self.store, row)
            return content not in published, not any(self._is_letter(x, content) for x in letters)

        chosen, *others = sorted(rows, key=rank)
        kept, second = [_content(self.store, chosen)], {}
        for row in others:
            content = _content(self.store, row)
            alike = [of for of in kept if of[1:] == content[1:]]
            if any(abs(content[0] - of[0]) in self.clock_changes for of in alike):
                continue  # the same row, read at both of its times
            kept.append(content)
            letter = next((of for of in letters if self._is_letter(of, content)), None)
            if alike:
                second[row] = "the same event is in the table more than once"
            elif letter is None:
                second[row] = "the table has other events of this version, too"
            else:
                letters.remove(letter)
                self.verdict.accounted["dead"] += 1
        return chosen, second

    def _is_letter(self, letter: tuple[int, ...], row: tuple[int, ...]) -> bool:
        """Whether a dead letter is that of a row, as far as it says."""
        is_then = abs(letter[0] - row[0]) in {0, *self.clock_changes}
        return is_then and all(a in {b, LEFT_OUT} for a, b in zip(letter[1:], row[1:], strict=True))

    def _of_store(self, row: int, note: str) -> Difference:
        store = self.store
        name, version = self.names[int(store["code"][row])], int(store["version"][row])
        return Difference(name, version, int(store["create_time"][row]), note=note)

    def _altered(self, events: Number, known: Number, first_row: Number) -> None:
        topic, store = self.topic, self.store
        rows = first_row[np.searchsorted(known, topic["key"][events])]
        differs = {
            name: topic[name][events] != store[name][rows]
            for name in ("payload", "type", "create_time", "metadata")
        }
        differs["partition"] = ~self._is_placed(events)
        for bit, name in FAULTS.items():
            differs[name] = (topic["faults"][events] & bit) != 0
        wrong = np.flatnonzero(np.logical_or.reduce(list(differs.values())))
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
        arrived = self.look_up(keys)
        there = np.fromiter((arrived.get(k, False) for k in keys), bool, len(keys))
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
        skipped = self._in_skips(self.store["code"][rows], self.store["version"][rows])
        if self.late_policy == "drop":
            accounted["dropped"] += int(skipped.sum())
            rows, skipped = rows[~skipped], skipped[~skipped]
        waits = self._waits(rows[~skipped])
        is_held = np.isin(rows, list(waits))
        held, rows, skipped = rows[is_held], rows[~is_held], skipped[~is_held]
        notes = dict.fromkeys(rows[skipped].tolist(), "its gap was skipped")
        notes |= {row: f"waits for {awaited}" for row, awaited in waits.items()}
        for name, found in (("held", held), ("missing", rows)):
            chosen = found[self._earliest(self.store["create_time"][found])].tolist()
            examples = [self._of_store(row, notes.get(row, "not on the topic")) for row in chosen]
            self.verdict.found(name, len(found), examples)

    def _waits(self, rows: Number) -> dict[int, str]:
        """By row: the versions below it that are nowhere, for which the publisher holds it."""
        store, topic = self.store, self.topic
        if len(rows) > MOST_LOOKED_UP:
            return {}
        codes, versions = store["code"][rows], store["version"][rows]
        keys = dict(zip(zip(codes.tolist(), versions.tolist(), strict=True), rows, strict=True))
        known = set()
        ends = np.where(topic["kind"] == GAP, topic["to_version"], topic["version"])
        for code_of, highest in ((store["code"], store["version"]), (topic["code"], ends)):
            own = np.isin(code_of, codes)
            known |= {*zip(code_of[own].tolist(), highest[own].tolist(), strict=True)}
        before = np.array([(c, v - 1) for c, v in keys if v > self.first_version], np.int64)
        before = before.reshape(-1, 2)
        before = before[~self._in_skips(before[:, 0], before[:, 1])]
        asked = {(self.names[c], v): (c, v) for c, v in before.tolist() if (c, v) not in known}
        lacks = {asked[k] for k, is_there in self.look_up([*asked]).items() if not is_there}
        below = [(-1, -1), *sorted(known)]
        found: dict[int, str] = {}
        for (code, version), row in sorted(keys.items()):
            is_new = self.held_since is None or store["create_time"][row] >= self.held_since
            if (code, version - 1) in lacks and is_new:
                of, there = below[bisect_left(below, (code, version - 1)) - 1]
                first = there + 1 if of == code else version - 1
                found[int(row)] = named_versions(first, version - 1)
            elif (follows := keys.get((code, version - 1))) in found and is_new:
                found[int(row)] = found[int(follows)]
        return found

    def _in_skips(self, codes: Number, versions: Number) -> npt.NDArray[np.bool_]:
        result = np.zeros(len(codes), bool)
        for gap in np.flatnonzero(self.topic["kind"] == GAP).tolist():
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


def _by_key(side: Mapping[str, Number], keys: Number) -> dict[int, list[int]]:
    """Rows by key, in the order of keys and times."""
    found: dict[int, list[int]] = {}
    rows = np.flatnonzero(np.isin(side["key"], keys))
    for at in rows[np.lexsort((side["create_time"][rows], side["key"][rows]))].tolist():
        found.setdefault(int(side["key"][at]), []).append(at)
    return found


def _content(side: Mapping[str, Number], at: int) -> tuple[int, ...]:
    """What tells a row from others of its version, its time first."""
    return tuple(int(side[name][at]) for name in ("create_time", "payload", "type", "metadata"))


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
