"""What every `Encoder` does: that of CloudEvents, and the twin."""

from __future__ import annotations

import pytest

from eventpub.sink.encoder import CloudEvents, Encoder
from eventpub.sink.records import SEQUENCE, DeadRow, partitions_of
from tests.sink.helpers import CREATED, PARTITIONS, WHOLE, events, records_of, some_events
from tests.twins.encoder import PlainEncoder

ROWS = some_events(WHOLE, 40)
PLACED = partitions_of(ROWS, PARTITIONS)
LIMIT = CREATED + 1_000_000


@pytest.fixture(params=[CloudEvents("orders"), PlainEncoder()], ids=["CloudEvents", "plain"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    """Each of them."""
    made: Encoder = request.param
    return made


def test_the_same_rows_give_the_same_records(encoder: Encoder) -> None:
    first, second = (records_of(encoder.events(ROWS, PLACED, None, LIMIT)) for _ in range(2))
    assert first == second


def test_a_record_has_the_key_the_partition_and_the_version_of_its_row(encoder: Encoder) -> None:
    found = records_of(encoder.events(ROWS, PLACED, None, LIMIT))
    assert [r.key for r in found] == ROWS["aggregate_id"].to_pylist()
    assert [r.partition for r in found] == PLACED.tolist()
    versions = [dict(r.headers)[SEQUENCE] for r in found]
    texts = [v.decode() if isinstance(v, bytes) else v for v in versions]
    assert texts == [str(v) for v in ROWS["version"].to_pylist()]
    assert [r.value for r in found] == ROWS["payload"].to_pylist()


def test_what_is_handed_over_at_once_is_the_same(encoder: Encoder) -> None:
    fixed = encoder.fixed(ROWS, PLACED, None, LIMIT)
    if fixed is not None:
        one_by_one = encoder.events(ROWS, PLACED, None, LIMIT)
        assert (fixed.keys.to_pylist(), fixed.values.to_pylist()) == (
            one_by_one.keys,
            one_by_one.values,
        )
        assert fixed.timestamps.tolist() == one_by_one.timestamps
    of_two_kinds = events([("a", 1), ("b", 1)], metadata=[b'{"user":"u"}', None])
    assert encoder.fixed(of_two_kinds, partitions_of(of_two_kinds, 4), None, LIMIT) is None


@pytest.mark.parametrize("reduced", [False, True])
def test_a_dead_letter_is_small_whatever_its_row_is(encoder: Encoder, reduced: bool) -> None:
    row = DeadRow("a", 7, "sink.record_refused: too large", b"x" * 2_000_000, "t" * 100_000)
    letter = encoder.dead(row, (PARTITIONS, 3), LIMIT, reduced=reduced)
    size = len(letter.value or b"") + sum(len(name) + len(v or b"") for name, v in letter.headers)
    assert size < 100_000
    assert (letter.key, dict(letter.headers)[SEQUENCE]) == ("a", "7")
    long = encoder.dead(DeadRow("a" * 2_000_000, 7, "r"), (PARTITIONS, 3), LIMIT, reduced=True)
    assert len(long.key or b"") + sum(len(v or b"") for _, v in long.headers) < 100_000
    nobodys = encoder.dead(DeadRow(None, None, "store.row_invalid"), (4, 3), LIMIT, reduced=reduced)
    assert nobodys.partition == 3
