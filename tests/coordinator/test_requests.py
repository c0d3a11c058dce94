"""What users ask of shards, and their answers.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

from typing import TypeAlias

import pytest

from eventpub.channel import Request
from eventpub.coordinator import events as e
from eventpub.coordinator.status import status
from eventpub.errors import EventpubError, SinkError, StateError
from tests.coordinator.life import (
    Life,
    Runner,
    at,
    begin,
    of_shard,
    streaming,
)

Outcome: TypeAlias = dict[int, str] | EventpubError

AWAY = SinkError("sink.unreachable", "no broker answers", retriable=True)
DEFECT = StateError("shard.failed", "unexpected error in shard 0: KeyError: 'a'", retriable=True)


def begins(life: Life, shard: int) -> Runner:
    """A shard's next runner has read the topic back."""
    lane = life.next_runner(shard)
    life.reports(lane, position=at(2_000), low=at(2_000))
    return lane


def refused(outcomes: list[Outcome]) -> EventpubError:
    """The one outcome, which is an error."""
    [error] = outcomes
    assert isinstance(error, EventpubError)
    return error


class TestRequests:
    def test_one_goes_to_the_shard_of_its_aggregate_and_is_answered_once(self) -> None:
        life, lanes = streaming()
        answers: list[Outcome] = []
        request = Request("r1", "retry", of_shard(1))
        life.on(e.RequestReceived(request, answers.append))
        assert [lane.requests for lane in lanes] == [[], [request]]
        life.reports(lanes[1], done=1, position=at(2_000), answers={"r1": "found"})
        life.reports(lanes[1], done=1, position=at(2_000), answers={"r1": "found"})
        assert answers == [{1: "found"}]
        [line] = life.lines("gaps retry was requested")
        assert line.facts == {"aggregate_id": of_shard(1), "outcome": "found"}

    def test_a_list_is_of_all_shards(self) -> None:
        life, lanes = streaming()
        answers: list[Outcome] = []
        life.on(e.RequestReceived(Request("r1", "list"), answers.append))
        life.reports(lanes[1], done=1, position=at(2_000), answers={"r1": "[1]"})
        assert answers == []
        life.reports(lanes[0], done=1, position=at(2_000), answers={"r1": "[0]"})
        assert answers == [{0: "[0]", 1: "[1]"}]
        assert not life.lines("was requested")

    def test_the_next_runner_is_asked_again(self) -> None:
        life, lanes = streaming()
        answers: list[Outcome] = []
        request = Request("r1", "skip", of_shard(0), version=4)
        life.on(e.RequestReceived(request, answers.append))
        life.ends(lanes[0])
        fresh = begins(life, 0)
        assert fresh.requests == [request]
        life.reports(fresh, position=at(2_000), answers={"r1": "skipped"})
        assert answers == [{0: "skipped"}]
        life.ends(fresh)
        assert begins(life, 0).requests == [], "it is answered"

    def test_nobody_is_asked_who_has_not_read_the_topic_back(self) -> None:
        """Until then nothing is done of it: it can be taken back, and is to blame for nothing."""
        life, lanes = streaming()
        answers: list[Outcome] = []
        life.ends(lanes[0])
        life.on(e.RequestReceived(Request("r1", "retry", of_shard(0)), answers.append))
        for _ in range(4):
            lane = life.next_runner(0)
            life.ends(lane, AWAY)
            assert lane.requests == []
        assert answers == [], "who asks has a timeout"
        assert len(begins(life, 0).requests) == 1

    def test_one_that_was_left_for_the_next_publisher_waits_for_its_runner(self) -> None:
        answers: list[Outcome] = []
        request = Request("r1", "retry", of_shard(0))
        life = begin(requests=((request, answers.append),))
        lane = begins(life, 0)
        assert lane.requests == [request]
        life.reports(lane, position=at(1_000), answers={"r1": "nothing is missing"})
        assert answers == [{0: "nothing is missing"}]

    def test_one_that_was_withdrawn_is_asked_of_nobody_any_more(self) -> None:
        life, lanes = streaming()
        answers: list[Outcome] = []
        life.on(e.RequestReceived(Request("r1", "retry", of_shard(0)), answers.append))
        life.on(e.Withdrawn("r1"))
        life.ends(lanes[0])
        fresh = begins(life, 0)
        assert fresh.requests == []
        life.reports(fresh, position=at(2_000), answers={"r1": "found"})
        assert answers == []


class TestRequestsThatRunnersAreToDo:
    """The engine Spark leaves these for its planner."""

    def test_are_those_that_were_sent_and_have_no_answer(self) -> None:
        life, lanes = streaming()
        requests = [Request("r1", "retry", of_shard(0)), Request("r2", "list")]
        for request in requests:
            life.on(e.RequestReceived(request, lambda _: None))
        assert life.coordinator.requests.take_back() == requests
        for lane in lanes:
            life.reports(lane, done=1, position=at(2_000), answers={"r2": "[]"})
        assert life.coordinator.requests.take_back() == requests[:1]

    def test_are_none_that_were_withdrawn_whether_they_were_sent_or_not(self) -> None:
        life, lanes = streaming()
        life.on(e.RequestReceived(Request("r1", "retry", of_shard(0)), lambda _: None))
        life.on(e.Withdrawn("r1"))
        assert life.coordinator.requests.take_back() == []
        life.on(e.Tick())
        life.reports(lanes[0], done=1, position=at(2_000), answers={"r1": "found"})
        assert life.coordinator.requests.get("r1") is None


class TestARequestEndsNobody:
    def test_after_two_runners_have_failed_with_it_it_is_answered_with_their_error(self) -> None:
        life, lanes = streaming()
        answers: list[Outcome] = []
        request = Request("r1", "publish", of_shard(0), version=4)
        life.on(e.RequestReceived(request, answers.append))
        lane = lanes[0]
        for _ in range(2):
            assert lane.requests == [request]
            assert not answers
            life.ends(lane, DEFECT)
            lane = begins(life, 0)
        assert lane.requests == []
        error = refused(answers)
        assert error.code == "run.request_failed"
        assert DEFECT.code in str(error)
        assert life.lines("publish was requested, and not done")
        life.reports(lane, position=at(2_000), answers={"r1": "published"})
        assert len(answers) == 1
        assert not life.is_ending()

    def test_one_that_was_left_for_this_publisher_is_given_up_in_the_same_way(self) -> None:
        answers: list[Outcome] = []
        life = begin(requests=((Request("r1", "skip", of_shard(0), 4), answers.append),))
        for _ in range(2):
            life.ends(begins(life, 0), DEFECT)
        assert refused(answers).code == "run.request_failed"
        assert begins(life, 0).requests == []

    def test_runners_that_leave_because_they_were_asked_to_have_not_failed(self) -> None:
        life, lanes = streaming()
        answers: list[Outcome] = []
        request = Request("r1", "skip", of_shard(0), 4)
        life.on(e.RequestReceived(request, answers.append))
        lane = lanes[0]
        for _ in range(3):
            life.on(e.Done(e.CheckOpen({}), True))
            life.ends(lane)
            lane = begins(life, 0)
            assert lane.requests == [request]
        assert answers == []

    def test_a_skip_that_was_done_by_a_runner_that_was_lost_is_answered_by_the_next(self) -> None:
        life, lanes = streaming()
        answers: list[Outcome] = []
        life.on(e.RequestReceived(Request("r1", "skip", of_shard(0), 4), answers.append))
        life.ends(lanes[0])
        lane = begins(life, 0)
        life.reports(lane, position=at(2_000), answers={"r1": "skipped"})
        assert answers == [{0: "skipped"}]
        for _ in range(2):
            life.ends(lane, DEFECT)
            lane = begins(life, 0)
        assert len(answers) == 1


class TestWhilePaused:
    @pytest.mark.parametrize("action", ["retry", "skip", "publish"])
    def test_what_publishes_is_refused(self, action: str) -> None:
        life, lanes = streaming()
        life.on(e.PauseAsked(True, "me"))
        answers: list[Outcome] = []
        request = Request("r1", action, of_shard(0), 4)  # type: ignore[arg-type]
        life.on(e.RequestReceived(request, answers.append))
        error = refused(answers)
        assert error.code == "run.paused"
        assert "eventpub resume" in str(error)
        assert lanes[0].requests == []

    def test_a_list_is_answered(self) -> None:
        life, lanes = streaming()
        life.on(e.PauseAsked(True, "me"))
        life.on(e.RequestReceived(Request("r1", "list"), lambda _: None))
        assert all(lane.requests for lane in lanes)

    def test_what_a_runner_has_is_under_way_and_the_next_runner_does_not_get_it(self) -> None:
        life, lanes = streaming()
        answers: list[Outcome] = []
        life.on(e.RequestReceived(Request("r1", "skip", of_shard(0), 4), answers.append))
        life.on(e.PauseAsked(True, "me"))
        assert in_work(life) == [1, 0]
        assert answers == []
        life.ends(lanes[0], DEFECT)
        assert "shard.failed" in str(refused(answers)), "it may have been done"
        assert begins(life, 0).requests == []
        assert in_work(life) == [0, 0]

    def test_one_that_was_withdrawn_is_under_way_until_its_runner_has_answered(self) -> None:
        life, lanes = streaming()
        life.on(e.RequestReceived(Request("r1", "skip", of_shard(0), 4), lambda _: None))
        life.on(e.Withdrawn("r1"))
        life.on(e.PauseAsked(True, "me"))
        assert in_work(life) == [1, 0]
        life.reports(lanes[0], done=1, position=at(2_000), answers={"r1": "skipped"})
        assert in_work(life) == [0, 0]

    def test_one_that_was_left_for_this_publisher_waits_until_it_goes_on(self) -> None:
        answers: list[Outcome] = []
        request = Request("r1", "skip", of_shard(0), 4)
        life = begin(pause=(True, "me"), requests=((request, answers.append),))
        lane = begins(life, 0)
        assert lane.requests == []
        life.on(e.PauseAsked(False, "me"))
        assert lane.requests == [request]
        assert answers == []


def in_work(life: Life) -> list[int]:
    """What `eventpub pause` waits for, by shard."""
    return [shard["in_work"] for shard in status(life.coordinator, life.now)["shards"]]
