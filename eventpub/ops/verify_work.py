"""The workers of a comparison: each reads a part of the topic or of the store, or compares some
buckets, as its host (`verify_run`) asks it over a pipe.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub.errors import EventpubError
from eventpub.ops.comparison import compare
from eventpub.ops.records import NO_TIME, Place, Records
from eventpub.ops.spill import Runs
from eventpub.ops.verify import (
    SHOWN,
    STORE_FIELDS,
    TOPIC_FIELDS,
    Verdict,
    line_of,
    store_columns,
)
from eventpub.ops.verify_plan import Plan, Spans
from eventpub.store import EventStore

_PORTION_ROWS = 65_536
SECOND_CHECKS = 10_000
"""Events that differ and are looked up once more, at most."""

_DAY = 86_400_000_000


@dataclass
class Compared:
    """What was found in some buckets.

    Attributes:
        complete: of the buckets in which nothing is missing.
        lacking: the others', each by its number: what is missing may be published yet.
    """

    complete: Verdict
    lacking: dict[int, Verdict] = field(default_factory=dict)

    def add(self, number: int, verdict: Verdict) -> None:
        """Take what was found in one bucket."""
        if verdict.counts["missing"]:
            self.lacking[number] = verdict
        else:
            self.complete.merge(verdict)


def work(plan: Plan, pipe: Any, other_end: Any) -> None:
    other_end.close()  # or its closing would not be noticed
    # what is made here has no cycles; looking for some takes most of the time otherwise
    gc.disable()
    does: dict[str, Callable[[Plan, Any, Any], Any]] = {
        "topic": _read_topic,
        "rest": _read_rest,
        "store": _read_store,
        "compare": _compare,
    }
    try:
        while True:
            what, task = pipe.recv()
            try:
                pipe.send(("done", does[what](plan, task, pipe)))
            except EventpubError as e:
                pipe.send(("failed", e))
            except OSError as e:
                if isinstance(e, ConnectionError):
                    raise
                pipe.send(("failed", OSError(e.errno, e.strerror)))
            gc.collect()
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


@dataclass
class _Portion:
    """Rows or records that are written together."""

    ids: list[pa.Array[Any]] = field(default_factory=list)
    columns: list[Mapping[str, Any]] = field(default_factory=list)
    rows: int = 0

    def add(self, ids: pa.Array[Any], columns: Mapping[str, Any]) -> None:
        self.ids.append(ids)
        self.columns.append(columns)
        self.rows += len(ids)

    def write(self, runs: Runs, fields: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        ids: Any = pa.concat_arrays(self.ids) if self.ids else pa.array([], pa.string())
        columns = {
            name: np.concatenate([c[name] for c in self.columns] or [np.empty(0, kind)])
            for name, kind in fields.items()
        }
        runs.add(f"{time.time_ns():020}-{os.getpid()}", ids, columns, about)
        self.ids, self.columns, self.rows = [], [], 0


def _read_store(plan: Plan, task: tuple[int, int, int], pipe: Any) -> None:
    """Page by page: no statement runs for hours, and no page crosses a change of the clocks."""
    number, after, upto = task
    sample = plan.asked.sample
    shard = None if sample is None else sample.shard
    runs, portion = plan.rows(), _Portion()
    page = _PORTION_ROWS * (1 if sample is None else min(10, sample.one_in))
    with EventStore(plan.asked.config.store, plan.asked.layout) as store:
        while after < upto:
            poll = store.poll(after, 0, page)
            end = upto
            if poll.has_rows:
                end = min(poll.upper if poll.page_end is None else poll.page_end, upto)
                for batch in store.window(after, end, shard):
                    portion.add(*store_columns(batch))
                    pipe.send(("progress", {"rows": batch.num_rows}))
            nameless, store.without_identity = store.without_identity, 0
            about = {"slice": number, "upto": end, "without_identity": nameless}
            portion.write(runs, STORE_FIELDS, about)
            begin, stop = plan.slices[number]
            done = {"slices": (end - after) / (stop - begin), "without_identity": nameless}
            pipe.send(("progress", done))
            after = end


def _read_topic(plan: Plan, spans: Spans, pipe: Any) -> None:
    sample = plan.asked.sample
    reader = plan.asked.reader()
    runs, portion = plan.records(), _Portion()
    reached: dict[Place, int] = {}
    at = {place: first for place, (first, _) in spans.items()}
    read = 0

    def write() -> None:
        nonlocal read
        topic = reader.topic
        found = {
            "foreign": [list(vars(one).values()) for one in topic.foreign],
            "foreign_count": topic.foreign_count,
        }
        about = {
            "reached": [[*place, offset] for place, offset in reached.items()],
            "read": topic.read - read,
            "topic": found,
        }
        portion.write(runs, TOPIC_FIELDS, about)
        pipe.send(("progress", {"topic": found}))
        read = topic.read
        topic.foreign, topic.foreign_count = [], 0

    said = 0
    for records in reader.consume(spans, None if sample is None else sample.chooses):
        portion.add(*_near(records, plan.after, plan.upto))
        reached.update(records.reached)
        offsets = sum(upto - at[place] for place, upto in records.reached.items())
        at.update(records.reached)
        pipe.send(("progress", {"records": reader.topic.read - said, "offsets": offsets}))
        said = reader.topic.read
        if portion.rows >= _PORTION_ROWS:
            write()
    write()


def _near(records: Records, after: int, upto: int) -> tuple[pa.Array[Any], dict[str, Any]]:
    times = records.columns["create_time"]
    # a record with a wrong time is to be found as altered, so a margin is kept
    near = (times == NO_TIME) | ((times > after - _DAY) & (times <= upto + _DAY))
    if not near.all():
        records = records.only(near)
    return records.ids, records.columns


def _read_rest(plan: Plan, ends: Mapping[Place, int], pipe: Any) -> dict[Place, int]:
    """What was published since the topic was read up to some ends; the ends that it has now."""
    reader = plan.asked.reader()
    spans = reader.spans(reader.places())
    _read_topic(
        plan,
        {p: (max(first, ends.get(p, first)), end) for p, (first, end) in spans.items()},
        pipe,
    )
    return {place: end for place, (_, end) in spans.items()}


def _compare(plan: Plan, numbers: Sequence[int], pipe: Any) -> Compared:
    compared = Compared(Verdict(plan.after + 1, plan.upto))
    checks_left = SECOND_CHECKS
    lists_all = plan.asked.lists_all

    with EventStore(plan.asked.config.store, plan.asked.layout) as store:

        def still_there(keys: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
            """Which events are in the store by now, whatever their time; of the first asked for."""
            nonlocal checks_left
            checked = keys[: max(checks_left, 0)]
            checks_left -= len(checked)
            return store.existing(checked)

        sides = zip(plan.rows().read(numbers), plan.records().read(numbers), strict=True)
        for (number, rows), (_, records) in sides:
            verdict = Verdict(plan.after + 1, plan.upto, keeps=None if lists_all else SHOWN)
            compare(
                rows,
                records,
                verdict,
                numbers=plan.numbers,
                late_policy=plan.asked.config.gaps.late,
                clock_changes={back for _, back in plan.asked.layout.repeated},
                still_there=still_there,
            )
            if lists_all:
                _list(verdict, plan.differences(number))
            compared.add(number, verdict)
            pipe.send(("progress", {"compared": 1}))
    return compared


def _list(verdict: Verdict, file: Path) -> None:
    """Write all differences of a bucket to its file; the verdict keeps the earliest."""
    with file.open("w", encoding="utf-8") as out:
        for kind, found in verdict.examples.items():
            out.writelines(line_of(kind, one) for one in found)
            del found[SHOWN:]
    verdict.keeps = SHOWN
