"""What events, skips and refused rows look like as records."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventpub.admission.model import SkippedGap
from eventpub.sink.encoder import CloudEvents, read_conflict, read_gap
from eventpub.sink.records import (
    DeadRow,
    Record,
    metadata_headers,
    parse_times,
    partitions_of,
    time_texts,
)
from tests.sink.helpers import CREATED, events, records_of

YEAR_1900 = -2_208_988_800_000_000


def records(table: pa.Table, late: Any = None) -> list[Record]:
    return records_of(CloudEvents("orders").events(table, partitions_of(table, 8), late))


def record(**columns: Any) -> Record:
    return records(events([("order-1", 7)], **{k: [v] for k, v in columns.items()}))[0]


def content_type(payload: bytes | None, metadata: str | None = None) -> Any:
    return dict(record(payload=payload, metadata=metadata).headers).get("content-type")


def test_an_event_is_a_cloudevent_in_binary_mode() -> None:
    made = record(payload=b'{"a": 1}', event_type="OrderPlaced", create_time=CREATED)
    assert made.key == "order-1"
    assert made.value == b'{"a": 1}', "byte for byte"
    assert made.timestamp == CREATED // 1000
    assert made.headers == [
        ("ce_specversion", "1.0"),
        ("ce_id", b"order-1/7"),
        ("ce_source", "orders"),
        ("ce_type", b"OrderPlaced"),
        ("ce_time", b"2026-01-01T00:00:00.123456Z"),
        ("ce_subject", b"order-1"),
        ("ce_sequence", b"7"),
        ("content-type", "application/json"),
    ]


@pytest.mark.parametrize(
    "aggregate_id", ["", " ", "a ", "A", "ä/ö'\"`;--", "注文-1", "😀", "x" * 255, "a\x00b"]
)
def test_the_partition_is_the_crc32_of_the_keys_bytes(aggregate_id: str) -> None:
    made = records(events([(aggregate_id, 1), ("other", 1), (aggregate_id, 2)]))
    assert made[0].key == aggregate_id
    assert made[0].partition == made[2].partition == zlib.crc32(aggregate_id.encode()) % 8
    assert made[1].partition == zlib.crc32(b"other") % 8


def test_rows_of_many_chunks_keep_their_order_and_partitions() -> None:
    parts = [events([(f"order-{n}", v) for n in range(5)]) for v in (1, 2, 3)]
    made = records(pa.concat_tables(parts))
    assert [(r.key, dict(r.headers)["ce_sequence"]) for r in made] == [
        (f"order-{n}", b"%d" % v) for v in (1, 2, 3) for n in range(5)
    ]
    assert all(r.partition == zlib.crc32(str(r.key).encode()) % 8 for r in made)


def test_a_record_batch_gives_what_a_table_gives() -> None:
    table = events([("a", 1), ("b", 1)], metadata=['{"k":"v"}', None])
    batch = table.combine_chunks().to_batches()[0]
    placed = partitions_of(batch, 8)
    assert records_of(CloudEvents("orders").events(batch, placed)) == records(table)


def test_no_rows_give_no_records() -> None:
    assert records(events([])) == []


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"a":1}', "application/json"),
        (b"[1]", "application/json"),
        (b"\xff\xfe", "application/octet-stream"),
        (b"plain", "application/octet-stream"),
        (b"", "application/octet-stream"),
        (None, None),
    ],
)
def test_the_content_type_follows_the_payloads_first_byte(
    payload: bytes | None, expected: str | None
) -> None:
    assert content_type(payload) == expected


def test_the_metadatas_content_type_wins() -> None:
    metadata = '{"content-type": "application/avro"}'
    made = record(payload=b"{", metadata=metadata)
    assert [v for n, v in made.headers if n == "content-type"] == [b"application/avro"]
    assert content_type(b"{}", '{"note": "content-type"}') == "application/json"
    escaped = record(payload=b"{", metadata='{"content\\u002dtype": "text/x"}')
    assert [v for n, v in escaped.headers if n == "content-type"] == [b"text/x"]


def test_a_null_payload_has_no_content_type_whatever_the_metadata_say() -> None:
    made = record(payload=None, metadata='{"content-type": "text/x", "user": "u"}')
    assert content_type(None, '{"content-type": "text/x"}') is None
    assert made.headers[-1] == ("user", b"u")


def test_a_null_payload_is_a_null_value_and_an_empty_one_is_empty() -> None:
    assert record(payload=None).value is None
    assert record(payload=b"").value == b""


def test_a_late_event_says_so() -> None:
    table = events([("a", 1), ("b", 1)])
    made = records(table, np.array([False, True]))
    assert "eventpub_late" not in dict(made[0].headers)
    assert dict(made[1].headers)["eventpub_late"] == "1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", []),
        ("null", []),
        ('{"user":"u1","trace":"t"}', [("user", b"u1"), ("trace", b"t")]),
        (
            '{"n":5,"f":1.5,"yes":true,"no":null}',
            [("n", b"5"), ("f", b"1.5"), ("yes", b"true"), ("no", None)],
        ),
        (
            '{"o":{"a":[1,"ä"]},"l":[]}',
            [("o", '{"a":[1,"ä"]}'.encode()), ("l", b"[]")],
        ),
        ('{"ce_id":"mine","ce_":1}', [("metadata_ce_id", b"mine"), ("metadata_ce_", b"1")]),
        # a writer's trace is continued by consumers (docs/messages.md, "Traces")
        ('{"traceparent":"00-0af7-b7ad-01"}', [("traceparent", b"00-0af7-b7ad-01")]),
        ('{"eventpub_late":"1"}', [("metadata_eventpub_late", b"1")]),
        ('{"":"empty name"}', [("", b"empty name")]),
        ("not json", [("metadata", b"not json")]),
        ("[1,2]", [("metadata", b"[1,2]")]),
        ('"text"', [("metadata", b'"text"')]),
        ("[" * 100_000, [("metadata", b"[" * 100_000)]),
        ('{"half":"\\ud800"}', [("half", b"?")]),
        ('{"nul":"a\\u0000b"}', [("nul", b"a\x00b")]),
        ('{"a\\u0000b":1,"a\\ufffdb":2}', [("a\ufffdb", b"1"), ("a\ufffdb", b"2")]),
        ('{"content-type\\u0000":"mine"}', [("content-type\ufffd", b"mine")]),
        (
            '{"whole":"\\u00e4"}',
            [
                ("whole", "ä".encode()),
            ],
        ),
    ],
)
def test_metadata_becomes_headers_and_never_an_error(text: str, expected: Any) -> None:
    assert metadata_headers(text.encode()) == expected


def test_metadata_that_are_no_text_stay_as_they_are() -> None:
    assert metadata_headers(b"\x08\xff\x9a") == [("metadata", b"\x08\xff\x9a")]


def test_metadata_nested_as_deep_as_can_just_be_decoded_are_no_error() -> None:
    """Encoding needs some more of the stack than decoding."""
    for depth in range(700, 1000):
        text = b'{"deep":' + b"[" * depth + b"]" * depth + b"}"
        assert metadata_headers(text) in (
            [("deep", text.removeprefix(b'{"deep":').removesuffix(b"}"))],
            [("metadata", text)],
        )


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
    )
)
def test_any_metadata_can_be_sent_and_takes_no_header_of_ours(data: dict[str, Any]) -> None:
    made = record(metadata=json.dumps(data))
    for name, value in made.headers:
        name.encode()
        assert value is None or isinstance(
            value if isinstance(value, bytes) else value.encode(), bytes
        )
    ours = [n for n, _ in made.headers if n.startswith("ce_")]
    assert len(ours) == len(set(ours)) == 7


@pytest.mark.parametrize(
    ("micros", "timestamp", "time"),
    [
        (0, 1, b"1970-01-01T00:00:00.000000Z"),
        (1_999, 1, b"1970-01-01T00:00:00.001999Z"),
        (2_000, 2, b"1970-01-01T00:00:00.002000Z"),
        (YEAR_1900, 1, b"1900-01-01T00:00:00.000000Z"),
        (253_402_300_799_999_999, 253_402_300_799_999, b"9999-12-31T23:59:59.999999Z"),
    ],
)
def test_times_have_microseconds_and_a_timestamp_that_kafka_takes(
    micros: int, timestamp: int, time: bytes
) -> None:
    made = record(create_time=micros)
    assert (made.timestamp, dict(made.headers)["ce_time"]) == (timestamp, time)


@settings(max_examples=40)
@given(st.lists(st.integers(YEAR_1900, 253_402_300_799_999_999)))
def test_times_are_read_back_as_they_were(micros: list[int]) -> None:
    array = np.array(micros, np.int64)
    assert parse_times(time_texts(array).to_pylist()).tolist() == micros


def test_a_skip_is_json_and_is_read_back() -> None:
    gap = SkippedGap("Bestellung-ä", 3, 5, CREATED, CREATED + 1, 8, "gave up")
    made = CloudEvents("orders").gap(gap, 8)
    assert made.key == "Bestellung-ä"
    assert made.partition == zlib.crc32("Bestellung-ä".encode()) % 8
    assert json.loads(made.value or b"") == {
        "aggregate_id": "Bestellung-ä",
        "from_version": 3,
        "to_version": 5,
        "first_seen": "2026-01-01T00:00:00.123456Z",
        "skipped_at": "2026-01-01T00:00:00.123457Z",
        "attempts": 8,
        "reason": "gave up",
    }
    assert read_gap(made.value or b"") == gap


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(), of, max_size=3),
    max_leaves=5,
)
TIMES = st.sampled_from(["2026-01-01T00:00:00.000000Z", "NaT", "99999-01-01", "-0001-01-01", ""])
NAMES = ("aggregate_id", "from_version", "to_version", "first_seen", "skipped_at")
SKIPS = st.fixed_dictionaries(dict.fromkeys((*NAMES, "attempts", "reason"), JSON | TIMES))
ODD = [b"1e400", b"NaN", b"-Infinity", b"9223372036854775808", b"1" * 5000, b'"\\ud800"', b"true"]


def skip_of(version: bytes, aggregate_id: bytes = b'"a"') -> bytes:
    time = b'"2026-01-01T00:00:00.000000Z"'
    values = (aggregate_id, version, b"9", time, time, b"1", b'"x"')
    names = (*NAMES, "attempts", "reason")
    pairs = zip(names, values, strict=True)
    return b"{" + b",".join(b'"%s":%s' % (n.encode(), v) for n, v in pairs) + b"}"


@given(st.binary() | (JSON | SKIPS).map(lambda value: json.dumps(value).encode()))
def test_any_record_is_a_skip_or_refused_as_none(value: bytes) -> None:
    try:
        gap = read_gap(value)
    except ValueError:
        return
    again = CloudEvents("orders").gap(gap, 8).value
    assert read_gap(again or b"") == gap


@pytest.mark.parametrize(
    "value",
    [*map(skip_of, ODD), skip_of(b"1", b'"\\ud800"'), skip_of(b"1", b"7"), b"[" * 100_000],
)
def test_what_a_stranger_writes_is_no_skip(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's and ours)
        read_gap(value)


@given(st.binary() | st.tuples(st.integers(), st.integers()).map(lambda p: b"%d %d" % p))
def test_any_header_says_a_conflict_of_64_bits_or_none(value: bytes) -> None:
    found = read_conflict({"eventpub_conflict": value})
    assert found is None or all(-(2**63) <= number < 2**63 for number in found)


@pytest.mark.parametrize("value", [b"", b"x", b"[]", b"{}", b'{"aggregate_id":"a"}', b"1"])
def test_what_is_no_skip_is_refused_as_one(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's and ours)
        read_gap(value)


class TestDead:
    def test_a_refused_row_is_told_in_full(self) -> None:
        row = DeadRow("a", -1, "admission.version_invalid: -1", b"\xff", "T", b"{bad", CREATED)
        made = CloudEvents("orders").dead(row, (8, 3))
        assert (made.key, made.value) == ("a", b"\xff")
        assert made.partition == zlib.crc32(b"a") % 8
        assert dict(made.headers) == {
            "ce_specversion": "1.0",
            "ce_source": "orders",
            "eventpub_reason": b"admission.version_invalid: -1",
            "ce_subject": b"a",
            "ce_id": b"a/-1",
            "ce_sequence": "-1",
            "ce_type": b"T",
            "ce_time": "2026-01-01T00:00:00.123456Z",
            "eventpub_metadata": b"{bad",
        }

    def test_a_row_without_an_identity_goes_where_it_may(self) -> None:
        row = DeadRow(None, None, "store.row_unreadable")
        made = CloudEvents("orders").dead(row, (8, 3))
        assert read_conflict(dict(made.headers)) is None
        assert (made.key, made.value, made.partition) == (None, None, 3)

    def test_what_the_broker_refused_is_not_sent_to_it_again(self) -> None:
        row = DeadRow("a", 1, "sink.record_refused: too large", b"x" * 1000)
        made = CloudEvents("orders").dead(row, (8, 3))
        assert made.value is None
        assert dict(made.headers)["eventpub_payload_bytes"] == "1000"
