"""The real admission, index, sink and publisher, through random schedules in a modelled world.

`python -m bench.simulate` runs more of them; docs/simulation.md says what is real and what is not.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.kept import Kept, kept
from tests.simulation.kinds import KINDS, made
from tests.simulation.mutants import MUTANTS, NOTICED_BY
from tests.simulation.parts import scaled
from tests.simulation.played import PLAYED
from tests.simulation.runner import Failure, run, shrink, sweep, sweep_all
from tests.simulation.schedule import CRASH_POINTS, Schedule

SCHEDULES = 500
OF_A_KIND = 10
"""Schedules of each kind beside the general one."""
MORE = 5
"""Times as many, which follow those, are played by `script/test --long`."""
SHOWS_WITHIN = 500
"""Seeds of a kind that is not enabled."""
CAUGHT_WITHIN = 2_500
"""Seeds that a mutant may survive."""


@pytest.mark.parametrize("case", kept(), ids=lambda case: f"{case.was}-{case.seed}")
def test_what_failed_once_holds(case: Kept) -> None:
    with scaled():
        outcomes = [run(case.schedule), run(made(case.of, case.seed))]
    assert [outcome.text for outcome in outcomes] == ["", ""]


@pytest.mark.parametrize(
    ("first", "schedules"),
    [(0, SCHEDULES), pytest.param(SCHEDULES, SCHEDULES * MORE, marks=pytest.mark.long)],
)
def test_every_event_once_and_in_order_whatever_happens(first: int, schedules: int) -> None:
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    for _, some, failed in sweep_all(first, schedules, jobs=2):
        counts += some
        failures += failed
    assert not failures, f"{failures[:5]}: python -m bench.simulate --seed {failures[0].seed}"
    never = [p for p in CRASH_POINTS if not counts[f"crash at {p}"]]
    assert len(never) <= 10 * SCHEDULES / schedules, f"nothing has crashed near these: {never}"
    for what in (
        "late commits",
        "skips",
        "late events",
        "rescales",
        "fenced",
        "lost indexes",
        "dead letters",
        "answered found",
        "answered skipped",
        "reports in vain",
        "orphans",
    ):
        assert counts[what], f"the schedules contain no {what}"


NEW = {name: kind for name, kind in KINDS.items() if name != "any"}


@pytest.mark.parametrize(
    ("first", "schedules"),
    [(0, OF_A_KIND), pytest.param(OF_A_KIND, OF_A_KIND * MORE, marks=pytest.mark.long)],
)
def test_what_is_expected_of_each_kind_comes_of_it(first: int, schedules: int) -> None:
    enabled = [name for name, kind in NEW.items() if kind.enabled]
    all_of_them = len(enabled)
    failures = [
        failure
        for _, _, failed in sweep_all(
            first * all_of_them, schedules * all_of_them, jobs=2, kinds=enabled
        )
        for failure in failed
    ]
    assert not failures, f"{failures[:5]}: python -m bench.simulate --kind {failures[0].of}"


@pytest.mark.parametrize("name", [name for name, kind in NEW.items() if not kind.enabled])
def test_a_kind_that_is_not_enabled_shows_why(name: str) -> None:
    """Whoever has made it pass: set `enabled`."""
    for first in range(0, SHOWS_WITHIN, 20):
        if any(f.kind == NEW[name].shows for f in sweep(first, 20, kinds=[name])[1]):
            return
    pytest.fail(f"{SHOWS_WITHIN} schedules have not shown it: is {name} to be enabled?")


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in PLAYED])
def test_a_broken_invariant_is_caught(name: str) -> None:
    kind, seed = NOTICED_BY[name]
    for first, count in ((seed, 1), *((n, 50) for n in range(0, CAUGHT_WITHIN, 50))):
        if sweep(first, count, name, [kind])[1]:
            return
    pytest.fail(f"{CAUGHT_WITHIN} schedules have not noticed {name}")


@pytest.mark.parametrize("name", PLAYED)
def test_a_runner_that_is_late_does_no_harm_whenever_it_wakes_up(name: str) -> None:
    schedules, shows = PLAYED[name]
    with scaled():
        assert {run(schedule).text for schedule in schedules()} == {""}
        with MUTANTS[name]():
            kinds = {run(schedule).kind for schedule in schedules()}
    assert kinds == {None, shows}


def test_a_failure_shrinks_to_a_few_steps() -> None:
    failure = next(f for first in range(0, 500, 50) for f in sweep(first, 50, "no_fold")[1])
    schedule = made(failure.of, failure.seed)
    with scaled(), MUTANTS["no_fold"]():
        shrunk = shrink(schedule, failure.kind)
        assert run(shrunk).kind == failure.kind
        assert run(Schedule.from_json(shrunk.as_json())).kind == failure.kind
    assert len(shrunk.steps) < len(schedule.steps) / 2
    with scaled():
        assert run(shrunk).kind is None


def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    code = "from tests.simulation.runner import sweep; print(sorted(sweep(100, 60)[0].items()))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
