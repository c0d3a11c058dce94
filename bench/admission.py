"""CPU time of admission and index for one transaction's rows, beside another checkout's.

    python -m bench.admission --beside ../old

Decides and records 25,000 contiguous rows of so many aggregates, again and again, each time with
the next versions; in turns in a process of this checkout and one of the other. Prints the best time
of each step in all rounds, ms, the other checkout's, and by how much this one's is longer.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub import admission
from eventpub.admission.model import EVENTS
from eventpub.index import Index

ROWS = 25_000
_START = 1_700_000_000_000_000


def steps(aggregates: int, times: int) -> dict[str, float]:
    """The best time of each step, ms."""
    best: dict[str, float] = {}
    names = np.array([f"order-{number:07d}" for number in range(aggregates)])
    per_aggregate = ROWS // aggregates
    code = np.tile(np.arange(aggregates), per_aggregate)
    rounds = np.repeat(np.arange(per_aggregate), aggregates)
    texts = pa.array(names[code].tolist(), pa.string())
    types = pa.array(["happened"] * len(code), pa.string())
    payloads = pa.array([b"x" * 280] * len(code), pa.binary())
    nothing = pa.nulls(len(code), pa.string())
    with tempfile.TemporaryDirectory() as folder, Index(Path(folder) / "0", {}) as index:
        index.begin(None)
        if hasattr(index, "keep_times"):
            index.keep_times("UTC, 1", _START)
        for number in range(times):
            versions = pa.array(rounds + 1 + number * per_aggregate, pa.int64())
            created = pa.array(
                _START + number * 10_000_000 + np.arange(len(code)) * 100, pa.int64()
            )
            columns: list[Any] = [texts, versions, types, payloads, nothing, created]
            rows = pa.Table.from_batches([pa.RecordBatch.from_arrays(columns, schema=EVENTS)])
            ids: list[Any] = rows.column("aggregate_id").unique().to_pylist()
            marks = [time.thread_time()]
            known = index.known(ids)
            marks.append(time.thread_time())
            plan = admission.Plan(rows, known, admission.Rules(), _START)
            decision = plan.decide(EVENTS.empty_table())
            marks.append(time.thread_time())
            index.record(decision, {("topic", 0): number}, None)
            marks.append(time.thread_time())
            assert decision.counts.admitted == len(code)
            if number:
                taken = dict(zip(("known", "decide", "record"), np.diff(marks) * 1e3, strict=True))
                taken["all"] = sum(taken.values())
                best = {step: min(ms, best.get(step, ms)) for step, ms in taken.items()}
    return best


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.admission", description=__doc__)
    parser.add_argument("--beside", type=Path, help="a checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=40, help="transactions of a round")
    parser.add_argument("--aggregates", type=int, nargs="+", default=[25, 2_500, 12_500, 25_000])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps([steps(number, given.times) for number in given.aggregates]))
        return 0
    here = Path(inspect.getfile(admission)).parents[2]
    best: dict[tuple[Path, int, str], float] = {}
    checkouts = [here] + ([given.beside.resolve()] if given.beside else [])
    for _ in range(given.rounds):
        for checkout in checkouts:
            command = [sys.executable, __file__, "--one", "--times", str(given.times)]
            command += ["--aggregates", *map(str, given.aggregates)]
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            answer = subprocess.run(command, env=environment, capture_output=True, check=True)
            for number, found in zip(given.aggregates, json.loads(answer.stdout), strict=True):
                for step, ms in found.items():
                    key = (checkout, number, step)
                    best[key] = min(ms, best.get(key, ms))
    for number in given.aggregates:
        for step in ("known", "decide", "record", "all"):
            own, *others = (best[c, number, step] for c in checkouts)
            beside = f"{others[0]:8.2f} {100 * (own / others[0] - 1):+6.1f}%" if others else ""
            print(f"{number:6d} aggregates  {step:8s} {own:8.2f} {beside}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
