"""What must be on disk, and when it is written.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

from eventpub.coordinator import events as e
from eventpub.errors import StateError
from tests.coordinator.life import (
    NOW,
    at,
    begin,
    begun,
    counted_with,
    streaming,
)

HORIZON = at(300)
DAY = at(86_400)


class TestWhatMustLast:
    def test_the_position_is_written_with_what_was_hidden_below_it(self) -> None:
        life, lanes = streaming()
        counted_with(life)
        life.polled(at(3_000), hidden_since=at(1_600))
        for lane in lanes:
            life.reports_done(lane, hidden_since=lane.windows[-1].hidden_since)
        life.waits(1.0)
        assert life.written["position"] == at(3_000)
        assert life.written["hidden_since"] == at(1_600)

    def test_what_one_shard_has_not_passed_yet_is_not_written_as_hidden_nor_as_read(self) -> None:
        life, lanes = begun(hidden_since=at(1_000))
        life.polled(at(2_000), hidden_since=at(1_600))
        life.reports_done(lanes[0], hidden_since=at(1_600))
        life.waits(1.0)
        assert life.written["position"] == at(1_000)
        assert life.written["hidden_since"] <= at(1_000)

    def test_what_the_former_run_left_hidden_stays_so_until_windows_say_something_else(
        self,
    ) -> None:
        """A run that ends before its first window leaves the next one no less than it was left."""
        life, lanes = begun(hidden_since=at(900))
        life.polled(None, ended=((at(897), at(1_000)),), hidden_since=at(897))
        counted_with(life)
        assert life.written["hidden_since"] == at(897)
        life.polled(at(2_000))
        for lane in lanes:
            life.reports_done(lane)
        counted_with(life)
        assert life.written["hidden_since"] is None
        life.ends(lanes[0])
        life.waits(1.0)
        life.reports(life.next_runner(0), position=at(2_000), low=at(2_000))
        life.waits(1.5)
        assert life.written["hidden_since"] is None

    def test_what_has_ended_and_is_not_counted_yet_is_written_as_hidden(self) -> None:
        """A14: who starts next counts it; the transaction itself is gone by then."""
        life, lanes = streaming()
        counted_with(life)
        assert life.written.get("hidden_since") is None
        life.polled(at(2_001), ended=((at(400), at(402)),))
        for lane in lanes:
            life.reports_done(lane)
        life.waits(1.0)
        assert life.written["position"] == at(2_001)
        assert life.written["hidden_since"] == at(400)
        counted_with(life)
        life.waits(1.0)
        assert life.written.get("hidden_since") is None

    def test_while_the_clock_is_behind_what_may_come_below_the_position_is_hidden(self) -> None:
        """Who starts next counts it, however long that takes: no window shows it."""
        life, lanes = streaming()
        counted_with(life)
        life.polled(at(2_001))
        for lane in lanes:
            life.reports_done(lane)
        counted_with(life)
        life.waits(1.0)
        assert life.written.get("hidden_since") is None
        life.polled(None, now=at(1_500))
        # at once: a crash must not find the old one
        assert life.written["hidden_since"] == at(1_500) - HORIZON
        life.polled(None, now=at(1_600), hidden_since=at(1_490))
        counted_with(life)
        life.waits(1.0)
        assert life.written["hidden_since"] == min(at(1_490), at(1_600) - HORIZON)
        life.polled(at(2_100), now=at(2_100))
        for lane in lanes:
            life.reports_done(lane)
        counted_with(life)
        life.waits(1.0)
        assert life.written.get("hidden_since") is None

    def test_what_was_read_long_ago_hid_nothing_for_longer_than_a_day(self) -> None:
        """A publisher that began with the oldest event, or years behind; or that starts."""
        life, _ = begun(hidden_since=at(1_000) - 9 * DAY, position=at(1_000) - 9 * DAY)
        assert life.all(e.Poll)[-1].hidden_since == NOW - DAY

    def test_what_was_open_for_days_is_whole_for_who_polls_anew(self) -> None:
        life, lanes = streaming()
        counted_with(life)
        old = at(2_001) - 3 * DAY
        life.polled(at(2_001), hidden_since=old)
        for lane in lanes:
            life.reports_done(lane, hidden_since=old)
        life.polled(at(2_002), hidden_since=old)
        assert life.all(e.Poll)[-1].hidden_since == old

    def test_who_polls_anew_begins_with_what_was_hidden(self) -> None:
        life, lanes = streaming()
        counted_with(life)
        life.polled(at(2_001), hidden_since=at(1_400))
        for lane in lanes:
            life.reports_done(lane, hidden_since=at(1_400))
        life.polled(at(2_002))
        assert life.all(e.Poll)[-1].hidden_since == at(1_400)

    def test_a_start_without_a_former_run_knows_of_nothing_hidden(self) -> None:
        life = begin(position=None)
        assert life.all(e.Poll)[0].hidden_since is None

    def test_it_is_written_when_something_has_changed(self) -> None:
        """It is synced, and was written each second of an idle day."""
        life, lanes = streaming()
        life.waits(2.0)
        written = len(life.all(e.Remember))
        for _ in range(100):
            life.polled()
        assert life.now > 1_030
        assert len(life.all(e.Remember)) == written
        life.polled(at(2_001))
        for lane in lanes:
            life.reports_done(lane)
        life.waits(1.5)
        assert len(life.all(e.Remember)) == written + 1

    def test_what_a_full_disk_has_refused_is_written_again(self) -> None:
        life, _ = streaming()
        life.waits(2.0)
        written = life.all(e.Remember)
        full = StateError("state.disk_full", "no space", retriable=True)
        life.on(e.Failed(written[-1], full))
        assert not life.is_ending()
        assert "disk_full" in str(life.coordinator.progress.last_error)
        life.waits(1.1)
        assert life.all(e.Remember)[len(written) :] == [written[-1]]

    def test_it_says_where_shards_are_acknowledged_to_be(self) -> None:
        life, lanes = streaming()
        life.reports(lanes[0], done=1, position=at(2_000), offsets={("events", 0): 12})
        life.reports(lanes[1], done=1, position=at(2_000), offsets={("events", 1): 3})
        life.waits(1.0)
        assert sorted(life.written["ends"]) == [["events", 0, 12], ["events", 1, 3]]
