"""What an operator asks of a running publisher, and of one that has stopped."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eventpub.ops.asking import ask_running
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, create_table, eventually, insert, transaction
from tests.publisher.test_crashes import commit_some

pytestmark = pytest.mark.engines("threads", "here")

TOKEN = "a token of the dashboard"


def command(publisher: Publisher, *words: str) -> tuple[int, dict[str, Any]]:
    """The installed command with --json: its exit status and its answer."""
    done = subprocess.run(
        [publisher.program, *words, "--json", "--config", str(publisher.config)],
        capture_output=True,
        check=False,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout)


def status_of(publisher: Publisher) -> dict[str, Any]:
    """As the running publisher answers, once it does."""
    return eventually(lambda: ask_running(StateDir(publisher.state), "status") or {})


class Pages:
    """A publisher's address: of its last start."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    @property
    def address(self) -> str:
        words = self._publisher.words()
        for line in reversed(words.splitlines()):
            if "metrics, health and dashboard" in line and "http://" in line:
                return str(json.loads(line)["address"])
        return ""

    def get(
        self, path: str, *, post: bool = False, token: str | None = None, host: str | None = None
    ) -> tuple[int, str]:
        address = eventually(lambda: self.address, 30)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        headers |= {} if host is None else {"Host": host}
        asked = urllib.request.Request(
            address + path, headers=headers, method="POST" if post else "GET"
        )
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Those without labels, and histograms' counts."""
        found = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


@pytest.fixture
def publisher(new_publisher: NewPublisher, database: FreshDatabase) -> Iterator[Publisher]:
    create_table(database)
    made = new_publisher(database, ops={"http": "127.0.0.1:0", "token": TOKEN, "log": "json"})
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop()


def is_ready(pages: Pages) -> bool:
    return pages.get("/readyz")[0] == 200


class TestStatus:
    def test_of_a_publisher_that_runs_and_then_does_not(
        self, publisher: Publisher, database: FreshDatabase
    ) -> None:
        assert command(publisher, "status")[1]["result"]["kind"] == "never"
        commit_some(database, range(1, 3))
        publisher.start()
        publisher.until_published("a-3", [1, 2])
        eventually(lambda: command(publisher, "status")[0] == 0)
        eventually(lambda: status_of(publisher)["lag"]["seconds"] == 0, 30)
        _, answer = command(publisher, "status")
        found = answer["result"]["status"]
        assert found["counters"]["published"] >= 2
        assert found["lag"] == {
            "seconds": 0.0, "events": 0, "ahead_seconds": 0.0, "ahead_rows": 0,
        }  # fmt: skip
        assert {check["state"] for check in found["checks"]} == {"ok"}
        names = [check["name"] for check in found["checks"]]
        shards = [f"shard {shard['shard']}" for shard in found["shards"]]
        assert names == [
            "database",
            "boundary",
            "publishing",
            *shards,
            "index",
            "broker",
            "recount",
            "times",
        ]
        assert publisher.stop() == 143
        code, answer = command(publisher, "status")
        assert code == 1
        assert answer["result"]["kind"] == "stopped"
        assert "when it was asked to stop" in answer["summary"]
        assert answer["result"]["status"]["counters"]["published"] == found["counters"]["published"]

    def test_the_error_that_has_ended_it_is_kept(
        self, publisher: Publisher, database: FreshDatabase
    ) -> None:
        publisher.start()
        eventually(lambda: ask_running(StateDir(publisher.state), "status"))
        database.execute("ALTER TABLE events DROP COLUMN event_type")
        # who reads a row meets it; the first window may have been read before
        database.execute("INSERT INTO events (aggregate_id, version, payload) VALUES ('a', 1, '')")
        process = publisher.process
        assert process is not None
        assert process.wait(180) == 3
        _, answer = command(publisher, "status")
        assert "store.column_missing" in answer["result"]["status"]["stopped_by"]
        assert "store.column_missing" in answer["summary"]

    def test_a_start_that_fails_and_a_publisher_that_is_killed(
        self, publisher: Publisher, database: FreshDatabase
    ) -> None:
        database.execute("RENAME TABLE events TO elsewhere")
        publisher.start()
        assert publisher.process is not None
        assert publisher.process.wait(60) == 3
        assert "store.table_missing" in command(publisher, "status")[1]["summary"]
        text = subprocess.run(
            [publisher.program, "status", "--config", str(publisher.config)],
            capture_output=True,
            check=False,
        )
        assert b"store.table_missing" in text.stdout
        database.execute("RENAME TABLE elsewhere TO events")
        publisher.start()
        status_of(publisher)
        kept = publisher.state / "status.json"  # of the start that failed, for a moment
        eventually(lambda: json.loads(kept.read_text())["state"] != "stopped", 30)
        publisher.kill()
        _, answer = command(publisher, "status")
        assert "it was killed" in answer["summary"]
        found = answer["result"]["status"]
        assert (found["state"], found["is_alive"]) == ("killed", False)


class TestPages:
    def test_health_metrics_and_status(self, publisher: Publisher, database: FreshDatabase) -> None:
        commit_some(database, range(1, 4))
        publisher.start()
        pages = Pages(publisher)
        publisher.until_published("a-3", [1, 2, 3])
        assert pages.get("/healthz") == (200, "ok\n")
        eventually(lambda: is_ready(pages))
        events = len(database.execute("SELECT 1 FROM events"))
        eventually(lambda: pages.metrics()["eventpub_events_published_total"] == events, 30)
        eventually(lambda: pages.metrics()["eventpub_lag_seconds"] == 0, 30)
        found = pages.metrics()
        assert found["eventpub_lag_events"] == 0
        assert found["eventpub_publish_latency_seconds_count"] == events
        assert found["eventpub_publish_latency_seconds_sum"] > 0
        assert found["eventpub_batch_seconds_count{step=read}"] > 0
        assert found["eventpub_health{check=database}"] == 1
        assert found["eventpub_index_bytes{shard=0}"] > 0
        code, text = pages.get("/status")
        assert code == 200
        assert json.loads(text)["is_ready"]
        code, text = pages.get("/config")
        assert TOKEN not in text
        assert json.loads(text)["sink.topic"] == publisher.topic.name
        assert pages.get("/nothing")[0] == 404
        assert pages.get("/status", host="somebody.example")[0] == 400, "DNS rebinding"
        assert pages.get("/..%2f..%2fetc%2fpasswd")[0] == 404

    def test_latency_ends_with_the_commit(
        self, publisher: Publisher, database: FreshDatabase, tmp_path: Path
    ) -> None:
        commit_some(database, range(1, 2))
        stalled = tmp_path / "stalled"
        publisher.start(environment={"EVENTPUB_FAILPOINT": f"before_commit:1:{stalled}"})
        eventually(stalled.exists)
        time.sleep(3)
        Path(f"{stalled}.go").touch()
        publisher.until_published("a-3", [1])
        events = len(database.execute("SELECT 1 FROM events"))
        pages = Pages(publisher)
        counted = "eventpub_publish_latency_seconds_count"
        eventually(lambda: pages.metrics().get(counted) == events)
        found = pages.metrics()
        assert found["eventpub_publish_latency_seconds_sum"] > 3
        assert found["eventpub_batch_seconds_sum{step=publish}"] > 3

    def test_actions_want_the_token(self, publisher: Publisher, database: FreshDatabase) -> None:
        publisher.start()
        pages = Pages(publisher)
        for path in ("/pause", "/resume", "/retry?aggregate_id=a", "/skip?aggregate_id=a"):
            assert pages.get(path, post=True)[0] == 401
            assert pages.get(path, post=True, token="another")[0] == 401
            assert pages.get(path)[0] == 405
        assert not status_of(publisher)["is_paused"]
        assert pages.get("/pause", post=True, token=TOKEN)[0] == 200
        eventually(lambda: status_of(publisher)["is_paused"])
        assert pages.get("/skip?aggregate_id=a", post=True, token=TOKEN)[0] == 400
        code, text = pages.get("/retry?aggregate_id=a", post=True, token=TOKEN)
        assert (code, json.loads(text)["code"]) == (409, "run.paused")
        assert "eventpub resume" in json.loads(text)["error"]
        assert pages.get("/resume", post=True, token=TOKEN)[0] == 200
        code, text = pages.get("/retry?aggregate_id=a", post=True, token=TOKEN)
        assert (code, json.loads(text)) == (200, {"outcome": "nothing is held"})

    @pytest.mark.engines("threads", "spark")
    def test_a_gap_is_shown_and_skipped(
        self, new_publisher: NewPublisher, database: FreshDatabase
    ) -> None:
        create_table(database)
        publisher = new_publisher(
            database,
            ops={"http": "127.0.0.1:0", "token": TOKEN, "log": "json"},
            gaps={"backoff_base": "30s"},
        )
        with transaction(database) as cursor:
            insert(cursor, "held", 2)
            insert(cursor, "held", 5)
            cursor.connection.commit()
        publisher.start()
        pages = Pages(publisher)
        eventually(lambda: status_of(publisher)["holds_open"] == 1)
        [hold] = json.loads(pages.get("/gaps")[1])["open"]
        assert (hold["aggregate_id"], hold["first_missing"]) == ("held", 1)
        eventually(lambda: status_of(publisher)["lag"]["seconds"] > 1, 30)
        assert status_of(publisher)["lag"]["events"] >= 1, "what is held is not published"
        assert pages.get("/gap?aggregate_id=held")[0] == 401
        gap = '{"from_version":1,"to_version":1}'
        assert pages.get("/gap?aggregate_id=held", token=TOKEN) == (200, gap)
        nothing = '{"from_version":null,"to_version":null}'
        assert pages.get("/gap?aggregate_id=another", token=TOKEN) == (200, nothing)
        database.execute("DELETE FROM events WHERE version = 2")
        path = "/skip?aggregate_id=held&from_version=1&to_version="
        assert pages.get(f"{path}1", post=True, token=TOKEN) == (200, '{"outcome":"changed"}')
        assert pages.get("/gap?aggregate_id=held", token=TOKEN)[1].endswith('"to_version":4}')
        assert pages.get(f"{path}4", post=True, token=TOKEN) == (200, '{"outcome":"skipped"}')
        publisher.until_published("held", [5])
        eventually(lambda: status_of(publisher)["lag"]["seconds"] == 0, 30)

    def test_an_address_that_another_has_is_refused(
        self, publisher: Publisher, new_publisher: NewPublisher, database: FreshDatabase
    ) -> None:
        publisher.start()
        address = eventually(lambda: Pages(publisher).address).removeprefix("http://")
        other = new_publisher(database, ops={"http": address})
        other.settings["app"]["id"] = "another"
        (other.state / "requests").mkdir(parents=True)
        (other.state / "eventpub.lock").touch()
        (other.state / "requests" / "mine.json").write_text("{}")
        other.start()
        assert other.process is not None
        assert other.process.wait(60) == 2
        assert "ops.http_address" in other.words()
        assert "ops.http_address" in command(other, "status")[1]["summary"]


class TestPause:
    def test_nothing_is_published_until_resume_not_even_by_a_new_start(
        self, publisher: Publisher, database: FreshDatabase
    ) -> None:
        assert command(publisher, "pause")[1]["error"]["code"] == "state.not_started"
        commit_some(database, range(1, 3))
        publisher.start()
        publisher.until_published("a-3", [1, 2])
        code, answer = command(publisher, "pause")
        assert (code, answer["result"]["outcome"]) == (0, "paused")
        ends = publisher.topic.read()
        commit_some(database, range(3, 5))
        time.sleep(3)
        assert len(publisher.topic.read()) == len(ends)
        found = status_of(publisher)
        assert found["state"] == "paused"
        assert found["lag"]["seconds"] > 1
        assert found["lag"]["events"] > 0
        code, answer = command(publisher, "gaps", "retry", "a-3")
        assert (code, answer["error"]["code"]) == (3, "run.paused")
        assert command(publisher, "gaps", "list")[0] == 0
        publisher.kill()
        publisher.start()
        eventually(lambda: ask_running(StateDir(publisher.state), "status"))
        time.sleep(3)
        assert len(publisher.topic.read()) == len(ends)
        assert status_of(publisher)["lag"]["seconds"] > 1
        eventually(lambda: command(publisher, "status")[0] == 0, 30)  # a pause is no fault
        assert command(publisher, "resume")[1]["result"]["outcome"] == "resumed"
        publisher.until_published("a-3", [1, 2, 3, 4])
        eventually(lambda: status_of(publisher)["lag"]["seconds"] == 0, 30)
        assert publisher.stop() == 143
        assert command(publisher, "pause")[1]["result"]["outcome"] == "kept"
        assert publisher.command("run", "--available-now").returncode == 3
        _, answer = command(publisher, "status")
        assert "it ended" in answer["summary"]
        assert "when it was asked to stop; the next one starts paused" in answer["summary"]
        commit_some(database, range(5, 6))
        publisher.start()
        eventually(lambda: ask_running(StateDir(publisher.state), "status"))
        assert status_of(publisher)["is_paused"]
        command(publisher, "resume")
        publisher.until_published("a-3", [1, 2, 3, 4, 5])


class TestHonestLag:
    def test_it_is_nought_while_nobody_writes(
        self, publisher: Publisher, database: FreshDatabase
    ) -> None:
        commit_some(database, range(1, 2))
        publisher.start()
        publisher.until_published("a-3", [1])
        eventually(lambda: status_of(publisher)["lag"]["seconds"] == 0, 30)
        seen = _lags(publisher, 8)
        assert max(seen) == 0, seen


def _lags(publisher: Publisher, seconds: float, every: float = 0.5) -> list[float]:
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found.append(float(status_of(publisher)["lag"]["seconds"]))
        time.sleep(every)
    return found
