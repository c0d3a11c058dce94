"""What goes over the wire comes out as it was, or not at all."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpub.admission import Counts
from eventpub.channel import (
    Comparison,
    Farewell,
    Folding,
    Hello,
    Lease,
    Report,
    Request,
    Stop,
    Window,
)
from eventpub.channel.messages import MalformedError, decode, encode
from eventpub.errors import SinkError

_numbers = st.integers(-(2**63), 2**63 - 1)
_optional = st.none() | _numbers
_texts = st.text(max_size=20)
_places = st.dictionaries(st.tuples(_texts, st.integers(0, 2000)), _numbers, max_size=4)
_facts: Any = st.lists(
    st.dictionaries(_texts, _numbers | _texts | st.none(), max_size=3), max_size=3
)
_buckets = st.dictionaries(_numbers, st.integers(0, 10**9), max_size=5)

LEASES = st.builds(
    Lease,
    number=_numbers,
    low=_numbers,
    position=_numbers,
    acknowledged=_places,
    is_placed=st.booleans(),
    uncounted_since=_optional,
    former_shards=_optional,
    former_indexes=st.lists(_texts, max_size=3).map(tuple),
)
WINDOWS = st.builds(
    Window,
    number=_numbers,
    upto=_numbers,
    open_since=_optional,
    hidden_since=_optional,
    uncounted_since=_optional,
    after=_numbers,
)
REQUESTS = st.builds(
    Request,
    id=_texts,
    action=st.sampled_from(["retry", "skip", "list", "publish"]),
    aggregate_id=_texts,
    version=_optional,
    to_version=_optional,
    searched=st.lists(_numbers, max_size=3).map(tuple),
)
COMPARISONS = st.builds(Comparison, _numbers, st.lists(_numbers, max_size=5).map(tuple))
REPORTS = st.builds(
    Report,
    shard=_numbers,
    done=_numbers,
    position=_numbers,
    hidden_since=_optional,
    next_due=_optional,
    offsets=_places,
    counts=st.builds(Counts, rows=_numbers, late=_numbers),
    skipped=_facts,
    dead=_facts,
    buckets=_buckets,
    read_before=_optional,
    unfinished=st.lists(_numbers, max_size=3),
    answers=st.dictionaries(_texts, _texts, max_size=3),
    not_ours=_numbers,
    made_again=st.lists(_texts, max_size=3),
    rebuilt=st.none() | _texts,
    seconds=st.dictionaries(_texts, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
OTHERS = st.one_of(
    st.builds(Hello, _numbers, _numbers, _texts),
    st.builds(Folding, _numbers, _numbers),
    st.just(Stop()),
    st.just(Farewell()),
)


@given(st.one_of(LEASES, WINDOWS, REQUESTS, COMPARISONS, REPORTS, OTHERS))
def test_a_message_comes_out_as_it_was(message: Any) -> None:
    found = decode(encode(message))
    assert type(found) is type(message)
    assert found == message
    for field in dataclasses.fields(message):
        assert type(getattr(found, field.name)) is type(getattr(message, field.name))


def test_an_error_comes_out_with_all_that_it_says() -> None:
    error = SinkError("sink.denied", "no", where="events", suggestion="ask", retriable=True)
    found = decode(encode(Farewell(error)))
    assert isinstance(found.error, SinkError)
    assert found.error.to_dict() == error.to_dict()


MALFORMED = [
    b"",
    b"\0\xff",
    b"{",
    b"[]",
    b"7",
    b"null",
    b"{}",
    b'{"is": "Shutdown"}',
    b'{"is": ["Stop"]}',
    b'{"is": "Stop", "at_once": true}',
    b'{"is": "Folding", "read": 1}',
    b'{"is": "Farewell"}',
    b'{"is": "Farewell", "error": {"code": 1}}',
    b'{"is": "Report", "shard": 0}',
    b'{"is": "Report", "shard": 0, "counts": {"colour": 1}, "buckets": {}}',
    b'{"is": "Report", "shard": 0, "counts": {}, "buckets": {"x": 1}}',
    b'{"is": "Report", "shard": 0, "counts": {}, "buckets": []}',
    b'{"is": "Lease", "number": 1, "low": 0, "position": 0, "acknowledged": [["events", 1]]}',
    b'{"is": "Hello", "shard": "first", "run": 7}',
    b'{"is": "Hello", "shard": null, "run": 7}',
]


@pytest.mark.parametrize("data", MALFORMED)
def test_what_is_no_message_of_this_version_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        decode(data)
    except MalformedError:
        return


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(Report)]),
        st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()),
    )
)
def test_a_report_of_another_shape_is_a_message_or_refused(fields: dict[str, Any]) -> None:
    data = {"is": "Report"} | asdict(Report(0)) | {"offsets": []} | fields
    try:
        decode(json.dumps(data).encode())
    except MalformedError:
        return
