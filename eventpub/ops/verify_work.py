"""The workers of a comparison: each reads a part of the topic or of the store, or compares some
buckets, as its host (`verify_run`) asks it over a pipe.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub.config import Config
from eventpub.errors import EventpubError
from eventpub.ops.comparison import MOST_LOOKED_UP, STORE_FIELDS, TOPIC_FIELDS, compare
from eventpub.ops.records import NO_TIME, Foreign, Place, Records, hash_of_metadata, hashes
from eventpub.ops.spill import Runs
from eventpub.ops.topic import TopicReader
from eventpub.ops.verdict import SHOWN, Sample, Verdict, line_of
from eventpub.sources.mysql import EventStore, Layout

_PORTION_ROWS = 65_536

_DAY = 86_400_000_000

Spans = Mapping[Place, tuple[int, int]]
"""Of each partition, the offsets between which it is read."""


@dataclass(frozen=True)
class Job:
    """A comparison and how it is divided.

    Args:
        first, last: the bounds that were asked for, µs; None: not given.
        patience: seconds to wait for open transactions on the topic to end.
        wait: seconds to wait for missing events to be published.
        lists_all: whether all differences are kept, in `differences`.
        folder: for what is read.
        held_since: events created since, µs, may wait for a version that is not there.
        after, upto: the range of `create_time`, µs; it begins behind `after`.
        buckets: parts of the aggregates, which are compared one by one.
        slices: parts of the range, which are read from the store one by one.
        spans: what is read of the topic.
        numbers: of the topic's partitions, those that it had before first.
    """

    config: Config
    layout: Layout
    first: int | None
    last: int | None
    sample: Sample | None
    patience: float
    wait: float
    lists_all: bool
    folder: Path
    held_since: int
    after: int
    upto: int
    buckets: int
    slices: Sequence[tuple[int, int]]
    spans: Spans
    numbers: Sequence[int]

    def store(self) -> EventStore:
        """The store, with a connection of its own."""
        return EventStore(self.config.store, self.layout)

    def reader(self) -> TopicReader:
        """A reader of the topic, with connections of its own."""
        return topic_reader(self.config, self.patience, self.first, self.last)

    def rows(self) -> Runs:
        """The store's side."""
        return Runs(self.folder / "store", STORE_FIELDS, self.buckets)

    def records(self) -> Runs:
        """The topic's side."""
        return Runs(self.folder / "topic", TOPIC_FIELDS, self.buckets)

    def differences(self, bucket: int) -> Path:
        """The file of all differences of a bucket, where `lists_all`."""
        return self.folder / f"differences.{bucket}"


def topic_reader(
    config: Config, patience: float, first: int | None, last: int | None
) -> TopicReader:
    """A reader of a publisher's topics; the arguments are those of `Job`."""
    sources = (config.app.id, *config.app.former_ids)
    return TopicReader(config.sink, sources, patience, first=first, last=last)


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


@dataclass
class TopicPart:
    """What was found on a part of the topic beside its records."""

    foreign: Sequence[Foreign]
    foreign_count: int


def work(job: Job, pipe: Any, other_end: Any) -> None:
    """Do one task after the other, each a name and its argument, until the pipe is closed."""
    other_end.close()  # or its closing would not be noticed
    # what is made here has no cycles; looking for some takes most of the time otherwise
    gc.disable()
    does: dict[str, Callable[[Job, Any, Any], Any]] = {
        "topic": _read_topic,
        "rest": _read_rest,
        "store": _read_store,
        "compare": _compare,
    }
    try:
        while True:
            what, task = pipe.recv()
            try:
                answer = "done", does[what](job, task, pipe)
            except ConnectionError:
                raise
            except Exception as error:
                answer = "failed", portable(error)
            pipe.send(answer)
            gc.collect()
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return


def portable(error: Exception) -> Exception:
    """An exception as another process can raise it."""
    if isinstance(error, EventpubError):
        return error
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror)
    return RuntimeError("".join(traceback.format_exception(error)))


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

    def write(self, runs: Runs) -> None:
        if self.rows:
            names = self.columns[0]
            columns = {n: np.concatenate([c[n] for c in self.columns]) for n in names}
            runs.add(pa.concat_arrays(self.ids), columns)
        self.ids, self.columns, self.rows = [], [], 0


def _read_store(job: Job, bounds: tuple[int, int], pipe: Any) -> None:
    """Page by page: no statement runs for hours, and no page crosses a change of the clocks."""
    begin, upto = after, _ = bounds
    shard = None if job.sample is None else job.sample.shard
    runs, portion = job.rows(), _Portion()
    page = _PORTION_ROWS * (1 if job.sample is None else min(10, job.sample.one_in))
    with job.store() as store:
        while after < upto:
            poll = store.poll(after, 0, page)
            end = upto
            if poll.has_rows:
                end = min(poll.upper if poll.page_end is None else poll.page_end, upto)
                for batch in store.window(after, end, shard):
                    portion.add(*store_columns(batch))
                    pipe.send(("progress", {"rows": batch.num_rows}))
            portion.write(runs)
            done = {"slices": (end - after) / (upto - begin)}
            done["without_identity"], store.without_identity = store.without_identity, 0
            pipe.send(("progress", done))
            after = end


def store_columns(batch: pa.RecordBatch) -> tuple[pa.Array[Any], dict[str, Any]]:
    """Rows of the store (schema `EVENTS`), with hashes in place of what may be long."""
    n = batch.num_rows
    types = batch.column("event_type").cast(pa.binary()).dictionary_encode()
    texts = batch.column("metadata")
    if texts.null_count == n:
        of_metadata = np.full(n, hash_of_metadata(None), np.int64)
    else:
        of_metadata = np.fromiter(map(hash_of_metadata, texts.to_pylist()), np.int64, n)
    return batch.column("aggregate_id"), {
        "version": batch.column("version").to_numpy(),
        "create_time": batch.column("create_time").to_numpy(),
        "payload": hashes(batch.column("payload").to_pylist()),
        "type": hashes(types.dictionary.to_pylist())[types.indices.to_numpy()],
        "metadata": of_metadata,
    }


def _read_topic(job: Job, spans: Spans, pipe: Any) -> TopicPart:
    chosen = None if job.sample is None else job.sample.chooses
    reader = job.reader()
    runs, portion = job.records(), _Portion()
    at = {place: first for place, (first, _) in spans.items()}
    read = 0
    for records in reader.consume(spans, chosen):
        portion.add(*_near(records, job.after, job.upto))
        offsets = sum(upto - at[place] for place, upto in records.reached.items())
        at.update(records.reached)
        pipe.send(("progress", {"records": reader.topic.read - read, "offsets": offsets}))
        read = reader.topic.read
        if portion.rows >= _PORTION_ROWS:
            portion.write(runs)
    portion.write(runs)
    return TopicPart(reader.topic.foreign, reader.topic.foreign_count)


def _near(records: Records, after: int, upto: int) -> tuple[pa.Array[Any], dict[str, Any]]:
    times = records.columns["create_time"]
    # a record with a wrong time is to be found as altered, so a margin is kept
    near = (times == NO_TIME) | ((times > after - _DAY) & (times <= upto + _DAY))
    if not near.all():
        records = records.only(near)
    return records.ids, records.columns


def _read_rest(
    job: Job, ends: Mapping[Place, int], pipe: Any
) -> tuple[TopicPart, dict[Place, int]]:
    """What was published since the topic was read up to some ends; and the ends that it has now."""
    reader = job.reader()
    spans = reader.spans(reader.places())
    left = {p: (max(first, ends.get(p, first)), end) for p, (first, end) in spans.items()}
    return _read_topic(job, left, pipe), {place: end for place, (_, end) in spans.items()}


def _compare(job: Job, numbers: Sequence[int], pipe: Any) -> Compared:
    compared = Compared(Verdict(job.after + 1, job.upto))
    left = MOST_LOOKED_UP

    with job.store() as store:

        def look_up(keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], bool]:
            """Whether events are in the store by now; of the first asked for."""
            nonlocal left
            asked = keys[: max(left, 0)]
            left -= len(asked)
            there = store.existing(asked)
            return {key: key in there for key in asked}

        sides = zip(job.rows().read(numbers), job.records().read(numbers), strict=True)
        for (number, rows), (_, records) in sides:
            verdict = Verdict(job.after + 1, job.upto, keeps=None if job.lists_all else SHOWN)
            compare(
                rows,
                records,
                verdict,
                numbers=job.numbers,
                late_policy=job.config.gaps.late,
                clock_changes={back for _, back in job.layout.repeated},
                look_up=look_up,
                first_version=job.config.store.first_version,
                held_since=job.held_since,
            )
            if job.lists_all:
                _list(verdict, job.differences(number))
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
