"""The processes of a comparison: some read the topic, some the store, then all compare.

    verify ── starts ──▶ host ── forks ──▶ workers: a part of the topic, of the store, some buckets
           ◀─ progress, verdict ─┘  ◀─ progress, results ─┘

The host is a process of its own: it forks before it has a thread, and its PYTHONHASHSEED makes the
hashes of all workers, and of those that resume the work, the same. What is read is kept in a folder
as complete files (`spill`), so an interrupted comparison goes on behind the last of them. What must
hold: the end of the topic that is compared is one that was asked for after the store was read; so a
row that was committed and published meanwhile is never taken for missing. Nor is one that was
committed meanwhile and is published seconds later, as the recount does: the topic's end is asked
for again while anything is missing.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

from eventpub.errors import EventpubError, StateError
from eventpub.ops.records import Foreign, Place
from eventpub.ops.spill import bucket_count
from eventpub.ops.topic import Topic
from eventpub.ops.verify import (
    Progress,
    Verdict,
    not_writable,
)
from eventpub.ops.verify_plan import Asked, Plan, Spans, folder, kept_plan
from eventpub.ops.verify_work import SECOND_CHECKS, work
from eventpub.store import EventStore

_SLICES = 8
"""Parts of the store's range for each worker that reads it."""

_MOST_WORKERS = 8
_SECONDS_BETWEEN = 0.2

_START = "import sys; from eventpub.ops.verify_run import main; sys.exit(main(sys.argv[1:]))"


def run(
    asked: Asked,
    find_range: Callable[[], tuple[int, int, list[str]]],
    on_progress: Callable[[Progress], None],
    listed: IO[str] | None,
) -> tuple[Verdict, Topic]:
    """Compare.

    Args:
        find_range: gives the range of `create_time` and notes about it, if none is kept.
        listed: gets all differences, one a line.

    Returns:
        The verdict, and what was found on the topic beside events.

    Raises:
        EventpubError: as `verify`.
    """
    with folder(asked) as (path, lock):
        try:
            return _run_in(path, lock, asked, find_range, on_progress, listed)
        except OSError as e:
            raise StateError(
                "verify.no_space",
                f"the rows to compare cannot be kept: {e.strerror}",
                where=str(path),
                suggestion="free about 150 bytes an event there, or set TMPDIR to a larger disk",
            ) from e


def _run_in(  # noqa: PLR0913, PLR0917 (as `run`, and where)
    folder: Path,
    lock: int | None,
    asked: Asked,
    find_range: Callable[[], tuple[int, int, list[str]]],
    on_progress: Callable[[Progress], None],
    listed: IO[str] | None,
) -> tuple[Verdict, Topic]:
    kept = kept_plan(folder)
    seed = kept["seed"] if kept else random.SystemRandom().randrange(1, 1 << 32)
    with _host(seed, lock) as host:  # which starts meanwhile
        if kept is None:
            after, upto, notes = find_range()
        reader = asked.reader()
        spans = reader.spans(reader.places())
        if kept is None:
            size = sum(end - first for first, end in spans.values())
            kept = {
                "after": after,
                "upto": upto,
                "notes": notes,
                "buckets": bucket_count(size // (asked.sample.one_in if asked.sample else 1)),
                "slices": _slices(asked, after, upto),
                "seed": seed,
                "began": time.time(),
            }
            unfinished = folder / "plan.part"
            unfinished.write_text(json.dumps(kept))
            unfinished.replace(folder / "plan.json")
        plan = Plan(
            asked, folder, kept["after"], kept["upto"], kept["buckets"],
            [(a, b) for a, b in kept["slices"]], spans,
            asked.numbers(reader.topic.partitions),
        )  # fmt: skip
        verdict, topic = host(plan, on_progress)
        topic.truncated = reader.topic.truncated
        if listed is not None:
            _gather(plan, listed)
    verdict.notes[:0] = kept["notes"]
    verdict.sample = asked.sample
    return verdict, topic


def _gather(plan: Plan, listed: IO[str]) -> None:
    """Write the differences of all buckets into one file."""
    for bucket in range(plan.buckets):
        text = plan.differences(bucket).read_text(encoding="utf-8")
        try:
            listed.write(text)
        except OSError as error:
            raise not_writable(listed.name, error) from error


def _slices(asked: Asked, after: int, upto: int) -> list[tuple[int, int]]:
    """The store's range in parts of equal time, from its first row on."""
    with EventStore(asked.config.store, asked.layout) as store:
        poll = store.poll(after, 0, 1)
    if poll.page_end is None or poll.page_end >= upto:
        return [(after, upto)]
    first = poll.page_end - 1
    number = _SLICES * _store_workers()
    bounds = [after, *(first + (upto - first) * n // number for n in range(1, number)), upto]
    return [(a, b) for a, b in pairwise(bounds) if b > a]


def _cores() -> int:
    # macOS does not say which ones are ours
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST_WORKERS, own or 1))


def _store_workers() -> int:
    return max(1, _cores() // 2)


# --- the host, seen from outside


Host = Callable[[Plan, Callable[[Progress], None]], tuple[Verdict, Topic]]


@contextmanager
def _host(seed: int, lock: int | None) -> Iterator[Host]:
    """A host that starts; it ends with the block."""
    ours, theirs = Pipe()
    environment = os.environ | {
        "PYTHONHASHSEED": str(seed),
        "MALLOC_ARENA_MAX": "2",  # librdkafka's threads would have one each, mostly empty
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _START, str(theirs.fileno())],
        pass_fds=[theirs.fileno(), *([] if lock is None else [lock])],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,  # nothing but the answer may stand on ours
        start_new_session=True,  # Ctrl-C is for us: it ends by our leaving
    )
    theirs.close()

    def ask(plan: Plan, on_progress: Callable[[Progress], None]) -> tuple[Verdict, Topic]:
        try:
            ours.send(plan)
            while True:
                what, value = ours.recv()
                if what == "progress":
                    on_progress(value)
                elif what == "failed":
                    raise value
                else:
                    found: tuple[Verdict, Topic] = value
                    return found
        except (EOFError, ConnectionError):
            process.wait()
            raise _lost(process.returncode) from None

    try:
        yield ask
    finally:
        ours.close()  # which ends it, and its workers
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lost(status: int | None) -> StateError:
    return StateError(
        "verify.process_lost",
        f"a process of the comparison ended with status {status}",
        suggestion="run it again: it goes on where it was; if memory was short, free some",
        retriable=True,
    )


# --- the host


def main(arguments: Sequence[str]) -> int:
    """The host: takes a plan, says how far it is, and gives the result."""
    outside = Connection(int(arguments[0]))
    try:
        plan: Plan = outside.recv()
    except (EOFError, ConnectionError):
        return 1
    gc.freeze()  # so that workers share it
    host = _Host(plan, outside)
    try:
        outside.send(("result", host.run()))
    except (ConnectionError, _LeftError):
        return 1  # nobody waits for it any more
    except EventpubError as e:
        outside.send(("failed", e))
    except OSError as e:
        outside.send(("failed", OSError(e.errno, e.strerror)))
    finally:
        host.end()
    return 0


class _LeftError(Exception):
    """Who has started the host is gone."""


Task = tuple[str, Any]


@dataclass
class _Worker:
    process: Any
    pipe: Any
    task: Task | None = None


class _Host:
    """Gives the workers their tasks: first reads, then what came since, then the comparison."""

    def __init__(self, plan: Plan, outside: Any) -> None:
        self._plan, self._outside = plan, outside
        self._workers = [self._fork() for _ in range(_cores() + _store_workers())]
        self._rows = self._records = self._resumed = 0
        self._offsets = self._compared = self._without_identity = 0
        self._slices = 0.0
        self._topic = Topic(plan.numbers[-1])
        self._said_at = 0.0
        self._doing = "reading store and topic"

    def _fork(self) -> _Worker:
        ours, theirs = Pipe()
        process = get_context("fork").Process(
            target=work, args=(self._plan, theirs, ours), daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def end(self) -> None:
        """End the workers, whatever they do."""
        for worker in self._workers:
            worker.process.terminate()

    def run(self) -> tuple[Verdict, Topic]:
        plan = self._plan
        reads, done = self._open_slices()
        spans, reached = self._open_spans()
        self._slices += done
        reads[:0] = [("topic", part) for part in _parts(spans, _cores())]
        self._all(reads)
        ends = reached | {place: end for place, (_, end) in plan.spans.items()}
        [ends] = self._all([("rest", ends)])
        self._doing = "comparing"
        self._say(at_once=True)
        verdict, lacking = self._compare(range(plan.buckets))
        self._add_lacking(verdict, lacking, ends)
        verdict.resumed = self._resumed
        verdict.accounted["without_identity"] = self._without_identity
        return verdict, self._topic

    def _compare(self, buckets: Sequence[int]) -> tuple[Verdict, dict[int, Verdict]]:
        """What was found where nothing is missing, and in each bucket in which something is."""
        verdict = Verdict(self._plan.after + 1, self._plan.upto)
        lacking: dict[int, Verdict] = {}
        width = max(1, self._plan.buckets // (8 * len(self._workers)))
        for found in self._all([("compare", some) for some in _ranges(buckets, width)]):
            verdict.merge(found.complete)
            lacking |= found.lacking
        return verdict, lacking

    def _add_lacking(
        self, verdict: Verdict, lacking: dict[int, Verdict], ends: Mapping[Place, int]
    ) -> None:
        """Add what some buckets have to the verdict.

        As long as few events are missing, they get some seconds to be published: the topic is read
        on, and these buckets are compared again.
        """
        arrived = _absent(lacking.values())
        deadline, pause = time.monotonic() + self._plan.asked.wait, 1.0
        while _are_few(lacking) and (left := deadline - time.monotonic()) > 0:
            self._doing = "waiting for missing events"
            self._say(at_once=True)
            if wait([self._outside], min(pause, left)):
                raise _LeftError
            pause *= 2
            known = self._records
            [ends] = self._all([("rest", ends)])
            if self._records == known:
                continue
            complete, lacking = self._compare(sorted(lacking))
            verdict.merge(complete)
            arrived -= _absent([complete])
        for found in lacking.values():
            verdict.merge(found)
        verdict.accounted["arrived"] += arrived - _absent(lacking.values())

    def _open_slices(self) -> tuple[list[Task], float]:
        """What of the store is to be read yet, and how many slices were read already."""
        upto = {n: after for n, (after, _) in enumerate(self._plan.slices)}
        for portion in self._plan.rows().portions():
            number = portion["slice"]
            upto[number] = max(upto[number], portion["upto"])
            self._rows += portion["rows"]
            self._resumed += portion["rows"]
            self._without_identity += portion["without_identity"]
        slices = enumerate(self._plan.slices)
        left: list[Task] = [("store", (n, upto[n], end)) for n, (_, end) in slices if upto[n] < end]
        parts = enumerate(self._plan.slices)
        return left, sum((upto[n] - begin) / max(1, end - begin) for n, (begin, end) in parts)

    def _open_spans(self) -> tuple[Spans, dict[Place, int]]:
        """What of the topic is to be read yet, and how far it was read."""
        reached: dict[Place, int] = {}
        for portion in self._plan.records().portions():
            for name, partition, offset in portion["reached"]:
                reached[name, partition] = max(offset, reached.get((name, partition), 0))
            self._records += portion["read"]
            self._resumed += portion["read"]
            self._add_topic(portion["topic"])
        spans: Spans = {}
        for place, (first, end) in self._plan.spans.items():
            at = max(first, reached.get(place, first))
            self._offsets += at - first
            if at < end:
                spans[place] = at, end
        return spans, reached

    def _add_topic(self, found: Mapping[str, Any]) -> None:
        self._topic.foreign_count += found["foreign_count"]
        known = [*self._topic.foreign, *(Foreign(*one) for one in found["foreign"])]
        self._topic.foreign = known[:20]

    def _all(self, tasks: list[Task]) -> list[Any]:
        """Have all of some tasks done; their results, in no order."""
        results: list[Any] = []
        waiting = list(reversed(tasks))
        while waiting or any(worker.task for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.task is None and self._may_begin(waiting[-1]):
                    worker.task = waiting.pop()
                    worker.pipe.send(worker.task)
            busy = {worker.pipe: worker for worker in self._workers if worker.task}
            ready = wait([*busy, self._outside], _SECONDS_BETWEEN)
            if self._outside in ready:
                raise _LeftError
            for pipe in ready:
                self._take(busy[pipe], results)
            self._say()
        return results

    def _may_begin(self, task: Task) -> bool:
        """Whether not too many workers read the store already."""
        of_store = sum(w.task is not None and w.task[0] == "store" for w in self._workers)
        return task[0] != "store" or of_store < len(self._workers) - _cores() or self._idle_topic()

    def _idle_topic(self) -> bool:
        return not any(w.task is not None and w.task[0] == "topic" for w in self._workers)

    def _take(self, worker: _Worker, results: list[Any]) -> None:
        try:
            what, value = worker.pipe.recv()
        except EOFError:
            worker.process.join(5)
            raise _lost(worker.process.exitcode) from None
        if what == "failed":
            raise value
        if what == "done":
            worker.task = None
            results.append(value)
            return
        for name, amount in value.items():
            if name == "topic":
                self._add_topic(amount)
            else:
                setattr(self, f"_{name}", getattr(self, f"_{name}") + amount)

    def _say(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._said_at < _SECONDS_BETWEEN:
            return
        self._said_at = time.monotonic()
        plan = self._plan
        offsets = sum(end - first for first, end in plan.spans.values())
        parts = (
            0.5 * min(1.0, self._offsets / max(1, offsets)),
            0.4 * min(1.0, self._slices / len(plan.slices)),
            0.1 * min(1.0, self._compared / plan.buckets),
        )
        done = Progress(self._doing, self._rows, self._records, sum(parts), self._resumed)
        self._outside.send(("progress", done))


def _ranges(buckets: Sequence[int], width: int) -> list[range]:
    """Buckets in ascending order as ranges of such that follow one another, none longer."""
    found: list[range] = []
    for number in buckets:
        if found and found[-1].stop == number and len(found[-1]) < width:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _are_few(lacking: Mapping[int, Verdict]) -> bool:
    """Whether anything is missing, and not so much that nobody is about to publish it."""
    return 0 < sum(found.counts["missing"] for found in lacking.values()) <= SECOND_CHECKS


def _absent(verdicts: Iterable[Verdict]) -> int:
    """Rows that are not on the topic, whether that is accounted for or not."""
    return sum(
        v.counts["missing"] + sum(v.accounted[k] for k in ("dead", "diverted", "dropped"))
        for v in verdicts
    )


def _parts(spans: Spans, number: int) -> list[Spans]:
    """Partitions in so many parts of about the same size."""
    parts: list[Spans] = [{} for _ in range(number)]
    sizes = [0] * number
    for place, (first, end) in sorted(spans.items(), key=lambda s: s[1][0] - s[1][1]):
        least = sizes.index(min(sizes))
        parts[least][place] = first, end
        sizes[least] += end - first
    return [part for part in parts if part]
