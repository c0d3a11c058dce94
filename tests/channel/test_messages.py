"""Reports and requests that are kept, or come from elsewhere, are as they were, or refused."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpub.admission.model import Counts
from eventpub.channel import MalformedError, Report, Request, fields_of, report_of, request_of

_numbers = st.integers(-(2**63), 2**63 - 1)
_optional = st.none() | _numbers
_texts = st.text(max_size=20)
_places = st.dictionaries(st.tuples(_texts, st.integers(0, 2000)), _numbers, max_size=4)
_facts: Any = st.lists(
    st.dictionaries(_texts, _numbers | _texts | st.none(), max_size=3), max_size=3
)
_buckets = st.dictionaries(_numbers, st.integers(0, 10**9), max_size=5)

REQUESTS = st.builds(
    Request,
    id=_texts,
    action=st.sampled_from(["retry", "skip", "list", "publish"]),
    aggregate_id=_texts,
    version=_optional,
    to_version=_optional,
    searched=st.lists(_numbers, max_size=3).map(tuple),
)
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
_json: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\0", "x" * 1000, "list", "skip"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(REPORTS)
def test_a_report_is_as_it_was(report: Report) -> None:
    found = report_of(json.loads(json.dumps(fields_of(report))))
    assert found == report
    for field in dataclasses.fields(report):
        assert type(getattr(found, field.name)) is type(getattr(report, field.name))


@given(REQUESTS)
def test_a_request_is_as_it_was(request: Request) -> None:
    assert request_of(json.loads(json.dumps(asdict(request)))) == request


@pytest.mark.parametrize(
    "change",
    [
        {"colour": "red"},
        {"counts": {"colour": 1}},
        {"counts": None},
        {"buckets": {"x": 1}},
        {"buckets": []},
        {"offsets": [["events", 1]]},
        {"offsets": None},
    ],
)
def test_a_report_of_another_version_is_refused(change: dict[str, Any]) -> None:
    assert report_of(fields_of(Report(0))) == Report(0)
    with pytest.raises(MalformedError) as error:
        report_of(fields_of(Report(0)) | change)
    assert len(str(error.value)) < 600


GOOD = asdict(Request("r", "retry", "a"))


@pytest.mark.parametrize(
    "change",
    [
        {"action": "drop"},
        {"action": ["retry"]},
        {"aggregate_id": None},
        {"aggregate_id": "\udcff"},
        {"id": 7},
        {"version": "1"},
        {"version": 2**63},
        {"to_version": 1.5},
        {"colour": "red"},
    ],
)
def test_a_request_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    assert request_of(GOOD) == Request("r", "retry", "a")
    with pytest.raises(MalformedError):
        request_of(GOOD | change)


@given(_json)
def test_whatever_is_given_for_a_request_is_one_or_refused(what: Any) -> None:
    with suppress(MalformedError):
        assert isinstance(request_of(what), Request)
