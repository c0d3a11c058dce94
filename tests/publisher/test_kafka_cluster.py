"""Scenario F4: three brokers, of which one or two go, under a load of late commits.

The long form, with more faults and figures: ``python -m bench.brokers``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.brokers import Run, play
from tests.conftest import FreshDatabase

FAULTS = (
    "kill leader",
    "cut off coordinator",
    "pause leader",
    "kill coordinator",
    "two of three killed",
    "kill controller",
)
RATE = 500


@pytest.mark.alone  # three brokers, a database and Spark: each fault takes minutes beside others
def test_f4_brokers_that_die_hang_or_are_cut_off(tmp_path: Path, database: FreshDatabase) -> None:
    """One process publishes all of it, once and in order, for who reads meanwhile or afterwards.

    A leader that hangs is the hardest: without asking anew who leads, nothing was published for as
    long as it hung.
    """
    with Run(tmp_path, database, RATE, patience=180) as run:
        run.begin()
        lines = play(run, FAULTS, pause=0.5)
        found = run.end()
    assert not [line for line in lines if "stuck" in line], lines
    assert found["lost_repeated_out_of_order"] == (0, 0, 0), found
    assert not found["wrong_meanwhile"], found
    assert found["seen_meanwhile"] == found["events"] > RATE
    assert all(line.get("everywhere", 0) < 90 for line in lines), lines
