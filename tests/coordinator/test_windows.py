"""How far the table is read, and what each shard is sent of it.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from eventpub.admission.model import EVENTS
from eventpub.coordinator import events as e
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.shards import MOST_PAGES, MOST_WINDOWS
from tests.coordinator.life import (
    NOW,
    SECOND,
    at,
    begin,
    begun,
    streaming,
    upto,
)


class TestWindows:
    def test_a_window_is_the_same_for_all_shards_and_the_next_begins_where_it_ends(self) -> None:
        life, lanes = begun()
        life.polled(at(2_000), hidden_since=at(1_990))
        for lane in lanes:
            [window] = lane.windows
            assert (window.number, window.upto) == (1, at(2_000))
            assert (window.hidden_since, window.rows) == (at(1_990), None)
        life.polled(at(2_001))
        assert [w.number for w in lanes[0].windows] == [1, 2]
        assert [p.after / SECOND for p in life.all(e.Poll)] == [1_000, 2_000]

    def test_who_begins_is_told_when_the_oldest_that_is_open_began_by_the_clock_of_now(
        self,
    ) -> None:
        """After the clock went back no window comes for long, and gaps are found all the same."""
        life, lanes = streaming()
        life.polled(None, now=at(1_500), open_since=at(1_499))
        life.ends(lanes[0])
        lane = life.next_runner(0)
        life.waits(0.5)
        assert lane.windows[0].open_since == at(1_499)

    def test_where_nothing_is_new_nothing_is_sent(self) -> None:
        life, lanes = streaming()
        sent = [len(lane.sent) for lane in lanes]
        for _ in range(20):
            life.polled()
        assert [len(lane.sent) for lane in lanes] == sent

    def test_it_polls_again_when_the_boundary_says_and_never_twice_at_a_time(self) -> None:
        life, _ = streaming()
        life.polled(pause=0.3)
        assert life.poll() is None
        life.waits(0.29)
        assert life.poll() is None
        life.waits(0.02)
        assert life.poll() is not None
        polls = len(life.all(e.Poll))
        life.waits(10.0)
        assert len(life.all(e.Poll)) == polls

    def test_the_rows_of_a_page_go_to_their_shards(self) -> None:
        life, lanes = begun()
        parts = tuple(
            pa.Table.from_pylist([{"aggregate_id": a, "version": 1}], EVENTS) for a in "ab"
        )
        life.polled(at(2_000), is_page=True, rows=parts)
        for lane, part in zip(lanes, parts, strict=True):
            [window] = lane.windows
            assert (window.after, window.upto) == (at(1_000), at(2_000))
            assert window.rows is not None
            assert window.rows.equals(part)

    @pytest.mark.parametrize(("policy", "reads"), [("hold_aggregate", True), ("hold_shard", False)])
    def test_where_a_shard_may_wait_each_reads_for_itself(self, policy: str, reads: bool) -> None:
        life, _ = begun(sections={"gaps": {"policy": policy}})
        assert life.poll() is not None
        assert life.last(e.Poll).with_rows is reads

    def test_a_page_is_followed_by_the_next_at_once(self) -> None:
        life, _ = begun()
        life.pages(at(1_100))
        assert life.poll() is not None
        assert life.last(e.Poll).after == at(1_100)

    def test_of_a_backlog_a_few_pages_are_on_their_way(self) -> None:
        life, lanes = begun()
        for page in range(MOST_PAGES):
            life.pages(at(1_100 + page))
        assert life.poll() is None, "the shards are to come to it"
        life.reports(lanes[0], done=2, position=at(1_101))
        assert life.poll() is None, "the other one has not"
        life.reports(lanes[1], done=1, position=at(1_100))
        assert life.poll() is not None
        life.pages(at(1_200))
        assert [len(lane.windows) for lane in lanes] == [MOST_PAGES + 1] * 2

    def test_a_shard_that_stalls_is_waited_for_five_seconds_and_then_reads_one_window(self) -> None:
        life, (stalled, other) = begun()
        for page in range(MOST_PAGES):
            life.pages(at(1_100 + page))
        life.reports_done(other)
        life.waits(4.0)
        assert life.poll() is None
        life.waits(2.0)
        for page in range(10):
            life.pages(at(1_200 + page))
            life.reports_done(other)
        assert upto(stalled) == [1_100, 1_101, 1_102, 1_103], "it has no room for more"
        assert upto(other)[-1] == 1_209
        life.reports(stalled, done=MOST_PAGES - 1, position=at(1_102))
        assert len(stalled.windows) == MOST_PAGES, "not before it has done all of these"
        life.reports_done(stalled)
        assert upto(stalled)[MOST_PAGES:] == [1_209]
        assert stalled.windows[-1].rows is None
        assert life.coordinator.progress.position == at(1_103)
        life.reports_done(stalled)
        assert life.coordinator.progress.position == at(1_209)
        life.pages(at(1_300))
        assert upto(stalled)[-1] == upto(other)[-1] == 1_300

    def test_small_windows_that_a_shard_does_not_come_to_become_one(self) -> None:
        life, (slow, other) = begun()
        for number in range(40):
            life.polled(at(1_100 + number))
            life.reports_done(other)
        assert len(slow.windows) == MOST_WINDOWS
        assert upto(other)[-1] == 1_139, "nobody waits for it"
        life.reports_done(slow)
        assert upto(slow)[MOST_WINDOWS:] == [1_139]

    def test_the_position_is_that_of_the_slowest_shard(self) -> None:
        life, lanes = begun()
        life.polled(at(2_000))
        life.reports_done(lanes[0])
        life.waits(1.0)
        assert life.written["position"] == at(1_000)
        life.reports_done(lanes[1], low=at(1_700))
        life.waits(1.0)
        assert (life.written["position"], life.written["low"]) == (at(2_000), at(1_700))

    def test_it_says_that_everything_is_published_as_soon_as_it_is(self) -> None:
        life, lanes = begun()
        life.on(e.Done(e.MeasureLag(at(1_000)), e.LagMeasured(at(1_000), at(2_000), 30.0, 400)))
        assert life.coordinator.progress.lag_events == 400
        life.polled(at(2_000), upper=at(2_000))
        for lane in lanes:
            life.reports_done(lane)
        assert life.coordinator.progress.lag_events == 0
        life.on(e.Done(e.MeasureLag(at(1_000)), e.LagMeasured(at(1_000), at(2_000), 30.0, 400)))
        assert life.coordinator.progress.lag_events == 0, "that was before"


@pytest.mark.parametrize("is_polled_before", [True, False])
def test_who_begins_with_an_older_index_reads_as_far_as_all_have(is_polled_before: bool) -> None:
    """The indexes were further than was written down, and nobody writes any more."""
    life = begin()
    lanes = [life.next_runner(number) for number in range(2)]
    ends = (at(1_100), at(1_300))
    if is_polled_before:  # the second one while the shards say where they are
        life.polled(ends[0], is_page=True)
    poll = life.poll()
    for lane in lanes:
        life.reports(lane, position=at(1_200), low=at(1_200))
    if poll is not None:
        life.on(e.Done(poll, PollResult(NOW, ends[1], ends[1] if is_polled_before else None)))
    life.polled(None)
    life.ends(lanes[0])
    older = life.next_runner(0)
    life.reports(older, position=at(1_000), low=at(1_000))
    assert [window.upto for window in older.windows][-1] >= at(1_200)
    assert older.windows[-1].rows is None


def test_who_has_begun_with_an_older_index_before_all_say_how_far_they_are_reads_as_far() -> None:
    life = begin()
    lanes = [life.next_runner(number) for number in range(2)]
    life.polled(at(1_100), is_page=True)
    life.reports(lanes[0], position=at(1_200), low=at(1_200))
    life.ends(lanes[0])
    older = life.next_runner(0)
    life.reports(lanes[1], position=at(1_200), low=at(1_200))
    life.reports(older, position=at(1_000), low=at(1_000))
    for lane in (older, lanes[1]):
        life.reports_done(lane)
    life.polled(None)
    assert older.windows[-1].upto >= at(1_200)


def test_a_window_is_never_sent_that_ends_before_the_one_before() -> None:
    """A boundary that connects to another server may see an earlier time."""
    life, lanes = streaming()
    life.polled(at(1_500))
    assert {window.upto for window in lanes[0].windows} == {at(2_000)}


class TestHolds:
    def test_of_one_that_is_due_the_shard_is_sent_a_window_without_rows(self) -> None:
        life, (holder, other) = streaming()
        due = life.database + at(2)
        life.reports(holder, done=1, position=at(2_000), holds=1, next_due=due)
        life.polled()
        life.polled()
        assert life.all(e.Poll)[-1].next_due == due
        windows = len(holder.windows)
        life.database = due + 1
        life.polled(is_due=True, open_since=at(1_234))
        [window] = holder.windows[windows:]
        assert (window.upto, window.open_since) == (at(2_000), at(1_234))
        assert len(other.windows) == 1, "it holds nothing"

    def test_once_for_each_report(self) -> None:
        life, (holder, _) = streaming()
        due = life.database
        life.reports(holder, done=1, position=at(2_000), holds=1, next_due=due)
        for _ in range(5):
            life.polled(is_due=True)
        assert len(holder.windows) == 2
        assert life.all(e.Poll)[-1].next_due is None, "it is on its way"
        life.reports_done(holder, holds=1, next_due=due)
        for _ in range(5):
            life.polled(is_due=True)
        assert len(holder.windows) == 3, "it has said that one is still due"

    def test_one_that_is_not_due_yet_is_left_alone(self) -> None:
        life, (holder, _) = streaming()
        later = life.database + at(20)
        life.reports(holder, done=1, position=at(2_000), holds=1, next_due=later)
        for _ in range(5):
            life.polled(is_due=True)  # another's, say
        assert len(holder.windows) == 1

    def test_one_that_was_seen_before_the_clock_went_back_is_looked_at_at_once(self) -> None:
        """It is due at a time that comes in an hour, longer than any hold waits."""
        life, (holder, other) = streaming()
        due = life.database + at(20)
        life.reports(holder, done=1, position=at(2_000), holds=1, next_due=due)
        life.polled(now=life.database - at(3_600))
        life.polled()
        assert (next_due := life.all(e.Poll)[-1].next_due) is not None
        assert next_due <= life.database
        life.polled(is_due=True)
        assert (len(holder.windows), len(other.windows)) == (2, 1)
        life.reports_done(holder, holds=1, next_due=life.database + at(1))
        for _ in range(2):
            life.polled(is_due=True)
        assert len(holder.windows) == 2, "the shard has seen it anew"

    def test_what_begins_after_a_poll_may_fill_a_gap_that_is_seen_later(self) -> None:
        """The window may be used much later; a skip needs a poll that is newer than the hold."""
        life, (lane, _) = streaming()
        life.polled(at(2_100), now=at(2_101), open_since=None)
        assert lane.windows[-1].open_since == at(2_101)
        life.polled(at(2_200), now=at(2_201), open_since=at(1_500))
        assert lane.windows[-1].open_since == at(1_500)
