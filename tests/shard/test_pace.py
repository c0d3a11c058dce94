"""How much one transaction holds."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from eventpub.admission.model import EVENTS
from eventpub.shard.pace import Pace, Sizes, rows_within

MIB = 1 << 20


def rows(*sizes: int) -> pa.Table:
    """Events with payloads of these sizes."""
    found: list[dict[str, Any]] = [
        {
            "aggregate_id": "a",
            "version": version,
            "event_type": "happened",
            "payload": b"x" * size,
            "metadata": None,
            "create_time": version,
        }
        for version, size in enumerate(sizes, 1)
    ]
    return pa.Table.from_pylist(found, schema=EVENTS)


def test_a_transaction_holds_rows_of_at_most_so_many_bytes() -> None:
    table = rows(1000, 1000, 1000, 9000, 1, 1)
    assert rows_within(table, 0, 3500, 10) == 3
    assert rows_within(table, 0, 2500, 10) == 1  # by halves
    assert rows_within(table, 2, 2500, 10) == 1
    assert rows_within(table, 3, 2500, 10) == 1  # too large by itself: one at least
    assert rows_within(table, 4, 2500, 10) == 2
    assert rows_within(table, 6, 2500, 10) == 0
    assert rows_within(table, 0, MIB, 10) == 6
    assert rows_within(table, 0, MIB, 4) == 4


def test_transactions_grow_while_they_are_fast() -> None:
    found = Pace(60.0, Sizes())
    assert found.size == Sizes().first
    for _ in range(5):
        found.published(found.size, 0.2)
    assert found.size == Sizes().most
    assert found.is_full


def test_what_took_long_says_how_much_fits() -> None:
    found = Pace(60.0, Sizes())
    found.published(4 * MIB, 8.0)
    assert found.size == pytest.approx(2.5 * MIB)  # 5 s at half a MiB a second
    found.published(100, 30.0)  # a moment without a broker says nothing
    assert found.size == pytest.approx(2.5 * MIB)


def test_what_failed_is_never_tried_again_as_it_was() -> None:
    found = Pace(60.0, Sizes(), Sizes().most)
    tried: list[int] = []
    while not tried or tried[-1] > 64 << 10:
        tried.append(found.size)
        found.failed(found.size)
    assert tried == sorted(tried, reverse=True)
    assert len(set(tried)) == len(tried)
    found.failed(found.size)
    assert found.size == 64 << 10
    assert not found.is_full
