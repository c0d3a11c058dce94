"""Transactions as spans at a collector that a test plays, and at one that is away."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eventpub.channel import Farewell, Hello, Report
from eventpub.channel.lane import Received
from eventpub.coordinator import events as e
from eventpub.coordinator.shards import Shard
from eventpub.errors import ConfigError, SinkError
from eventpub.local.processes import free_port
from eventpub.ops import traces
from eventpub.ops.traces import Traces
from tests.conftest import FreshDatabase
from tests.coordinator.life import FakeLane, config, some_rows
from tests.ops.served import logged
from tests.publisher import conftest as publishers
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import create_table, eventually, insert, transaction

pytest.importorskip("opentelemetry.sdk", reason="the extra 'traces' is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="as above")

new_publisher = publishers.new_publisher

CONFIG = config(ops={"traces": True})
API_KEY = "the-key-of-the-collector"


class Collector:
    """Takes spans at `port`, while it is there.

    Attributes:
        spans: with what is said of where they come from, oldest first.
        headers: of the last request.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.spans: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self._server: ThreadingHTTPServer | None = None

    @property
    def variables(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_EXPORTER_OTLP_HEADERS": f"api-key={API_KEY}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def begin(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.headers = dict(self.headers)
                collector.spans += spans_of(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def end(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def spans_of(body: bytes) -> Iterator[dict[str, Any]]:
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request: Any = ExportTraceServiceRequest.FromString(body)
    for resource in MessageToDict(request)["resourceSpans"]:
        shared = facts(resource["resource"]["attributes"])
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield span | {"resource": shared, "attributes": facts(span["attributes"])}


def facts(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    yield made
    made.end()


def shards() -> tuple[list[Shard], FakeLane]:
    lane = FakeLane(1)
    lane.hello = Hello(1, 7, "machine 1")
    return [Shard(0), Shard(1, lane=lane, lease=3)], lane


def report(published: int = 5) -> Report:
    steps = {"read": 9.0, "index": 0.25, "publish": 0.5}
    return Report(1, published=published, counts=some_rows(published), seconds=steps)


def test_a_transaction_is_a_span_with_its_steps(collector: Collector) -> None:
    collector.begin()
    made, (some, lane) = Traces(CONFIG), shards()
    made.observe(Received(lane, report()), some, 0.0)
    made.observe(Received(lane, report(published=0)), some, 0.0)  # nothing was done
    made.observe(Received(FakeLane(1), report()), some, 0.0)  # of who has no lease any more
    made.observe(Received(FakeLane(99), report()), some, 0.0)
    made.end()
    [span] = collector.spans
    assert span["name"] == "publish"
    assert span["attributes"] == {
        "eventpub.shard": "1",
        "eventpub.lease": "3",
        "eventpub.where": "machine 1",
        "eventpub.rows": "5",
        "eventpub.published": "5",
        "eventpub.seconds.index": 0.25,
        "eventpub.seconds.publish": 0.5,
    }
    took = int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])
    assert took == 750_000_000, "without the wait for rows"
    assert abs(int(span["endTimeUnixNano"]) / 1e9 - time.time()) < 60
    assert span["resource"]["service.name"] == "eventpub"
    assert span["resource"]["eventpub.app"] == "orders"
    assert span["resource"]["eventpub.topic"] == "events"
    assert collector.headers["api-key"] == API_KEY


def test_errors_of_runners_are_the_status_of_spans(collector: Collector) -> None:
    collector.begin()
    made, (some, lane) = Traces(CONFIG), shards()
    error = SinkError("sink.unreachable", f"no broker for {API_KEY}")
    made.observe(Received(lane, Farewell(error)), some, 0.0)
    made.observe(e.RunnerEnded(0, 1, error), some, 0.0)
    made.observe(Received(lane, Farewell()), some, 0.0)
    made.end()
    assert [span["attributes"]["eventpub.shard"] for span in collector.spans] == ["1", "0"]
    for span in collector.spans:
        assert span["status"] == {
            "code": "STATUS_CODE_ERROR",
            "message": "sink.unreachable: no broker for ***",
        }
        assert span["attributes"]["error.type"] == "sink.unreachable"


def test_the_environment_names_the_service_and_the_share(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "orders-publisher")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    collector.begin()
    made, (some, lane) = Traces(CONFIG), shards()
    for _ in range(4_000):
        made.observe(Received(lane, report()), some, 0.0)
    made.end()
    assert 100 < len(collector.spans) < 3_000
    assert collector.spans[0]["resource"]["service.name"] == "orders-publisher"


def test_a_collector_that_is_away_delays_nothing_and_what_is_lost_is_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_SAID_EVERY", 1.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with logged() as log:
        made, (some, lane) = Traces(CONFIG), shards()
        began = time.monotonic()
        for _ in range(10_000):
            made.observe(Received(lane, report()), some, time.monotonic())
        assert time.monotonic() - began < 5.0
        eventually(lambda: made._exporter.failed)
        made.observe(e.Tick(), some, time.monotonic() + 100.0)
        began = time.monotonic()
        made.end()
        assert time.monotonic() - began < traces._ENDS_WITHIN + 1.0
        lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert {line["event"] for line in lines} == {"spans are lost: the collector does not take them"}
    last = lines[-1]
    assert sum(line["spans"] for line in lines) == last["since_the_start"]
    assert last["since_the_start"] >= 10_000 - traces._MOST_WAITING
    assert last["collector"] == f"http://127.0.0.1:{collector.port}"
    assert "spans" in last["error"], "as OpenTelemetry says it"
    assert made._made <= 2 * traces._MOST_WAITING + 512


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError) as error:
        Traces(CONFIG)
    assert error.value.code == "config.extra_missing"
    assert error.value.suggestion is not None
    assert "pip install '.[traces]'" in error.value.suggestion


def test_variables_that_opentelemetry_refuses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000000")
    with pytest.raises(ConfigError) as error:
        Traces(CONFIG)
    assert error.value.code == "config.traces"


def test_a_publisher_publishes_and_stops_whether_the_collector_is_there_or_not(
    new_publisher: NewPublisher, database: FreshDatabase, collector: Collector
) -> None:
    create_table(database)
    publisher = new_publisher(database, ops={"traces": True, "http": ""}, spark={"master": "none"})
    publisher.environment |= collector.variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
    publisher.start()

    def commit(version: int) -> None:
        with transaction(database) as cursor:
            insert(cursor, "a", version)
            cursor.connection.commit()

    commit(1)
    publisher.until_published("a", [1])
    collector.begin()
    commit(2)
    publisher.until_published("a", [1, 2])
    published = "eventpub.published"
    eventually(lambda: any(span["attributes"].get(published) == "1" for span in collector.spans))
    collector.end()
    commit(3)
    publisher.until_published("a", [1, 2, 3])
    assert publisher.stop() == 143
    assert "Traceback" not in publisher.words()
    assert API_KEY not in publisher.words()
