"""What users ask of shards, and their answers.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

from eventpub.channel import Request
from eventpub.coordinator import events as e
from tests.coordinator.life import (
    at,
    begin,
    of_shard,
    streaming,
)


class TestRequests:
    def test_one_goes_to_the_shard_of_its_aggregate_and_is_answered_once(self) -> None:
        life, lanes = streaming()
        answers: list[dict[int, str]] = []
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
        answers: list[dict[int, str]] = []
        life.on(e.RequestReceived(Request("r1", "list"), answers.append))
        life.reports(lanes[1], done=1, position=at(2_000), answers={"r1": "[1]"})
        assert answers == []
        life.reports(lanes[0], done=1, position=at(2_000), answers={"r1": "[0]"})
        assert answers == [{0: "[0]", 1: "[1]"}]
        assert not life.lines("was requested")

    def test_who_has_the_next_lease_is_asked_again(self) -> None:
        life, lanes = streaming()
        answers: list[dict[int, str]] = []
        request = Request("r1", "skip", of_shard(0), version=4)
        life.on(e.RequestReceived(request, answers.append))
        life.loses(lanes[0])
        fresh = life.joins(0)
        assert fresh.requests == [request]
        life.reports(fresh, position=at(2_000), answers={"r1": "skipped"})
        assert answers == [{0: "skipped"}]
        life.loses(fresh)
        assert life.joins(0).requests == [], "it is answered"

    def test_one_that_was_left_for_the_next_publisher_waits_for_its_runner(self) -> None:
        answers: list[dict[int, str]] = []
        request = Request("r1", "retry", of_shard(0))
        life = begin(requests=((request, answers.append),))
        lane = life.joins(0)
        assert lane.requests == [request]
        life.reports(lane, position=at(1_000), answers={"r1": "nothing is missing"})
        assert answers == [{0: "nothing is missing"}]

    def test_one_that_was_withdrawn_is_asked_of_nobody_any_more(self) -> None:
        life, lanes = streaming()
        answers: list[dict[int, str]] = []
        life.on(e.RequestReceived(Request("r1", "retry", of_shard(0)), answers.append))
        life.on(e.Withdrawn("r1"))
        life.loses(lanes[0])
        fresh = life.joins(0)
        assert fresh.requests == []
        life.reports(fresh, position=at(2_000), answers={"r1": "found"})
        assert answers == []
