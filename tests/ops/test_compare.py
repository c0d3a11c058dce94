"""What the comparison of store and topic finds, and what it does not take for a difference."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from eventpub.admission.model import EVENTS
from eventpub.config import format_time
from eventpub.ops.comparison import Comparison
from eventpub.ops.sides import KINDS, Sides, Verdict, store_columns
from eventpub.ops.topic import GAP, columns_of, hashes_of_metadata

PARTITIONS = 8
START = 1_760_000_000_000_000


@dataclass(frozen=True)
class Event:
    aggregate_id: str
    version: int
    time: int = START
    payload: bytes | None = b"{}"
    event_type: str = "Changed"
    metadata: str | None = None


class Message:
    """A consumed record, as confluent_kafka shows it."""

    def __init__(
        self, event: Event, offset: int, *, partition: int | None = None, **changes: Any
    ) -> None:
        self._key = event.aggregate_id.encode()
        self._partition = zlib.crc32(self._key) % PARTITIONS if partition is None else partition
        self._value = changes.get("payload", event.payload)
        self._offset = offset
        self._time = max(1, changes.get("stamp", event.time) // 1000)
        sequence = str(event.version).encode()
        self._headers: list[tuple[str, bytes | None]] = [
            ("ce_specversion", b"1.0"),
            ("ce_id", changes.get("ce_id", self._key + b"/" + sequence)),
            ("ce_source", b"orders"),
            ("ce_type", changes.get("event_type", event.event_type).encode()),
            ("ce_time", format_time(changes.get("time", event.time)).encode()),
            ("ce_subject", self._key),
            ("ce_sequence", sequence),
        ]
        if self._value is not None:
            self._headers.append(("content-type", b"application/json"))
        for name, value in changes.get("headers", {}).items():
            self._headers.append((name, value))

    def key(self) -> bytes:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]]:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, self._time

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset


class World:
    """A store and a topic."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.store = list(events)
        self.topic: list[pa.Table] = []
        self._offset = 0

    def publish(
        self, *events: Event, kind: int = 0, partition: int | None = None, **changes: Any
    ) -> World:
        for event in events:
            message = Message(event, self._offset, partition=partition, **changes)
            self._read(message, kind)
            self._offset += 1
        return self

    def skip(self, aggregate_id: str, first: int, last: int) -> World:
        value = {"aggregate_id": aggregate_id, "from_version": first, "to_version": last}

        class Gap:
            value = staticmethod(lambda: json.dumps(value).encode())
            partition = staticmethod(lambda: 0)
            offset = staticmethod(lambda: 0)

        self._read(Gap(), GAP)
        return self

    def _read(self, message: Any, kind: int) -> None:
        columns, others = columns_of([message], kind, "orders")
        assert not others
        self.topic.append(columns)

    def verify(
        self,
        numbers: Sequence[int] = (PARTITIONS,),
        look_up: Callable[..., Collection[tuple[str, int]]] = lambda _: (),
        **rules: Any,
    ) -> Verdict:
        with Sides(Path(), START - 1001, START + 1_000_000) as sides:
            sides.add("store", [store_columns(_batch(self.store))])
            for columns in self.topic:
                sides.add("topic", [columns])
            comparison = Comparison(sides, numbers, look_up, **rules)
            comparison.run()
        return comparison.verdict


def _batch(events: Sequence[Event]) -> pa.RecordBatch:
    columns: list[list[Any]] = [
        [e.aggregate_id for e in events],
        [e.version for e in events],
        [e.event_type for e in events],
        [e.payload for e in events],
        [e.metadata for e in events],
        [e.time for e in events],
    ]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, EVENTS, strict=True)], schema=EVENTS
    )


def found(verdict: Verdict) -> dict[str, list[tuple[str, int | None]]]:
    return {
        kind: [(d.aggregate_id, d.version) for d in verdict.examples[kind]]
        for kind in KINDS
        if verdict.counts[kind]
    }


A = [Event("a", v, START + v) for v in range(1, 6)]
B = [Event("b", v, START + v) for v in range(1, 4)]


def test_equal_sides_do_not_differ() -> None:
    verdict = World(A + B).publish(*A[:2], *B, *A[2:]).verify()
    assert verdict.ok
    assert (verdict.events, verdict.records) == (8, 8)


def test_empty_sides_do_not_differ() -> None:
    assert World([]).verify().ok


def test_a_row_that_was_not_published_is_missing() -> None:
    verdict = World(A + B).publish(*A[:4], *B).verify()
    assert found(verdict) == {"missing": [("a", 5)]}
    assert verdict.examples["missing"][0].create_time == START + 5


def test_nothing_published_is_all_missing() -> None:
    assert World(A).verify().counts["missing"] == 5


def test_a_second_record_is_repeated_and_not_out_of_order() -> None:
    verdict = World(A).publish(*A, A[1], A[1]).verify()
    assert verdict.counts == dict.fromkeys(KINDS, 0) | {"repeated": 2}
    example = verdict.examples["repeated"][0]
    assert (example.version, example.offset) == (2, 5)


def test_a_version_after_a_later_one_is_out_of_order() -> None:
    verdict = World(A + B).publish(A[0], A[2], B[0], A[1], A[3], A[4], B[1], B[2]).verify()
    assert found(verdict) == {"out_of_order": [("a", 2)]}


GROWN = (4, 6, 8)
SHUTTLE = next(n for n in map(str, range(99)) if zlib.crc32(n.encode()) % 24 in {8, 9, 10, 11})
"""Stands in one partition with 4 and with 8, and in another with 6."""


def grown(
    published: Sequence[tuple[int, str, int]], numbers: Sequence[int] = GROWN
) -> dict[str, list[tuple[str, int | None]]]:
    """What is found where each event, an id and a version, was published with so many partitions.

    Offsets say nothing across partitions, so the later ones have lower ones.
    """
    events = [Event(name, version, START + version) for _, name, version in published]
    world = World(events)
    ends = dict.fromkeys(range(max(GROWN)), 0)
    for (number, name, _), event in zip(published, events, strict=True):
        partition = zlib.crc32(name.encode()) % number
        world._offset = 1000 * (max(GROWN) - partition) + ends[partition]
        ends[partition] += 1
        world.publish(event, partition=partition)
    return found(world.verify(numbers))


def test_partitions_that_were_added_twice_are_no_difference() -> None:
    places = [zlib.crc32(SHUTTLE.encode()) % number for number in GROWN]
    assert places[0] == places[2] != places[1]
    names = [SHUTTLE, *map(str, range(40))]
    published = [
        (number, name, 10 * place + version)
        for place, number in enumerate(GROWN)
        for version in (1, 2)
        for name in names
    ]
    assert grown([e for n, e in enumerate(published) if e not in published[:n]]) == {}


@pytest.mark.parametrize("seed", range(50))
def test_what_is_in_order_is_no_difference_where_partitions_were_added_twice(seed: int) -> None:
    chance = Random(seed)
    epochs = sorted(chance.choices(GROWN, k=6))
    versions = list(range(1, 7))
    if seed % 2:
        a, b = chance.sample(range(6), 2)
        versions[a], versions[b] = versions[b], versions[a]
    published = [(number, SHUTTLE, v) for number, v in zip(epochs, versions, strict=True)]
    is_wrong = _is_out_of_order(published)
    assert seed % 2 or not is_wrong
    assert grown(published).keys() <= ({"out_of_order"} if is_wrong else set())


def _is_out_of_order(published: Sequence[tuple[int, str, int]]) -> bool:
    """Whether no order of epochs explains where these records of one aggregate stand."""
    crc = zlib.crc32(SHUTTLE.encode())
    stands: dict[int, list[int]] = {}
    for number, _, version in published:
        stands.setdefault(crc % number, []).append(version)
    if any(versions != sorted(versions) for versions in stands.values()):
        return True
    at = 0
    for version in sorted(v for versions in stands.values() for v in versions):
        places = range(at, len(GROWN))
        fitting = [n for n in places if version in stands.get(crc % GROWN[n], ())]
        if not fitting:
            return True
        at = fitting[0]
    return False


@pytest.mark.parametrize("seed", range(40))
def test_what_is_out_of_order_is_found_where_partitions_were_added_once(seed: int) -> None:
    chance = Random(seed)
    before, after = GROWN[:2]
    numbers = sorted(chance.choices((before, after), k=4), key=(before, after).index)
    versions = [1, 2, 3, 4]
    a, b = chance.sample(range(4), 2)
    if seed % 2:
        versions[a], versions[b] = versions[b], versions[a]
    published = [(number, SHUTTLE, v) for number, v in zip(numbers, versions, strict=True)]
    assert set(grown(published, GROWN[:2])) == ({"out_of_order"} if seed % 2 else set())


def test_late_records_are_exempt_from_the_order() -> None:
    world = World(A).publish(A[0], A[2], A[3], A[4])
    verdict = world.publish(A[1], headers={"eventpub_late": b"1"}).verify()
    assert verdict.ok
    assert verdict.accounted["late"] == 1


def test_a_late_record_is_still_published_once() -> None:
    verdict = World(A).publish(*A).publish(A[1], headers={"eventpub_late": b"1"}).verify()
    assert found(verdict) == {"repeated": [("a", 2)]}


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"payload": b"{ }"}, "payload"),
        ({"payload": None}, "payload"),
        ({"event_type": "changed"}, "type"),
        ({"time": START + 1, "stamp": START + 1}, "create_time"),
        ({"stamp": START + 1_000_000}, "timestamp"),
        ({"headers": {"user": b"x"}}, "metadata"),
        ({"ce_id": b"a/2"}, "ce_id"),
        ({"partition": 0}, "partition"),
    ],
)
def test_what_was_changed_is_named(change: dict[str, Any], note: str) -> None:
    event = Event("a", 1)
    verdict = World([event]).publish(event, **change).verify()
    assert verdict.counts == dict.fromkeys(KINDS, 0) | {"altered": 1}
    assert verdict.examples["altered"][0].note == note


def test_an_empty_payload_is_not_a_null_one() -> None:
    null, empty = Event("a", 1, payload=None), Event("a", 2, payload=b"")
    assert World([null, empty]).publish(null, empty).verify().ok
    world = World([null]).publish(replace(null, payload=b""))
    assert found(world.verify()) == {"altered": [("a", 1)]}


def test_metadata_are_headers() -> None:
    text = json.dumps(
        {"user": "ü", "n": 1.5, "none": None, "ce_x": {"a": [1]}, "content-type": "x"}
    )
    event = Event("a", 1, metadata=text)
    headers = {"user": "ü".encode(), "n": b"1.5", "none": None, "metadata_ce_x": b'{"a":[1]}'}
    assert World([event]).publish(event, headers=headers).verify().ok
    assert not World([event]).publish(event).verify().ok
    null = replace(event, payload=None)  # which has no content-type
    assert World([null]).publish(null, headers=headers).verify().ok
    assert len({*hashes_of_metadata([b"{}", None, b"null"])}) == 1
    plain = Event("a", 1, metadata="no JSON")
    assert World([plain]).publish(plain, headers={"metadata": b"no JSON"}).verify().ok


def test_a_record_without_a_row_is_extra() -> None:
    assert found(World(A[:4]).publish(*A).verify()) == {"extra": [("a", 5)]}


def test_a_row_that_committed_while_we_looked_is_not_extra() -> None:
    verdict = World(A[:4]).publish(*A).verify(look_up=lambda keys: keys)
    assert verdict.ok
    assert verdict.accounted["arrived"] == 1


def test_records_outside_the_range_do_not_count() -> None:
    outside = Event("a", 6, START + 2_000_000)
    verdict = World(A).publish(*A, outside, outside).verify()
    assert verdict.ok
    assert verdict.records == 5


def test_refused_and_diverted_rows_are_accounted_for() -> None:
    verdict = World(A).publish(*A[:3]).publish(A[3], kind=2).publish(A[4], kind=3).verify()
    assert verdict.ok
    assert verdict.accounted["dead"] == verdict.accounted["diverted"] == 1


def test_a_skipped_version_that_exists_is_missing_unless_late_events_are_dropped() -> None:
    world = World(A).publish(A[0], A[3], A[4]).skip("a", 2, 3)
    verdict = world.verify()
    assert found(verdict) == {"missing": [("a", 2), ("a", 3)]}
    assert verdict.examples["missing"][0].note == "its gap was skipped"
    assert verdict.skips == 1
    dropped = World(A).publish(A[0], A[3], A[4]).skip("a", 2, 3).verify(late_policy="drop")
    assert dropped.ok
    assert dropped.accounted["dropped"] == 2


def test_what_waits_for_a_version_that_is_nowhere_is_held_and_not_missing() -> None:
    verdict = World([A[0], A[2], A[3], *B]).publish(A[0], *B).verify()
    assert found(verdict) == {"held": [("a", 3), ("a", 4)]}
    assert {d.note for d in verdict.examples["held"]} == {"waits for version 2"}
    assert verdict.ok


@pytest.mark.parametrize(
    ("rows", "skips", "note"),
    [
        ([A[0], A[3], A[4]], [], "waits for versions 2 to 3"),
        ([A[0], A[4]], [(2, 3)], "waits for version 4"),
        (A[1:], [], "waits for version 1"),
        (A[3:], [], "waits for version 3"),  # what is below was not read
    ],
)
def test_all_versions_that_are_waited_for_are_named(
    rows: list[Event], skips: list[tuple[int, int]], note: str
) -> None:
    """It named the last one alone, where `gaps list` names the first."""
    world = World([*rows, *B]).publish(*[r for r in rows if r.version == 1], *B)
    for first, last in skips:
        world.skip("a", first, last)
    verdict = world.verify()
    assert {d.note for d in verdict.examples["held"]} == {note}


def test_what_waits_for_nothing_is_missing() -> None:
    skipped = World([A[0], A[2]]).publish(A[0]).skip("a", 2, 2).verify()
    assert found(skipped) == {"missing": [("a", 3)]}
    first = World(A[:1]).verify()
    assert found(first) == {"missing": [("a", 1)]}
    behind_another = World(A).publish(A[0]).verify()
    assert found(behind_another) == {"missing": [("a", v) for v in (2, 3, 4, 5)]}
    out_of_range = World([A[2]]).verify(look_up=lambda keys: keys)
    assert found(out_of_range) == {"missing": [("a", 3)]}
    dead = World(A[:3]).publish(A[0]).publish(A[1], kind=2).verify()
    assert found(dead) == {"missing": [("a", 3)]}


def test_what_waits_for_longer_than_any_hold_lasts_is_missing() -> None:
    """And so is what follows it, though younger."""
    world = World([A[0], A[2], A[3], B[1]]).publish(A[0])
    verdict = world.verify(held_since=A[3].time)
    assert found(verdict) == {"missing": [("b", 2), ("a", 3), ("a", 4)]}
    assert not verdict.ok
    verdict = world.verify(held_since=A[2].time)
    assert found(verdict) == {"missing": [("b", 2)], "held": [("a", 3), ("a", 4)]}


def test_what_the_publisher_does_not_hold_is_missing() -> None:
    world = World([A[0], A[2], B[1]]).publish(A[0])
    verdict = world.verify(held=lambda _: {"a": 2})
    assert found(verdict) == {"missing": [("b", 2)], "held": [("a", 3)]}
    verdict = world.verify(held=lambda _: {"a": 3, "b": 1})
    assert found(verdict) == {"missing": [("a", 3)], "held": [("b", 2)]}


def test_what_follows_a_published_version_does_not_wait_for_one_below_it() -> None:
    events = [Event("c", v, START + v) for v in range(1, 10)]
    rows = [event for event in events if event.version != 4]
    world = World(rows).publish(*(e for e in rows if e.version not in {5, 6, 9}))
    assert found(world.verify()) == {"missing": [("c", 9)], "held": [("c", 5), ("c", 6)]}


def test_ids_that_look_alike_are_not_the_same() -> None:
    ids = [
        "a",
        "A",
        "a ",
        "ä",
        "a\u0308",
        "x" * 255,
        "\0",
        "a\0b",
        "a\0c",
        "'; DROP TABLE events; --",
        "日本",
    ]
    events = [Event(i, v) for i in ids for v in (1, 2)]
    assert World(events).publish(*events).verify().ok


def test_extreme_versions_are_compared() -> None:
    events = [Event("a", v) for v in (-(2**63), 0, 2**63 - 1)]
    assert World(events).publish(*events).verify().ok


def test_an_hour_that_was_lived_twice_may_show_a_row_at_both_times() -> None:
    hour = 900_000
    world = World([A[0], replace(A[0], time=A[0].time + hour)])
    verdict = world.publish(replace(A[0], time=A[0].time + hour)).verify(
        clock_changes={(A[0].time + hour, hour)}
    )
    assert verdict.ok
    assert verdict.events == 1


def test_an_event_of_an_hour_that_was_lived_twice_may_have_either_of_its_times() -> None:
    hour = 900_000
    for change, is_ok in ((A[0].time + hour, True), (A[0].time - hour, False)):
        later = replace(A[0], time=A[0].time + hour)
        verdict = World(A[:1]).publish(later).verify(clock_changes={(change, hour)})
        assert verdict.ok == is_ok
        assert found(verdict) == ({} if is_ok else {"altered": [("a", 1)]})


@pytest.mark.parametrize("other", [{}, {"payload": b"other"}, {"time": START + 1}])
def test_a_second_row_of_a_version_is_a_difference(other: dict[str, Any]) -> None:
    world = World([*A, replace(A[0], **other)]).publish(*A)
    verdict = world.verify(clock_changes={(START + 10_000_000, 3_600_000_000)})
    assert verdict.counts == dict.fromkeys(KINDS, 0) | {"doubled": 1}
    assert verdict.events == len(A)
    assert [d.name for d in verdict.examples["doubled"]] == ["a/1"]
    assert not verdict.ok


OTHER = replace(A[0], payload=b"other", metadata='{"user": "u"}')
AS_LETTER = {"eventpub_metadata": b'{"user": "u"}', "eventpub_reason": b"r"}


def test_a_second_row_that_is_a_dead_letter_is_none() -> None:
    world = World([OTHER, *A]).publish(*A).publish(OTHER, kind=2, headers=AS_LETTER)
    verdict = world.verify()
    assert verdict.ok
    assert verdict.accounted["dead"] == 1
    too_large = AS_LETTER | {"eventpub_payload_bytes": b"5"}
    world = World([*A, OTHER]).publish(*A).publish(OTHER, kind=2, payload=None, headers=too_large)
    assert world.verify().ok


@pytest.mark.parametrize("change", [{"payload": b"a third"}, {"metadata": None}, {"time": START}])
def test_a_dead_letter_is_that_of_one_row(change: dict[str, Any]) -> None:
    third = replace(OTHER, time=OTHER.time + 1)
    world = World([*A, OTHER, replace(third, **change)]).publish(*A)
    assert world.verify().counts["doubled"] == 2
    verdict = world.publish(OTHER, kind=2, headers=AS_LETTER).verify()
    assert (verdict.counts["doubled"], verdict.accounted["dead"]) == (1, 1)


def test_only_the_earliest_are_listed() -> None:
    events = [Event(f"x{n}", 1, START + 500 - n) for n in range(100)]
    verdict = World(events).verify()
    assert verdict.counts["missing"] == 100
    assert [d.create_time for d in verdict.examples["missing"]] == list(
        range(START + 401, START + 421)
    )


def test_foreign_records_are_named() -> None:
    first, second, third = (Message(A[0], n) for n in range(3))
    first._headers = []
    second._headers[-2] = ("ce_sequence", b"one")
    for kind, some in ((0, [first, second]), (2, [second])):
        columns, others = columns_of([first, second, third], kind, "orders")
        assert columns.column("offset").to_pylist() == [2]
        assert [message for message, _ in others] == some
        assert all("ce_sequence" in why for _, why in others)


_SECOND_ROWS = """
import sys
from pathlib import Path
import numpy as np, pyarrow as pa
from eventpub.ops.comparison import Comparison
from eventpub.ops.sides import Sides
n = 500_000
with Sides(Path(sys.argv[1]), 0, n) as sides:
    for start in range(0, n, 50_000):
        at = np.arange(start, start + 50_000)
        ids = pa.array([f"aggregate-{i // 10:020}" for i in at.tolist()])
        values = {"id": ids, "version": at % 10 + 1, "create_time": at + 1, "type": at * 0,
                  "metadata": at * 0}
        sides.add("store", [pa.table(values | {"payload": at})])
        sides.add("store", [pa.table(values | {"payload": at + 1})])
        more = {"to_version": at * 0, "kind": at * 0, "offset": at, "faults": at * 0,
                "partition": at * 0, "crc": at * 0, "payload": at}
        sides.add("topic", [pa.table(values | more)])
    comparison = Comparison(sides, [8], lambda keys: ())
    comparison.run()
    verdict = comparison.verdict
assert verdict.counts == dict.fromkeys(verdict.counts, 0) | {"doubled": n}, verdict.counts
"""


def test_half_a_million_versions_with_second_rows_are_compared(tmp_path: Path) -> None:
    """They ended for a lack of memory, or some of them were called repeated, too."""
    subprocess.run([sys.executable, "-c", _SECOND_ROWS, str(tmp_path)], check=True, timeout=900)


_MEMORY = """
import resource, sys, zlib
from pathlib import Path
import numpy as np, pyarrow as pa
from eventpub.ops.comparison import Comparison
from eventpub.ops.sides import Sides
n, folder, lost = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with Sides(folder, 0, n) as sides:
    for start in range(0, n, 50_000):
        at = np.arange(start, start + 50_000)
        ids = pa.array([f"aggregate-{i // 10:020}" for i in at.tolist()])
        nothing = np.zeros(len(at), np.int64)
        values = {"version": at % 10 + 1, "create_time": at + 1, "payload": at, "type": nothing,
                  "metadata": nothing}
        sides.add("store", [pa.table({"id": ids} | values)])
        crc = np.array([zlib.crc32(id.encode()) for id in ids.to_pylist()])
        more = {"to_version": nothing, "kind": nothing, "offset": at, "faults": nothing,
                "partition": crc % 8, "crc": crc}
        records = pa.table({"id": ids} | values | more)
        sides.add("topic", [records.filter(pa.array(at % 1000 >= lost))])
    comparison = Comparison(sides, [8], lambda keys: ())
    comparison.run()
    verdict = comparison.verdict
assert verdict.events == n and verdict.counts["missing"] == n * lost // 1000, verdict
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("lost", [0, 1000], ids=["equal", "all missing"])
def test_memory_does_not_grow_with_the_number_of_events(tmp_path: Path, lost: int) -> None:
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", _MEMORY, str(n), str(tmp_path), str(lost)],
                capture_output=True,
                check=True,
                text=True,
            ).stdout
        )
        for n in (2_000_000, 4_000_000)
    ]
    assert peaks[1] < min(1.1 * peaks[0], 500_000), (
        f"KiB at 2,000,000 and 4,000,000 events: {peaks}"
    )
