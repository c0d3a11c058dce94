"""A cluster that has no place for the publisher: it publishes from threads, and says so."""

from __future__ import annotations

from typing import Any

from eventpub.coordinator import events as e
from eventpub.coordinator.absence import AGAIN
from eventpub.coordinator.status import is_ready, notable, status
from tests.coordinator.life import Life, begin

CLUSTER: dict[str, dict[str, Any]] = {"spark": {"master": "spark://somewhere:7077"}}
SAID = "threads of the publisher's process publish"


def publishing_here(sections: dict[str, dict[str, Any]] = CLUSTER) -> Life:
    life = begin(sections=sections)
    for shard in (0, 1):
        life.reports(life.joins(shard))
    assert {c.shard for c in life.all(e.StartRunner)} == {0, 1}
    return life


def check(life: Life, name: str = "shard 0") -> tuple[str, str]:
    found = status(life.coordinator, life.now)
    [one] = [c for c in found["checks"] if c["name"] == name]
    return one["state"], one["message"]


def test_a_spark_that_does_not_come_up_is_said_once_then_seldom() -> None:
    life = publishing_here()
    life.waits(50.0)
    assert not life.lines(SAID)
    assert check(life) == ("ok", "")
    life.waits(15.0)
    [line] = life.lines(SAID)
    assert line.level == "warning"
    assert line.facts == {"shards": [0, 1], "seconds": 60, "why": "Spark has not come up"}
    state, message = check(life)
    assert state == "warn"
    assert message.startswith("Spark has not come up; a thread of")
    seen = notable(status(life.coordinator, life.now))
    life.waits(AGAIN - 30.0)
    assert len(life.lines(SAID)) == 1
    assert [c for c in notable(status(life.coordinator, life.now)) if "shard" in c[0]] == [
        c for c in seen if "shard" in c[0]
    ]
    life.waits(31.0)
    assert len(life.lines(SAID)) == 2


def test_a_cluster_without_a_free_executor_is_said_until_one_comes() -> None:
    life = publishing_here()
    life.on(e.PlacementChanged(replaces_runners=True))
    life.waits(65.0)
    [line] = life.lines(SAID)
    assert line.facts["why"] == "Spark's cluster gives the shard no executor"
    assert check(life)[0] == "warn"
    for shard in (0, 1):
        here = life.coordinator.shards[shard].lane
        assert here is not None
        lane = life.joins(shard)
        life.leaves(here)
        life.reports(lane)
    life.waits(2.0)
    assert check(life) == ("ok", "")
    assert life.lines("Spark's executors publish all shards now")
    life.waits(AGAIN)
    assert len(life.lines(SAID)) == 1


def test_a_warning_does_not_make_it_less_ready() -> None:
    life = publishing_here()
    life.waits(65.0)
    found = status(life.coordinator, life.now)
    found["checks"] = [c for c in found["checks"] if c["name"].startswith("shard")]
    assert is_ready(found)


def test_nothing_is_said_where_there_is_no_cluster() -> None:
    for master in ("none", "local[*]"):
        life = publishing_here({"spark": {"master": master}})
        life.waits(100.0)
        assert not life.lines(SAID)
        assert check(life) == ("ok", "")
