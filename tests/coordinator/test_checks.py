"""What is looked at while it runs, once a second and less often.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

import pytest

from eventpub.channel import Folding
from eventpub.coordinator import events as e
from eventpub.errors import SinkError, StoreError
from eventpub.sources.base import NewRow
from tests.coordinator.life import (
    NOW,
    Life,
    at,
    begin,
    counted_with,
    layout,
    some_rows,
    streaming,
)

GONE = StoreError("store.denied", "the account may not read the table")


class TestWhatIsWatched:
    def test_a_state_in_which_open_transactions_cannot_be_seen_is_said_once(self) -> None:
        life, _ = streaming()
        for state in ("open", "stale", "stale", "waiting", "stale"):
            life.polled(state=state)
        assert [line.facts["state"] for line in life.lines("no fresh answer")] == ["stale"]
        life.polled(state="denied")
        assert len(life.lines("may not see open transactions")) == 1
        life.polled(state="open")
        life.polled(state="stale")
        assert len(life.lines("no fresh answer")) == 2, "it had been well in between"
        assert life.coordinator.progress.watermark == "stale"

    def test_transactions_that_are_not_waited_for_any_more_are_counted_over_all_polls(
        self,
    ) -> None:
        life, _ = streaming()
        for timed_out in (1, 2, 0, 2):
            life.polled(timed_out=timed_out)
        assert life.coordinator.progress.passed == 5

    def test_rows_of_the_past_are_counted_again_and_what_is_sampled_next_waits_for_it(self) -> None:
        life, _ = streaming(newest=(10, NOW, "`id`"), position=at(4_000))
        life.waits(1.0)
        old = at(3_000)
        life.on(e.Done(e.Sample(), e.Sampled([NewRow(12, NOW), NewRow(13, old)], 0)))
        assert life.all(e.Sample)[-1].above == 10, "a sample may show but some of those behind"
        life.on(
            e.Done(
                e.Sample(), e.Sampled([NewRow(11, NOW), NewRow(12, NOW), NewRow(13, old)], 0, 10)
            )
        )
        [line] = life.lines("store.rows_in_past")
        assert "SET time_zone to the zone" in line.facts["fix"]
        assert "PROCESS" not in line.facts["fix"], "the account sees all transactions"
        life.waits(1.0)
        assert life.written["newest"][:2] == [10, NOW], "until they are counted"
        assert 2_999 in counted_with(life)
        life.on(e.Done(e.Sample(), e.Sampled([NewRow(13, old)], 0)))
        life.waits(1.0)
        assert life.written["newest"][0] == 13

    def test_where_transactions_cannot_be_seen_the_right_to_see_them_is_named(self) -> None:
        life, _ = streaming(newest=(10, NOW, "`id`"), position=at(4_000))
        life.polled(state="denied")
        life.waits(1.0)
        life.on(e.Done(e.Sample(), e.Sampled([NewRow(12, NOW), NewRow(11, at(3_000))], 0, 10)))
        [line] = life.lines("store.rows_in_past")
        assert "or GRANT PROCESS" in line.facts["fix"]

    @staticmethod
    def _keeps_getting_rows_of_the_past(life: Life, seconds: int, first: int = 11) -> None:
        for number in range(first, first + seconds):
            life.waits(1.1)
            rows = [NewRow(number, life.database - at(3_600)), NewRow(9, NOW - at(1))]
            life.on(e.Done(e.Sample(), e.Sampled(rows, 0)))
            if life.all(e.Sample)[-1].above is not None and not life.is_ending():
                life.on(e.Done(e.Sample(), e.Sampled(rows, 0, life.all(e.Sample)[-1].above)))

    def test_where_they_keep_coming_the_publisher_stops(self) -> None:
        life, _ = streaming(newest=(10, NOW, "`id`"), position=at(4_000))
        life.on(e.Done(e.CheckTable(), e.TableChecked(layout())))
        looked = len(life.all(e.CheckTable))
        self._keeps_getting_rows_of_the_past(life, 12)
        assert not life.is_ending(), "the table is looked at first"
        assert len(life.all(e.CheckTable)) == looked + 1
        life.on(e.Done(e.CheckTable(), e.TableChecked(layout())))
        self._keeps_getting_rows_of_the_past(life, 1, first=30)
        error = life.outcome()
        assert error is not None
        assert error.code == "store.rows_in_past"

    def test_a_server_with_another_zone_than_the_one_before_does_not_stop_it(self) -> None:
        """With a DATETIME, what its writers write looked an hour old, and was 56 s later read
        right."""
        life, _ = streaming(newest=(10, NOW, "`id`"), position=at(4_000))
        life.on(e.Done(e.CheckTable(), e.TableChecked(layout())))
        self._keeps_getting_rows_of_the_past(life, 12)
        life.on(e.Done(e.CheckTable(), e.TableChecked(layout(unit=1000))))
        self._keeps_getting_rows_of_the_past(life, 1, first=30)
        assert not life.is_ending()

    def test_rows_of_the_future_are_said_while_they_last(self) -> None:
        life, _ = streaming()
        for ahead in (0, at(100), at(99), 0):
            life.waits(1.0)
            life.on(e.Done(e.Sample(), e.Sampled([], ahead)))
        assert len(life.lines("store.rows_in_future")) == 1
        assert life.coordinator.progress.ahead_seconds == 0.0

    def test_a_topic_is_looked_at_where_this_publisher_has_not_written_for_a_while(self) -> None:
        life, lanes = streaming()
        life.reports(lanes[0], done=1, position=at(2_000), offsets={("events", 0): 5})
        life.reports(lanes[1], done=1, position=at(2_000), offsets={("events", 1): 5})
        life.waits(10.0)
        asked = len(life.all(e.CheckTopic))
        life.waits(30.0)
        assert len(life.all(e.CheckTopic)) == asked, "a broker that hangs is not asked again"
        life.on(e.Done(e.CheckTopic({})))
        life.waits(1.0)
        life.on(e.Done(e.CheckTopic({})))
        life.reports(lanes[1], done=1, position=at(2_000), offsets={("events", 1): 6})
        life.waits(10.0)
        assert life.last(e.CheckTopic).ends == {("events", 0): 5}

    @pytest.mark.parametrize("code", ["sink.other_publisher", "sink.topic_recreated"])
    def test_what_it_finds_may_end_the_run(self, code: str) -> None:
        life, _ = streaming()
        life.on(e.Failed(e.CheckTopic({}), SinkError(code, "…", retriable=True)))
        error = life.outcome()
        assert error is not None
        assert error.code == code

    def test_what_else_goes_wrong_with_that_look_is_met_by_who_publishes(self) -> None:
        life, _ = streaming()
        life.on(e.Failed(e.CheckTopic({}), SinkError("sink.denied", "…")))
        life.on(e.Failed(e.CheckTable(), GONE))
        life.on(e.Failed(e.CheckOpen({}), SinkError("sink.denied", "…")))
        assert not life.is_ending()

    def test_an_idle_publisher_looks_whether_readers_see_what_it_published(self) -> None:
        life, lanes = streaming()
        ends = {("events", 0): 5}
        counts = some_rows(3)
        life.reports(lanes[0], done=1, position=at(2_000), offsets=ends, counts=counts)
        for _ in range(10):
            life.waits(1.0)
            life.reports(lanes[0], done=1, position=at(2_000), offsets=ends, counts=counts)
        assert life.all(e.CheckOpen) == [], "it is busy"
        life.waits(13.0)
        assert life.all(e.CheckOpen) == [e.CheckOpen(ends)]
        life.on(e.Done(e.CheckOpen({}), False))
        assert not lanes[0].is_told_to_stop
        life.on(e.Done(e.CheckOpen({}), True))
        assert all(lane.is_told_to_stop for lane in lanes), "their successors fix it"
        life.ends(lanes[0])
        assert life.starts == [0, 1, 0]

    def test_how_far_the_topic_is_read_back_is_said_every_ten_seconds(self) -> None:
        life = begin()
        for second in range(25):
            life.on(Folding(0, 1_000 * second, 25_000 - 1_000 * second))
            life.waits(1.0)
        lines = life.lines("reading the topic back")
        assert len(lines) in {3, 4}
        assert lines[-1].facts["left"] < lines[0].facts["left"]

    def test_a_report_of_what_went_wrong_is_a_line_for_the_log(self) -> None:
        life, lanes = streaming()
        gap = {"aggregate_id": "a", "from_version": 1, "to_version": 2}
        dead = {"aggregate_id": "b", "version": 7, "reason": "too large"}
        life.reports(lanes[0], done=1, position=at(2_000), skipped=[gap], dead=[dead])
        assert [line.facts for line in life.lines("gap skipped")] == [gap]
        assert [line.facts for line in life.lines("dead-letter topic")] == [dead]
        life.reports(lanes[0], done=1, position=at(2_000), rebuilt="checksum", published=9)
        [line] = life.lines("rebuilding the index")
        assert line.facts["reason"] == "checksum"
        assert life.coordinator.progress.published == 9
        assert life.coordinator.progress.dead == 1

    def test_very_many_aggregates_without_their_first_version_are_said_in_growing_steps(
        self,
    ) -> None:
        life, lanes = streaming()
        for _ in range(30):
            life.reports(lanes[0], done=1, position=at(2_000), begin_above=500)
        assert [line.facts["aggregates"] for line in life.lines("begin above")] == [1_000, 10_000]
