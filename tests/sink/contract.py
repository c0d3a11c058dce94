"""What every `Sink` does, wherever it publishes to.

A test module subclasses `SinkContract`, or `OwnedSinkContract` where a sink has an owner, and gives
it the fixture `case`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import pyarrow as pa
import pytest

from eventpub.errors import SinkError
from eventpub.sink.base import Content, CrashPoint, RecordRefusedError, Sink
from eventpub.sink.folded import Folded
from eventpub.sink.records import PartitionId
from tests.sink.helpers import as_set, events

Key = tuple[str, int]
POINTS = (
    "before_begin",
    "after_begin",
    "during_produce",
    "after_produce",
    "before_commit",
    "after_commit",
)
FIRST = events([("a", 1), ("b", 1), ("a", 2), ("c", 1)])
SECOND = events([("b", 2), ("a", 3), ("c", 2), ("b", 3)])


class OwnedSink(Sink, Protocol):
    """One of which there may be several for a shard: the last one that was made ready owns it."""

    def ready(self) -> None:
        """Return when it owns the shard: what older owners have open is over, and they are fenced.

        Raises:
            SinkError: `sink.unreachable`, `sink.fenced`, ….
        """

    def fold(self, saved: Mapping[PartitionId, int], /) -> Iterable[Folded]:
        """What is visible from these next offsets on; all of a partition that is not named."""

    def close(self) -> None:
        """Let go of the shard; may be called more than once."""


class Dead(BaseException):
    """The process is gone."""


class Case(Protocol):
    """An empty topic, or what stands in its place."""

    def sink(self) -> Sink:
        """The next one."""

    def visible(self) -> list[Key]:
        """What an independent reader sees, the rows of each key in their order."""


class OwnedCase(Protocol):
    """One whose sinks follow each other as owners.

    Attributes:
        refused: a payload that is never taken.
    """

    refused: bytes

    def sink(self) -> OwnedSink:
        """A newer owner, not ready yet."""

    def visible(self) -> list[Key]:
        """As of `Case`."""

    def lose_answer(self) -> None:
        """The answer to the next batch does not come, or not at once."""


def dies_at(point: str) -> CrashPoint:
    """A process that dies there."""

    def passes(name: str) -> None:
        if name == point:
            raise Dead

    return passes


def of_key(rows: list[Key], key: str) -> list[int]:
    """The versions of a key."""
    return [version for a, version in rows if a == key]


class SinkContract:
    """Of any sink."""

    def test_what_is_published_is_visible_and_in_order_for_each_key(self, case: Case) -> None:
        sink = case.sink()
        assert [sink.publish(Content(rows)).events for rows in (FIRST, SECOND)] == [4, 4]
        seen = case.visible()
        assert sorted(seen) == sorted(as_set(FIRST) | as_set(SECOND))
        assert {key: of_key(seen, key) for key in "abc"} == {
            "a": [1, 2, 3],
            "b": [1, 2, 3],
            "c": [1, 2],
        }

    def test_who_dies_before_it_begins_has_published_nothing(self, case: Case) -> None:
        with pytest.raises(Dead):
            case.sink().publish(Content(FIRST), crash_point=dies_at("before_begin"))
        assert case.visible() == []


class OwnedSinkContract(SinkContract):
    """Of a sink that has an owner."""

    @pytest.fixture
    def owner(self, case: OwnedCase) -> OwnedSink:
        """The first one."""
        return self.next(case)

    @staticmethod
    def next(case: OwnedCase) -> OwnedSink:
        """A new owner."""
        sink = case.sink()
        sink.ready()
        return sink

    @staticmethod
    def recovered(sink: OwnedSink, saved: Any = None) -> list[Key]:
        """What it says is visible."""
        return [
            key
            for part in sink.fold(saved or {})
            if part.kind == "events"
            for key in zip(part.aggregate_ids, part.versions.tolist(), strict=True)
        ]

    @pytest.mark.parametrize("point", POINTS)
    def test_a_batch_is_visible_whole_or_not_at_all_wherever_its_process_dies(
        self, case: OwnedCase, owner: OwnedSink, point: str
    ) -> None:
        with pytest.raises(Dead):
            owner.publish(Content(FIRST), crash_point=dies_at(point))
        after = self.next(case)
        seen = self.recovered(after)
        assert set(seen) == (as_set(FIRST) if point == "after_commit" else set())
        assert sorted(case.visible()) == sorted(seen)
        if not seen:
            after.publish(Content(FIRST))
        after.publish(Content(SECOND))
        assert sorted(case.visible()) == sorted(as_set(FIRST) | as_set(SECOND))

    def test_what_is_recovered_is_what_is_visible_since(
        self, case: OwnedCase, owner: OwnedSink
    ) -> None:
        saved = owner.publish(Content(FIRST)).next_offsets
        owner.publish(Content(SECOND))
        after = self.next(case)
        assert sorted(self.recovered(after)) == sorted(case.visible())
        places = {place for place, _ in saved.items()}
        since = [key for key in self.recovered(after, saved) if key in as_set(FIRST)]
        assert not since, f"up to {places} it was known"

    def test_an_older_owner_publishes_nothing(self, case: OwnedCase, owner: OwnedSink) -> None:
        owner.publish(Content(FIRST))
        newer = self.next(case)
        with pytest.raises(SinkError):
            owner.publish(Content(SECOND))
        assert set(case.visible()) == as_set(FIRST)
        assert set(self.recovered(newer)) == as_set(FIRST)
        newer.publish(Content(SECOND))
        assert set(case.visible()) == as_set(FIRST) | as_set(SECOND)

    @pytest.mark.parametrize("point", ["after_begin", "during_produce", "before_commit"])
    def test_nor_does_one_that_was_about_to(
        self, case: OwnedCase, owner: OwnedSink, point: str
    ) -> None:
        newer: list[OwnedSink] = []

        def takes_over(name: str) -> None:
            if name == point:
                newer.append(self.next(case))

        with pytest.raises(SinkError):
            owner.publish(Content(FIRST), crash_point=takes_over)
        assert case.visible() == []
        newer[0].publish(Content(SECOND))
        assert set(case.visible()) == as_set(SECOND)

    def test_a_refused_row_is_named_and_the_others_go(
        self, case: OwnedCase, owner: OwnedSink
    ) -> None:
        rows = events([("a", 1), ("b", 1), ("c", 1)], payload=[b"{}", case.refused, b"{}"])
        sink, refused = owner, list[int]()
        for _ in range(5):
            left = [n for n in range(3) if n not in refused]
            try:
                sink.publish(Content(rows.take(pa.array(left))))
                break
            except RecordRefusedError as refusal:
                refused += [left[n] for n in refusal.rows]
            except SinkError as error:
                if not error.retriable:
                    raise
            if sink.needs_replacement:
                sink = self.next(case)
                assert self.recovered(sink) == []
        assert refused == [1]
        assert sorted(case.visible()) == [("a", 1), ("c", 1)]

    def test_offsets_only_grow(self, owner: OwnedSink) -> None:
        reached: dict[Any, int] = {}
        for version in range(1, 5):
            offsets = owner.publish(
                Content(events([(key, version) for key in "abcd"]))
            ).next_offsets
            assert offsets
            assert all(offset > reached.get(place, 0) for place, offset in offsets.items())
            reached |= offsets

    def test_an_answer_that_was_lost_is_no_success(self, case: OwnedCase, owner: OwnedSink) -> None:
        case.lose_answer()
        is_done = False
        with suppress(SinkError):
            owner.publish(Content(FIRST))
            is_done = True
        assert owner.needs_replacement
        assert set(case.visible()) == as_set(FIRST) or not is_done
        after = self.next(case)
        seen = self.recovered(after)
        assert sorted(seen) == sorted(case.visible())
        assert set(seen) in (set(), as_set(FIRST))
