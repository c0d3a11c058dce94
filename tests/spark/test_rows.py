"""Rows in groups, as the publisher's source hands them to its sink."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from eventpub.spark.rows import DECIDED, ROWS_IN, InputRows, grouped, ungrouped
from eventpub.spark.source import GROUP, SCHEMA


def table(rows: int, payload: int = 10) -> pa.Table:
    """Decided rows; every third has no payload."""
    return pa.Table.from_pylist(
        [
            {
                "aggregate_id": f"a-{n}",
                "version": n,
                "event_type": "Created",
                "payload": None if n % 3 == 0 else bytes(payload),
                "create_time": n,
                "late": False,
                "kind": "event",
            }
            for n in range(rows)
        ],
        schema=DECIDED,
    )


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 20_000, 45_001])
def test_what_was_grouped_comes_back(rows: int) -> None:
    given = [table(rows), table(3)]
    batches = list(grouped(given, 0))
    assert sum(batch.num_rows for batch in batches) == rows + 3, "Spark counts each event"
    assert max(batch.num_rows for batch in batches) <= 20_000
    for batch in batches:
        batch.validate(full=True)
        assert batch.column(GROUP).null_count == batch.num_rows - 1
    assert pa.Table.from_batches(ungrouped(iter(batches))).equals(pa.concat_tables(given))


def test_however_spark_cuts_them() -> None:
    given = [table(2_000, 9_000), table(100), table(1, 6 << 20)]
    whole = pa.Table.from_batches(list(grouped(given, 0))).combine_chunks()
    for size in (1, 700, 20_000):
        batches = whole.to_batches(max_chunksize=size)
        found = list(ungrouped(iter(batches)))
        assert pa.Table.from_batches(found).equals(pa.concat_tables(given))


def test_times_are_instants_whatever_a_session_takes_a_timestamp_for() -> None:
    """With spark.sql.timestampType = TIMESTAMP_NTZ no batch could be read."""
    assert "create_time timestamp_ltz" in SCHEMA


def test_a_group_has_about_a_megabyte() -> None:
    sizes = [len(batch.column(GROUP)[0].as_py()) for batch in grouped([table(3_000, 9_000)], 0)]
    assert 16 <= len(sizes) <= 24
    assert max(sizes) < 5 << 18
    few = [batch.num_rows for batch in grouped([table(2, 3 << 20)], 0)]
    assert few == [1, 1], "rows are not cut"


def test_a_group_larger_than_a_piece_is_cut_and_joined() -> None:
    [begun] = grouped([table(2, 1 << 10).slice(1)], 0)
    around = len(begun.column(GROUP)[0].as_buffer()) - (1 << 10)
    for beside in (-64, 0, 64):
        of_size = table(2, (8 << 20) - around + beside).slice(1)
        given = [table(3), of_size, of_size, table(3)]
        batches = list(grouped(given, 0))
        sizes = [batch.column(GROUP)[0].as_buffer().size for batch in batches]
        piece = 4 << 20
        of_one = [piece, piece - 64] if beside < 0 else [piece, piece, beside]
        assert sizes[1:-1] == 2 * of_one, "the last is smaller"
        assert pa.Table.from_batches(ungrouped(iter(batches))).equals(pa.concat_tables(given))


def test_a_very_large_row_passes_through_spark(tmp_path: Path) -> None:
    """Its JVM held several copies of the row, and ended for want of memory."""
    job = [sys.executable, "-m", "tests.spark.large_row", str(tmp_path)]
    done = subprocess.run(job, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventpub.spark.rows.require_whole_input", lambda: None)


def test_groups_are_published_a_few_megabytes_at_a_time() -> None:
    rows = InputRows(ungrouped(grouped([table(3_000, 9_000)], 7)))
    parts = [part for n in range(9) if (part := rows.part(n)) is not None]
    assert pa.concat_tables(parts).equals(table(3_000, 9_000))
    assert all(4 << 20 <= part.nbytes < 6 << 20 for part in parts[:-1])
    assert (len(parts), rows.rows, rows.metadata(ROWS_IN)) == (4, 3_000, 7)


def test_grouped_rows_have_one_digest_however_they_are_divided() -> None:
    rows = table(1_000)

    def digest(*tables: pa.Table) -> str:
        return InputRows(ungrouped(grouped(tables, 0))).digest()

    whole = digest(rows)
    assert digest(rows.slice(0, 1), rows.slice(1, 700), rows.slice(701)) == whole
    others = [
        [rows.slice(1)],
        [rows.slice(0, 999)],
        [rows.slice(500), rows.slice(0, 500)],
        [rows.slice(0, 999), with_id(rows.slice(999), "a-99")],
        [rows.slice(0, 999), with_id(rows.slice(999), None)],
        [rows.slice(0, 998), with_id(rows.slice(998), "")],
        [rows.slice(0, 998), with_id(rows.slice(998), None)],
    ]
    assert len({whole, *(digest(*other) for other in others)}) == len(others) + 1


def with_id(rows: pa.Table, aggregate_id: str | None) -> pa.Table:
    return pa.Table.from_pylist(
        [{**row, "aggregate_id": aggregate_id} for row in rows.to_pylist()], schema=DECIDED
    )
