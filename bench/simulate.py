"""Many simulated schedules, or one again.

    python -m bench.simulate --schedules 1000000 --jobs 2
    python -m bench.simulate --seed 1326             # one, shrunk and shown if it fails
    python -m bench.simulate --kind downtime,future  # those kinds of schedules, one a seed in turn
    python -m bench.simulate --kind new              # every enabled kind but the general one
    python -m bench.simulate --mutant no_fold        # with an invariant broken: which seed tells?

Prints schedules per second and what the schedules contained; on a failure the seed, the shrunk
schedule and how to run it again, with the seed of Python's hashes (`PYTHONHASHSEED`), which is
drawn where it is not given. See docs/simulation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from tests.simulation.kept import keep
from tests.simulation.kinds import KINDS, made
from tests.simulation.mutants import MUTANTS
from tests.simulation.parts import scaled
from tests.simulation.runner import Failure, run, shrink, sweep_all

_SHOWN = 5
"""Failures that are shrunk and printed."""


def main() -> int:
    """The exit status: 1 where a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--kind", type=_kinds, default="any", help=", ".join(KINDS))
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break this invariant")
    parser.add_argument("--keep", action="store_true", help="add what failed to kept.json")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    given = parser.parse_args()
    if "PYTHONHASHSEED" not in os.environ:
        # the order of sets differs from process to process, and what follows from it
        os.environ["PYTHONHASHSEED"] = str(random.randrange(1, 1_000))
        os.execv(sys.executable, [sys.executable, "-m", "bench.simulate", *sys.argv[1:]])

    first, count = (given.first, given.schedules) if given.seed is None else (given.seed, 1)
    started = said = time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[Failure] = []
    done = 0
    for size, some, failed in sweep_all(
        first, count, min(given.jobs, count), given.mutant, given.kind
    ):
        done += size
        counts += some
        failures += failed
        for failure in failed:
            print(f"{failure.of} {failure.seed}: {failure.text}", file=sys.stderr)
        if time.monotonic() - said > 10:
            said = time.monotonic()
            rate = done / (said - started)
            print(f"{done:,} of {count:,}, {rate:,.0f}/s, {len(failures)} failed", file=sys.stderr)
    seconds = time.monotonic() - started

    failures.sort(key=lambda f: f.seed)
    print(f"{done:,} schedules in {seconds:,.0f} s, {done / seconds:,.0f}/s")
    for what, number in sorted(counts.items()):
        print(f"  {what:40}{number:>12,}")
    print(f"{len(failures)} failed")
    shown = [_show(f, given.mutant, given.keep) for f in failures[:_SHOWN]]
    if given.json:
        result = {
            "schedules": done,
            "seconds": round(seconds, 1),
            "kinds": given.kind,
            "mutant": given.mutant,
            "counts": dict(sorted(counts.items())),
            "failed": [vars(f) for f in failures],
            "shrunk": shown,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return bool(failures)


def _kinds(names: str) -> list[str]:
    """What `--kind` says."""
    found = [name for name, kind in KINDS.items() if kind.enabled and name != "any"]
    if names != "new":
        found = names.split(",")
    if unknown := [name for name in found if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no kind {', '.join(unknown)}")
    return found


def _show(failure: Failure, mutant: str | None, kept: bool) -> dict[str, object]:
    """Shrink one failure and print it."""
    with scaled(), MUTANTS[mutant]() if mutant else nullcontext():
        shrunk = shrink(made(failure.of, failure.seed), failure.kind)
        text = run(shrunk).text
    print(f"\n{failure.of} {failure.seed}: {failure.text}")
    print(f"shrunk: {text}\n  {shrunk.as_json()['setup']}")
    for step in shrunk.steps:
        print(f"  {json.dumps(step)}")
    option = f" --mutant {mutant}" if mutant else ""
    seen = f"PYTHONHASHSEED={os.environ['PYTHONHASHSEED']}"
    print(
        f"again: {seen} python -m bench.simulate --kind {failure.of} --seed {failure.seed}{option}"
    )
    if kept and mutant is None:
        keep(failure.seed, failure.kind, shrunk, failure.of)
    return {"kind": failure.of, "seed": failure.seed, "was": text, **shrunk.as_json()}


if __name__ == "__main__":
    sys.exit(main())
