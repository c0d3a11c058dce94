"""Named checks, honest lag and the pause, as time lines."""

from __future__ import annotations

import re

import pytest

from eventpub.channel import LATENCY_BOUNDS, Folding
from eventpub.coordinator import events as e
from eventpub.coordinator.progress import Histogram
from eventpub.coordinator.status import is_ready, notable, status
from eventpub.errors import SinkError, StateError, StoreError
from tests.coordinator.life import Life, at, begin, begun, counted_with, some_rows, streaming

AWAY = StoreError("store.unreachable", "no route to host", where="store.url", retriable=True)
NO_BROKER = SinkError("sink.unreachable", "no route to host", where="sink", retriable=True)


def states(life: Life) -> dict[str, str]:
    found = status(life.coordinator, life.now)
    return {check["name"]: check["state"] for check in found["checks"]}


def wrong(life: Life) -> set[str]:
    return {name for name, state in states(life).items() if state == "error"}


def working() -> Life:
    """A run of which all checks have been seen to work."""
    life, _ = streaming()
    life.on(e.Done(e.CheckTopic({})))
    life.on(e.Done(life.last(e.Remember)))
    measured(life, 0.0)
    return life


def message(life: Life, name: str) -> str:
    checks = status(life.coordinator, life.now)["checks"]
    return str(next(check["message"] for check in checks if check["name"] == name))


def measured(life: Life, seconds: float, events: int = 0) -> None:
    position = life.coordinator.durable.position
    life.on(
        e.Done(
            e.MeasureLag(position), e.LagMeasured(position, life.database - at(1), seconds, events)
        )
    )


def of_shards(life: Life) -> list[float]:
    return [shard["lag_seconds"] for shard in status(life.coordinator, life.now)["shards"]]


def published_per_second(life: Life) -> float:
    found: float = status(life.coordinator, life.now)["rates"]["published"]
    return found


def lag(life: Life) -> float:
    return float(status(life.coordinator, life.now)["lag"]["seconds"])


class TestChecks:
    def test_nothing_counts_as_well_before_it_was_seen_to_work(self) -> None:
        life = begin()
        assert wrong(life) == {
            "database", "boundary", "publishing", "shard 0", "shard 1", "index", "broker",
        }  # fmt: skip
        assert not is_ready(status(life.coordinator, life.now))

    def test_all_is_well_when_all_has_worked(self) -> None:
        life = working()
        assert wrong(life) == set()
        assert is_ready(status(life.coordinator, life.now))

    def test_a_database_that_is_away_is_said_since_when_and_until_when(self) -> None:
        life = working()
        began = life.now
        life.waits(0.5)
        life.on(e.Failed(e.Poll(0, None, False), AWAY))
        assert wrong(life) == {"database", "boundary"}
        check = life.coordinator.health.checks(life.now, 0.0)[0]
        assert check.message == "store.unreachable: no route to host [store.url]"
        assert began < check.since <= life.now
        assert check.last_ok == pytest.approx(began, abs=0.5)
        life.waits(1.0)
        life.polled()
        assert wrong(life) == set()

    def test_a_query_that_hangs_raises_nothing_and_is_seen(self) -> None:
        life = working()
        life.polled()
        life.waits(14.0)
        assert "database" not in wrong(life)
        life.waits(2.0)
        assert {"database", "boundary"} <= wrong(life)

    def test_a_broker_that_is_away_is_no_database_that_is(self) -> None:
        life = working()
        life.on(e.Failed(e.CheckTopic({}), NO_BROKER))
        assert wrong(life) == {"broker"}

    def test_a_check_that_is_ok_again_is_said_with_how_long_it_was_not(self) -> None:
        life = working()
        life.on(e.Failed(e.Poll(0, None, False), AWAY))
        life.waits(12.0)
        life.said.clear()
        measured(life, 0.0)
        lines = [c.text for c in life.said if isinstance(c, e.Log)]
        assert any(re.fullmatch("database: ok again after 1[23] s", line) for line in lines), lines

    def test_a_database_that_is_back_is_polled_at_once_however_long_it_was_away(self) -> None:
        """Whoever sees it first; else the boundary would be wrong beside a database that is ok."""
        life = working()
        for _ in range(8):
            poll = life.poll()
            if poll is not None:
                life.on(e.Failed(poll, AWAY))
            life.waits(15.0)
        life.said.clear()
        measured(life, 0.0)
        assert life.poll() is not None
        life.polled()
        assert not {"database", "boundary"} & wrong(life)

    def test_a_recount_that_stands_still_is_said_until_it_goes_on(self) -> None:
        life, _ = streaming()
        life.waits(10.0)
        count = life.last(e.Count)
        life.on(e.Failed(count, AWAY))
        [check] = [
            c for c in status(life.coordinator, life.now)["checks"] if c["name"] == "recount"
        ]
        assert check["state"] == "warn"
        assert check["message"].startswith(f"{len(count.buckets)} buckets could not be counted")
        life.waits(1.1)
        counted_with(life)
        [check] = [
            c for c in status(life.coordinator, life.now)["checks"] if c["name"] == "recount"
        ]
        assert check["state"] == "ok"

    def test_the_lag_in_events_is_not_known_while_the_database_does_not_answer(self) -> None:
        life = working()
        measured(life, 0.0)
        assert status(life.coordinator, life.now)["lag"]["events"] == 0
        life.waits(6.0)
        found = status(life.coordinator, life.now)["lag"]
        assert found["events"] is None
        assert found["seconds"] > 5

    def test_a_shard_whose_runner_was_lost_is_being_started_again(self) -> None:
        life, _ = streaming()
        for _ in range(2):
            life.ends(life.next_runner(0))
        assert states(life)["shard 0"] == "warn"
        assert "is being started" in message(life, "shard 0")

    def test_the_last_error_of_a_shard_is_kept_when_it_works_again(self) -> None:
        life, lanes = streaming()
        life.ends(lanes[0], NO_BROKER)
        assert "shard 0" in wrong(life)
        life.waits(1.0)
        lane = life.next_runner(0)
        life.reports(lane, position=at(2_000))
        assert "shard 0" in wrong(life), "that it begins says nothing"
        life.polled(at(2_500))
        life.reports_done(lane)
        assert "shard 0" not in wrong(life)
        shown = status(life.coordinator, life.now)["shards"][0]["last_error"]
        assert shown["code"] == "sink.unreachable"

    def test_a_shard_that_does_nothing_of_what_it_was_sent(self) -> None:
        life, _ = streaming()
        life.polled(at(2_500))
        life.waits(61.0)
        assert {"shard 0", "shard 1"} <= wrong(life)

    def test_a_shard_that_does_nothing_of_a_comparison(self) -> None:
        """While the database's clock is behind, events go out in no other way."""
        life, lanes = streaming()
        counted_with(life, {1_900})
        assert lanes[0].comparisons
        life.waits(61.0)
        assert {"shard 0", "shard 1"} <= wrong(life)
        for lane in lanes:
            life.reports(lane, position=at(2_000), low=at(2_000), compared=1)
        life.waits(61.0)
        assert not {"shard 0", "shard 1"} & wrong(life)

    def test_a_shard_whose_runners_are_lost_one_after_the_other(self) -> None:
        life, _ = streaming()
        for _ in range(6):
            life.ends(life.next_runner(0))
        assert "shard 0" in wrong(life)

    def test_an_index_that_is_rebuilt_is_a_warning_until_it_is(self) -> None:
        life, lanes = begun()
        life.on(e.Done(life.last(e.Remember)))
        life.on(Folding(0, 10, 1_000))
        assert states(life)["index"] == states(life)["shard 0"] == "warn"
        life.reports(lanes[1], position=at(1_000))
        assert states(life)["index"] == "warn", "the other one has not read it back yet"
        life.reports(lanes[0], position=at(1_000))
        assert states(life)["index"] == "ok"

    def test_a_fold_does_not_hide_a_full_disk(self) -> None:
        life = working()
        life.waits(1.5)
        full = StateError("state.disk_full", "no space", retriable=True)
        life.on(e.Failed(life.last(e.Remember), full))
        life.on(Folding(0, 10, 1_000))
        life.reports(life.runner(0), position=at(2_000), low=at(2_000))
        assert "index" in wrong(life)

    def test_a_shard_is_ready_when_it_has_read_its_topic_back_also_paused(self) -> None:
        life = begin(pause=(True, "me"))
        for number in range(2):
            life.reports(life.next_runner(number), position=at(1_000), low=at(1_000))
        assert states(life)["shard 0"] == states(life)["shard 1"] == "ok"
        assert states(life)["publishing"] == "warn"
        life.on(e.PauseAsked(False, "me"))
        assert states(life)["publishing"] == "ok"

    def test_a_large_window_of_which_something_is_done_all_the_time(self) -> None:
        life, lanes = streaming()
        life.polled(at(2_500))
        for _ in range(9):
            life.waits(10.0)
            life.reports(lanes[0], position=at(2_000), low=at(2_000), published=1_000)
        assert "shard 0" not in wrong(life)
        assert "shard 1" in wrong(life)

    def test_a_hold_that_waits_for_its_time_stops_nobody(self) -> None:
        life, lanes = streaming()
        life.on(e.Done(life.last(e.Remember)))
        life.reports_done(lanes[0], holds=1, low=at(1_500))
        for _ in range(70):
            life.waits(1.0)
            measured(life, 0.0)
        assert lag(life) > 60
        assert "publishing" not in wrong(life)

    def test_a_full_disk_is_wrong_until_the_position_is_written(self) -> None:
        life = working()
        life.waits(1.5)
        full = StateError("state.disk_full", "no space", retriable=True)
        life.on(e.Failed(life.last(e.Remember), full))
        assert "index" in wrong(life)
        life.on(e.Done(life.last(e.Remember)))
        assert "index" not in wrong(life)

    def test_events_that_are_due_and_not_published(self) -> None:
        life = working()
        for _ in range(70):
            life.waits(1.0)
            measured(life, 65.0, 10)
        assert "publishing" in wrong(life)

    def test_it_is_alive_while_its_loop_turns(self) -> None:
        life = working()
        assert status(life.coordinator, life.now + 30)["is_alive"]
        assert not status(life.coordinator, life.now + 61)["is_alive"]


class TestWhatIsWrittenDown:
    """A message that counts seconds had the status written each second, whatever had changed."""

    def test_is_not_new_because_time_passes(self) -> None:
        life = working()
        life.now += 20.0  # nothing is heard: the messages say for how long
        first = status(life.coordinator, life.now)
        life.now += 1.0
        second = status(life.coordinator, life.now)
        assert first["checks"][0]["message"] != second["checks"][0]["message"]
        assert notable(first) == notable(second)
        assert second["at"] >= first["at"], "how old it is"

    def test_is_new_when_a_check_changes_or_its_error_is_another(self) -> None:
        life = working()
        seen = [notable(status(life.coordinator, life.now))]
        for error in (AWAY, StoreError("store.auth_failed", "no such user")):
            life.on(e.Failed(e.MeasureLag(0), error))
            seen.append(notable(status(life.coordinator, life.now)))
        life.now += 20.0
        seen.append(notable(status(life.coordinator, life.now)))
        assert len({str(each) for each in seen}) == 4


class TestLag:
    def test_it_is_nought_when_all_up_to_the_boundary_is_published(self) -> None:
        assert lag(working()) == 0

    def test_it_grows_while_it_cannot_be_measured(self) -> None:
        life = working()
        seen = []
        for _ in range(5):
            life.on(e.Failed(e.MeasureLag(0), AWAY))
            life.waits(10.0)
            seen.append(lag(life))
        assert seen == sorted(seen)
        assert seen[-1] == pytest.approx(50.0, abs=2)

    def test_it_does_not_drop_because_a_runner_comes_back_while_the_database_is_away(self) -> None:
        life, lanes = streaming()
        measured(life, 0.0)
        life.waits(60.0)
        before = lag(life)
        life.ends(lanes[0])
        life.waits(1.0)
        life.reports(life.next_runner(0), position=at(2_000), low=at(2_000))
        assert lag(life) > before
        shards = status(life.coordinator, life.now)["shards"]
        assert min(shard["lag_seconds"] for shard in shards) > before

    def test_it_does_not_drop_because_a_measure_was_asked_for_before_the_position_moved(
        self,
    ) -> None:
        life, lanes = streaming()
        before = life.coordinator.durable.position
        life.polled(at(3_000))
        for lane in lanes:
            life.reports_done(lane)
        life.on(e.Done(e.MeasureLag(before), e.LagMeasured(before, at(4_000), 1_990.0, 7)))
        assert lag(life) == pytest.approx(1_000.0), "what is left is no older than that"

    def test_what_is_held_is_not_published(self) -> None:
        life, lanes = streaming()
        life.polled(at(3_000), upper=at(3_000))
        life.reports_done(lanes[0], low=at(2_500), holds=1)
        life.reports_done(lanes[1])
        measured(life, 0.0)
        assert lag(life) >= 500
        assert status(life.coordinator, life.now)["lag"]["events"] == 1
        assert of_shards(life)[0] >= 500
        assert of_shards(life)[1] == 0
        life.on(e.PauseAsked(True, "me"))
        assert of_shards(life)[0] >= 500
        assert of_shards(life)[1] == 0, "what another shard holds is not its"
        measured(life, 7.0)
        assert of_shards(life)[1] == 7, "what nobody has planned yet may be"
        for lane in lanes:
            life.ends(lane)
        measured(life, 0.0)
        assert of_shards(life)[1] == 0

    def test_the_rate_is_of_the_last_seconds(self) -> None:
        life, lanes = streaming()
        life.reports(lanes[0], published=500)
        life.waits(5.0)
        assert published_per_second(life) > 50
        life.waits(20.0)
        assert published_per_second(life) == 0


class TestPause:
    def pause(self, life: Life, *, is_paused: bool = True) -> int:
        """The work in progress."""
        life.on(e.PauseAsked(is_paused, "me"))
        return sum(shard["in_work"] for shard in status(life.coordinator, life.now)["shards"])

    def test_what_is_under_way_is_finished_and_nothing_more_is_sent(self) -> None:
        life, lanes = streaming()
        life.polled(at(2_500))
        assert self.pause(life) == 2
        for lane in lanes:
            life.reports_done(lane, next_due=at(1))
        for end in (2_600, 2_700):
            life.polled(at(end), is_due=True)
            life.waits(1.0)
        assert [len(lane.windows) for lane in lanes] == [2, 2]
        assert status(life.coordinator, life.now)["state"] == "paused"
        self.pause(life, is_paused=False)
        life.polled(at(2_700))
        assert life.coordinator.in_work(life.coordinator.shards[0]) == 1
        assert [lane.windows[-1].upto for lane in lanes] == [at(2_700)] * 2

    def test_the_next_run_begins_so(self) -> None:
        assert not begin().coordinator.is_paused
        life = begin(pause=(True, "me"))
        lane = life.next_runner(0)
        life.polled(at(2_000))
        assert not lane.windows
        self.pause(life, is_paused=False)
        life.polled(at(2_000))
        assert lane.windows

    def test_one_that_is_started_meanwhile_begins_when_it_is_over(self) -> None:
        life, lanes = streaming()
        self.pause(life)
        life.ends(lanes[0])
        life.waits(1.0)
        lane = life.next_runner(0)
        life.reports(lane, position=at(2_000))
        assert not lane.windows
        self.pause(life, is_paused=False)
        assert [window.upto for window in lane.windows] == [at(2_000)]

    def test_the_boundary_is_polled_meanwhile_for_nothing_but_itself(self) -> None:
        life, _ = streaming()
        self.pause(life)
        before = len(life.all(e.Poll))
        life.polled(at(2_500))
        for _ in range(10):
            life.waits(1.0)
            life.polled(at(2_500))
        polls = life.all(e.Poll)[before:]
        assert 5 <= len(polls) <= 12, "about once a second"
        assert not any(poll.with_rows or poll.next_due for poll in polls[1:])
        assert "database" not in wrong(life)


class TestHistogram:
    def test_each_duration_is_counted_once_at_the_first_bound_that_it_does_not_pass(self) -> None:
        found = Histogram((1.0, 2.0))
        for seconds in (0.5, 1.0, 1.5, 7.0):
            found.observe(seconds)
        assert found.counts == [2, 1, 1]
        assert found.sum == 10.0
        found.add([1, 0, 0], 0.25)
        assert found.counts == [3, 1, 1]
        found.add([1, 2], 3.0)
        assert found.counts == [3, 1, 1], "of other bounds: another version's"

    def test_shards_counts_are_added_up(self) -> None:
        life, lanes = streaming()
        counts = [0] * (len(LATENCY_BOUNDS) + 1)
        counts[3] = 5
        for lane in lanes:
            life.reports(
                lane, published=5, counts=some_rows(5), latency=counts, latency_sum=2.0,
                seconds={"publish": 0.03},
            )  # fmt: skip
        found = status(life.coordinator, life.now)
        assert found["latency"]["counts"][3] == 10
        assert found["latency"]["sum"] == 4.0
        assert sum(found["steps"]["publish"]["counts"]) == 2


def test_publishing_says_what_it_lacks() -> None:
    life = working()
    life.coordinator.health.lacking = "a batch has waited 15 s for an executor"
    assert wrong(life) == {"publishing"}
    assert "executor" in message(life, "publishing")
    life.coordinator.health.lacking = ""
    assert not wrong(life)
