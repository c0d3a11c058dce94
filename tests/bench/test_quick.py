"""All of the bench, small, by the installed command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tables import CASES

pytestmark = pytest.mark.alone


def test_the_quick_run_measures_everything_and_writes_table_plots_and_page(tmp_path: Path) -> None:
    out = tmp_path / "results"
    answer = subprocess.run(
        [
            str(Path(sys.executable).with_name("eventpub")),
            *("bench", "--quick", "--json", "--out", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=tmp_path,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    told = json.loads(answer.stdout)
    assert set(told["result"]) == set(CASES)
    columns = told["result"]["article"]["columns"]
    assert columns["window only"]["verdict"]["lost"] > 0
    assert columns["with recount and watermark"]["verdict"]["lost"] == 0
    assert columns["with recount and watermark"]["eventpub_verify"]["ok"]
    for name in [*(f"{case}.json" for case in CASES), "index.html", "article-lag.png"]:
        assert (out / name).stat().st_size > 500, name


def test_a_backlog_is_drained_by_the_publisher_the_raw_pipe_and_debezium(tmp_path: Path) -> None:
    """Each topic must have as many records as there are events, or the drain fails."""
    result = tmp_path / "drain.json"
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "bench.drain", "--events", "20000", "--rounds", "1"),
            *("--json", str(result)),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    found = json.loads(result.read_text())
    assert set(found["medians"]) == {"eventpub", "eventpub on Spark", "raw pipe", "Debezium"}
    assert all(one["rate"] > 0 for one in found["medians"].values())
    assert all(one["ratio"] > 0 for one in found["medians"].values())
