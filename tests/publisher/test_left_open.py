"""The engine Spark, and transactions whose markers Kafka has never written."""

from __future__ import annotations

import json
import time
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer
from pyspark import SparkContext

from eventpub.coordinator.position import StartState
from eventpub.coordinator.shards import Failures
from eventpub.errors import SinkError, StateError
from eventpub.spark import checkpoint as of_spark
from eventpub.spark.checkpoint import Checkpoints
from eventpub.spark.publisher import Query, _UnusableError
from eventpub.spark.session import Watched, error_of
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, commit, create_table, eventually

HANGING = SinkError("sink.hanging_transaction", "…", retriable=True)


def opened(publisher: Publisher, partition: int) -> Producer:
    """A transaction with a record of the publisher, by a producer that leaves it open."""
    app_id, sink = publisher.settings["app"]["id"], publisher.settings["sink"]
    servers = sink["bootstrap_servers"]
    producer = Producer({"bootstrap.servers": servers, "transactional.id": f"lost-{app_id}"})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(sink["topic"], b"", b"a", partition, headers=[("ce_source", app_id)])
    producer.flush(10)
    return producer


@pytest.mark.engines("here", why="the engine threads folds in place; see tests/sink")
def test_a_new_checkpoint_begins_and_publishes_once(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit(database, "a", 1)
    publisher.start()
    publisher.until_published("a", [1])
    [first] = publisher.topic.read()
    left_open = opened(publisher, first.partition)
    for version in (2, 3):
        commit(database, "a", version)
    publisher.until_said("the checkpoint cannot be used; starting a new one")
    left_open.abort_transaction(10)  # as the fold of its own id would
    publisher.until_published("a", [1, 2, 3])
    assert publisher.log.read_text().count("new checkpoint: the topic is read back first") == 2
    publisher.stop()
    assert publisher.command("verify").returncode == 0


@pytest.mark.parametrize(
    ("replaces_checkpoint", "well_for", "again"),
    [(False, 0.0, True), (False, 9.0, True), (True, 9.0, True), (True, 0.0, False)],
)
def test_one_checkpoint_follows_another_only_where_it_has_helped(
    replaces_checkpoint: bool, well_for: float, again: bool
) -> None:
    query: Any = SimpleNamespace(_replaces_checkpoint=replaces_checkpoint)
    query.monitor = SimpleNamespace(well_for=lambda _: well_for)
    if not again:
        Query._require_usable(query, HANGING, 0.0)
        return
    with pytest.raises(_UnusableError):
        Query._require_usable(query, HANGING, 0.0)


def test_an_error_that_a_new_checkpoint_may_fix_is_retried_first() -> None:
    query: Any = SimpleNamespace(_replaces_checkpoint=False)
    query.monitor = SimpleNamespace(well_for=lambda _: 0.0)
    unknown = StateError("shard.failed", "…", retriable=True)
    Query._require_usable(query, unknown, 0.0)
    with pytest.raises(_UnusableError):
        Query._require_usable(query, unknown, 0.0, gives_up=True)


def failing(*, has_run: bool, has_session: bool = False, was_well: bool = False) -> Any:
    """A query that fails again and again."""
    query: Any = SimpleNamespace(_failures=0, _unexplained=0, _wait=0.5, _start_at=0.0)
    query._has_session = has_session
    query._spark = SimpleNamespace(has_run=has_run, is_alive=True, end=Mock())
    query._replaces_checkpoint = False
    query._require_usable = partial(Query._require_usable, query)
    query.monitor = Mock(failures=Failures(Mock()), well_for=lambda _: 30.0 * was_well)
    return query


def test_spark_that_cannot_be_started_again_is_waited_for() -> None:
    """As while its master is away: the sixth failure ended the run."""
    unknown = StateError("shard.failed", "…", retriable=True)
    query = failing(has_run=True)
    for _ in range(9):
        Query._failed(query, None, unknown, 0.0)
    query = failing(has_run=False)
    for _ in range(5):
        Query._failed(query, None, unknown, 0.0)
    with pytest.raises(StateError):
        Query._failed(query, None, unknown, 0.0)


def test_failures_that_are_explained_give_up_no_checkpoint() -> None:
    unknown = StateError("shard.failed", "…", retriable=True)
    away = StateError("state.unreachable", "…", retriable=True)
    watched: Any = SimpleNamespace(last=None)
    query = failing(has_run=True, has_session=True)
    for _ in range(9):
        Query._failed(query, watched, away, 0.0)
    for _ in range(5):
        Query._failed(query, watched, unknown, 0.0)
    with pytest.raises(_UnusableError):
        Query._failed(query, watched, unknown, 0.0)


def test_what_fails_after_good_batches_is_not_the_checkpoint_s_fault() -> None:
    unknown = StateError("shard.failed", "…", retriable=True)
    query = failing(has_run=True, has_session=True, was_well=True)
    watched: Any = SimpleNamespace(last=None)
    for _ in range(5):
        Query._failed(query, watched, unknown, 0.0)
    with pytest.raises(StateError):
        Query._failed(query, watched, unknown, 0.0)


def test_an_error_in_sparks_words_is_of_the_location_if_that_is_away(tmp_path: Path) -> None:
    query: Any = SimpleNamespace(
        _publisher=SimpleNamespace(location=str(tmp_path / "a"), query="q")
    )
    found = RuntimeError("java.io.IOException: Stale file handle")
    assert Query._cause(query, found).code == "shard.failed"
    (tmp_path / "a").rmdir()
    (tmp_path / "a").symlink_to("a")
    assert Query._cause(query, found).code == "state.unreachable"


def test_a_batch_that_is_too_large_is_followed_by_smaller_and_smaller_ones() -> None:
    query: Any = SimpleNamespace(_replaces_checkpoint=True)
    query.monitor = SimpleNamespace(well_for=lambda _: 0.0)
    too_large = SinkError("sink.transaction_expired", "…", retriable=True)
    with pytest.raises(_UnusableError, match=r"sink\.transaction_expired"):
        Query._require_usable(query, too_large, 0.0)


def test_a_spark_that_does_not_answer_is_ended() -> None:
    ended: list[bool] = []
    spark = SimpleNamespace(end=lambda *, kills: ended.append(kills))
    query: Any = SimpleNamespace(_spark=spark, _query=SimpleNamespace(is_active=True, unanswered=0))
    for _ in range(240):  # four a second
        assert Query._ended(query) == (None, None)
    watched, error = Query._ended(query)
    assert watched is not None
    assert error is not None
    assert error.retriable
    assert (ended, query._query) == ([True], None)


LOCAL = SimpleNamespace(master="local[2]")


class Asked:
    """Spark's side of a query, of which some calls fail."""

    def __init__(self, answers: list[bool | None]) -> None:
        self._answers = answers

    @property
    def isActive(self) -> bool:  # noqa: N802 (Spark's name)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise RuntimeError("Java heap space")
        return answer

    lastProgress = None  # noqa: N815 (Spark's name)

    def exception(self) -> None:
        return None


def test_a_query_of_which_one_call_has_failed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as over: the run ended with status 0, and Spark with it."""
    gateway = SimpleNamespace(proc=SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(SparkContext, "_gateway", gateway)
    watched = Watched(Asked([True, None, None, True, False]), LOCAL, error_of)
    time.sleep(0.35)
    assert watched.is_active
    watched.wait(5)
    assert (watched.is_active, watched.error) == (False, None)


def test_a_query_whose_process_has_ended_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = SimpleNamespace(proc=SimpleNamespace(poll=lambda: 137))
    monkeypatch.setattr(SparkContext, "_gateway", gateway)
    watched = Watched(Asked([None]), LOCAL, error_of)
    watched.wait(5)
    assert not watched.is_active
    assert "Spark's process has ended" in str(watched.error)


@pytest.mark.parametrize("available_now", [True, False])
def test_only_a_run_that_ends_by_itself_is_over_without_an_error(available_now: bool) -> None:
    watched = SimpleNamespace(is_active=False, unanswered=0, error=None)
    query: Any = SimpleNamespace(_query=watched, _available_now=available_now)
    found, error = Query._ended(query)
    assert found == watched
    assert (error is None) == available_now
    assert error is None or error.retriable


def test_a_checkpoint_whose_markers_are_hidden_does_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hidden(*_: Any) -> None:
        raise HANGING

    state: Any = SimpleNamespace(query_file=None, write=lambda *_, **__: None)
    prepared: Any = SimpleNamespace(assignment=SimpleNamespace(partitions=1))
    monkeypatch.setattr(Checkpoints, "sink", lambda _: SimpleNamespace(take=hidden))
    config: Any = None
    assert not Checkpoints(config, state, prepared)._goes_on("q", "/state", {}, "s2")


def test_a_start_that_ends_while_it_takes_the_id_keeps_the_next_one_from_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may have taken it or not: the checkpoint goes on after either, and after no other."""
    names = ["checkpoint/q/offsets/3"]
    read: dict[str, bytes] = {}
    monkeypatch.setattr(
        of_spark, "Place", lambda _: SimpleNamespace(names=lambda _: names, read=read.get)
    )
    state = StateDir(tmp_path)
    state.write(state.query_file, {"query": "q", "owners": ["s1"]})
    taken: list[list[str]] = []

    def take(*given: Any) -> bool:
        taken.append(given[3])
        if len(taken) < 3:
            raise KeyboardInterrupt
        return True

    markers = SimpleNamespace(back_to=lambda *_: [(-1, {"query": "q", "batch": -1})])
    sink = SimpleNamespace(take=take, markers=markers)
    monkeypatch.setattr(Checkpoints, "sink", lambda _: sink)
    prepared: Any = SimpleNamespace(assignment=SimpleNamespace(partitions=1))
    config: Any = None
    checkpoints = Checkpoints(config, state, prepared)
    for name in ("s2", "s3"):
        with pytest.raises(KeyboardInterrupt):
            checkpoints._goes_on("q", "/state", state.read(state.query_file) or {}, name)
    assert checkpoints._goes_on("q", "/state", state.read(state.query_file) or {}, "s4")
    assert taken == [["s1"], ["s1", "s2"], ["s1", "s2", "s3"]]
    read["checkpoint/q/metadata"] = b'{"id":'
    assert not checkpoints._goes_on("q", "/state", {}, "s5"), "Spark cannot read it"
    read.clear()
    markers.back_to = lambda *_: [(0, {"query": "q", "batch": 4})]
    assert not checkpoints._goes_on("q", "/state", {}, "s5"), "the checkpoint is a backup"


def test_a_start_that_ends_before_its_checkpoint_is_taken_leaves_from_where_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next one would read from the last run's position, above what is not visible."""
    state = StateDir(tmp_path)
    before = {"engine": "spark", "query": "former", "batch": 7, "low": 900}
    state.write(state.progress_file, before)
    state.write(state.query_file, {"query": "former", "location": str(tmp_path), "shards": 1})
    layout: Any = SimpleNamespace(key_is_unique=True)
    begin = StartState(
        run=1, now=2_000, layout=layout, partitions=1, start=5, low=5, position=1_000
    )
    config: Any = SimpleNamespace(
        state=SimpleNamespace(location=""),
        run=SimpleNamespace(shards=1),
        store=SimpleNamespace(first_version=1),
        sink=SimpleNamespace(topic="t"),
        recount=SimpleNamespace(horizon=0),
    )
    prepared: Any = SimpleNamespace(start_state=begin, topics={})
    killed = SimpleNamespace(take=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(Checkpoints, "sink", lambda _: killed)
    prepared.assignment = SimpleNamespace(partitions=1)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(config, state, prepared).chosen("s2", 1 << 20)
    assert state.read(state.progress_file) == {**before, "low": 5}


@pytest.mark.engines("here", why="the engine threads notes what it has written itself")
def test_what_may_be_hidden_is_read_again_by_a_new_checkpoint_however_old(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    """It went back by time, and a batch of a backlog spans more than any margin."""
    create_table(database)
    publisher = new_publisher(database)
    commit(database, "a", 1)
    publisher.start()
    publisher.until_published("a", [1])
    [first] = publisher.topic.read()
    hides = opened(publisher, first.partition)
    names = (f"b{n}" for n in range(99))
    other = next(n for n in names if zlib.crc32(n.encode()) % 4 != first.partition)
    commit(database, other, 1)
    publisher.until_published(other, [1])

    def low() -> int:
        return int(json.loads((publisher.state / "progress.json").read_text())["low"])

    [created] = database.execute("SELECT UNIX_TIMESTAMP(MAX(create_time)) * 1000000 FROM events")[0]
    time.sleep(12)  # two looks at the topic
    assert low() < created, "what was published since is hidden, for all that is known"
    hides.abort_transaction(10)
    eventually(lambda: low() >= created, 30)
    publisher.stop()
