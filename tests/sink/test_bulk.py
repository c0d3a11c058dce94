"""Many records handed over at once: the same in every byte as those produced one by one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from eventpub import config
from eventpub.errors import SinkError
from eventpub.local.servers import Kafka
from eventpub.private_apis import bulk
from eventpub.private_apis.bulk import Bulk, bulk_of
from eventpub.sink import transaction
from eventpub.sink.base import Content, RecordRefusedError
from eventpub.sink.client import Clients
from eventpub.sink.encoder import CloudEvents
from eventpub.sink.layout import check_topics
from eventpub.sink.records import FixedEvents, partitions_of
from eventpub.sink.shard import ShardSink
from tests import cautions
from tests.sink.helpers import (
    APP,
    CREATED,
    PARTITIONS,
    WHOLE,
    assert_published_once,
    events,
    read_topic,
    records_of,
    settings,
    some_events,
)
from tests.sink.test_publish_and_fold import configure

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
PAYLOADS = st.one_of(
    st.none(), st.just(b""), st.binary(max_size=40), st.just(b'{"a":1}'), st.just(b"[1]")
)
ROWS = st.lists(
    st.tuples(TEXT, st.integers(-(2**63), 2**63 - 1), TEXT, PAYLOADS, st.integers(0, 2 * 10**15)),
    min_size=1,
    max_size=40,
)


class Recorded:
    """Takes what would be queued, and reads it by the layout that rdkafka.h gives."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.records: list[tuple[Any, ...]] = []

    def rd_kafka_produceva(self, handle: int, address: int, count: int) -> int | None:
        import ctypes

        assert handle == 7
        if self.room == len(self.records):
            return 1
        parts: dict[int, Any] = {}
        headers = []
        for at in range(address, address + count * 72, 72):
            what = ctypes.c_int32.from_address(at).value
            first, second = (ctypes.c_uint64.from_address(at + n).value for n in (8, 16))
            third = ctypes.c_int64.from_address(at + 24).value
            if what == 9:
                value = ctypes.string_at(second, third) if second else None
                headers.append((ctypes.string_at(first).decode(), value))
            elif what in (4, 5):
                parts[what] = ctypes.string_at(first, second) if first else None
            elif what == 1:
                parts[what] = ctypes.string_at(first).decode()
            else:
                parts[what] = first
        assert parts[7] == 2, "librdkafka has to copy"
        self.records.append((parts[1], parts[5], parts[4], parts[3], parts[8], headers))
        return None

    def rd_kafka_error_code(self, error: int) -> int:
        assert error == 1
        return int(KafkaError._QUEUE_FULL)

    def rd_kafka_error_string(self, error: int) -> bytes:
        return b"full"

    def rd_kafka_error_is_fatal(self, error: int) -> int:
        return 0

    def rd_kafka_error_destroy(self, error: int) -> None:
        assert error == 1


def one_by_one(table: pa.Table) -> list[tuple[Any, ...]]:
    def as_bytes(value: Any) -> Any:
        return value.encode() if isinstance(value, str) else value

    return [
        (
            "orders",
            as_bytes(r.key),
            r.value,
            r.partition,
            r.timestamp,
            [(name, as_bytes(value)) for name, value in r.headers],
        )
        for r in records_of(CloudEvents(APP).events(table, partitions_of(table, 8)))
    ]


def at_once(table: pa.Table | pa.RecordBatch, late: Any = None) -> FixedEvents | None:
    return CloudEvents(APP).fixed(table, partitions_of(table, 8), late)


def produced(
    table: pa.Table | pa.RecordBatch, rows: Any = None, room: int = 1 << 40
) -> list[tuple[Any, ...]]:
    library = Recorded(room)
    fixed = at_once(table)
    assert fixed is not None
    rows = np.arange(len(table)) if rows is None else rows
    assert Bulk(None, library, 7).produce("orders", fixed, rows) == min(room, len(rows))  # type: ignore[arg-type]
    return library.records


@hypothesis_settings(deadline=None)
@given(ROWS)
def test_makes_the_same_records(rows: list[tuple[Any, ...]]) -> None:
    ids, versions, types, payloads, times = zip(*rows, strict=True)
    table = events(
        list(zip(ids, versions, strict=True)),
        event_type=types,
        payload=payloads,
        create_time=times,
    )
    assert produced(table) == one_by_one(table)
    halves = pa.concat_tables([table[: len(rows) // 2], table[len(rows) // 2 :]])
    assert produced(halves) == one_by_one(table)
    assert produced(table.to_batches()[0]) == one_by_one(table)
    large = table.set_column(3, "payload", table.column("payload").cast(pa.large_binary()))
    assert produced(large) == one_by_one(table)
    assert produced(table[1:]) == one_by_one(table)[1:]


def test_takes_the_rows_that_it_is_given_over_several_chunks() -> None:
    table = some_events(WHOLE, 1_700)
    rows = np.arange(3, 1_690, 2)
    records = one_by_one(table)
    assert produced(table, rows) == [records[row] for row in rows]
    for room in (0, 1, 499, 500, 501, 843):
        assert len(produced(table, rows, room)) == room


def test_not_for_what_has_headers_of_its_own() -> None:
    table = some_events(WHOLE, 3)
    assert at_once(table)
    assert at_once(table, np.zeros(3, np.bool_))
    assert not at_once(table, np.array([False, True, False]))
    assert not at_once(events([("a", 1), ("b", 1)], metadata=[None, "{}"]))


def test_knows_the_client_that_is_installed() -> None:
    """If not, a new version of confluent-kafka has to be looked at: see `bulk._KNOWN`."""
    assert bulk_of(Producer({"bootstrap.servers": "127.0.0.1:1"})) is not None
    assert bulk_of(object()) is None


@pytest.fixture
def unknown_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bulk, "_KNOWN", ("0.",))
    bulk._library.cache_clear()
    yield
    bulk._library.cache_clear()


@pytest.fixture
def sink(kafka_server: Kafka, topic_name: str) -> config.Sink:
    made = settings(topic_name, kafka_server.bootstrap_servers)
    check_topics(Clients(made))
    cautions.forget_all()  # what failed in other tests
    return made


def values(rows: int, large: dict[int, int]) -> list[bytes]:
    return [b"x" * large.get(number, 10) for number in range(rows)]


class TestOnABroker:
    def test_each_once_and_in_order_with_the_offsets_it_had(self, sink: config.Sink) -> None:
        parts = [some_events(WHOLE, 5_000, version) for version in (1, 1001, 2001)]
        for part in parts:
            with ShardSink(Clients(sink), APP, WHOLE) as shard:
                batch = shard.publish(Content(part))
            assert batch.events == len(part)
            counts = np.bincount(partitions_of(part, PARTITIONS)).tolist()
            for (topic, partition), (first, behind) in batch.written.items():
                assert topic == sink.topic
                assert behind - first == counts[partition]
                assert batch.next_offsets[topic, partition] == behind + 1
        assert not any(c.reports_each for c in transaction.cautions.values())
        assert_published_once(sink.bootstrap_servers, sink.topic, *parts)
        message = next(
            m for m in read_topic(sink.bootstrap_servers, sink.topic) if m.key() == b"order-3"
        )
        written = records_of(CloudEvents(APP).events(parts[0], partitions_of(parts[0], PARTITIONS)))
        expected = next(r for r in written if r.key == "order-3")
        assert message.value() == expected.value
        assert message.timestamp()[1] == expected.timestamp
        assert message.partition() == zlib.crc32(b"order-3") % PARTITIONS
        assert message.headers() == [
            (name, value.encode() if isinstance(value, str) else value)
            for name, value in expected.headers
        ]

    def test_one_by_one_where_the_client_is_not_known(
        self, unknown_client: None, sink: config.Sink
    ) -> None:
        assert bulk_of(Producer({"bootstrap.servers": "127.0.0.1:1"})) is None
        table = some_events(WHOLE, 1_000)
        with ShardSink(Clients(sink), APP, WHOLE) as shard:
            assert shard.publish(Content(table)).events == len(table)
        assert_published_once(sink.bootstrap_servers, sink.topic, table)

    @pytest.mark.parametrize("where", [0, 700, 999])
    def test_what_the_client_refuses_is_named(self, sink: config.Sink, where: int) -> None:
        table = some_events(WHOLE, 1_000)
        large = table.set_column(3, "payload", pa.array(values(1_000, {where: 3_000_000})))
        assert refused(sink, large) == [where]
        assert_published_once(sink.bootstrap_servers, sink.topic)

    def test_what_the_broker_refuses_is_named(self, sink: config.Sink) -> None:
        """One that is too old makes it refuse the batch that it came in."""
        three_years = str(3 * 365 * 86_400_000)
        configure(
            sink.bootstrap_servers, sink.topic, "message.timestamp.before.max.ms", three_years
        )
        table = some_events(WHOLE, 1_000)
        times = np.full(1_000, CREATED)
        times[[300, 640]] = 1_000_000_000_000_000
        old = table.set_column(5, "create_time", pa.array(times))
        rows = refused(sink, old)
        assert rows
        assert set(rows) <= {300, 640}
        assert_published_once(sink.bootstrap_servers, sink.topic)


def refused(sink: config.Sink, table: pa.Table) -> list[int]:
    """What is refused in the end; the first try says only that it was aborted."""
    told: list[str] = []
    while len(told) < 4:
        with ShardSink(Clients(sink), APP, WHOLE) as shard, pytest.raises(SinkError) as caught:
            shard.publish(Content(table))
        if isinstance(caught.value, RecordRefusedError):
            return caught.value.rows
        told.append(caught.value.code)
    raise AssertionError(told)


def test_a_record_that_is_missing_between_two_reports_is_noticed(
    sink: config.Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each half never reaches the queue."""
    table = some_events(WHOLE, 1_000)
    produce = Bulk.produce

    def one_less(self: Bulk, topic: str, some: Any, rows: Any) -> int:
        return produce(self, topic, some, rows[1:]) + 1

    monkeypatch.setattr(Bulk, "produce", one_less)
    with ShardSink(Clients(sink), APP, WHOLE) as shard, pytest.raises(SinkError) as caught:
        shard.publish(Content(table))
    assert (caught.value.code, shard.needs_replacement) == ("sink.aborted", True)
    with ShardSink(Clients(sink), APP, WHOLE) as shard:
        shard.publish(Content(table))
    assert_published_once(sink.bootstrap_servers, sink.topic, table)


def test_a_failure_of_the_client_is_raised() -> None:
    library = Recorded(3)
    library.rd_kafka_error_code = lambda error: int(KafkaError.MSG_SIZE_TOO_LARGE)  # type: ignore[method-assign]
    table = some_events(WHOLE, 10)
    fixed = at_once(table)
    assert fixed is not None
    with pytest.raises(KafkaException) as caught:
        Bulk(None, library, 7).produce("orders", fixed, np.arange(10))  # type: ignore[arg-type]
    assert caught.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert len(library.records) == 3
