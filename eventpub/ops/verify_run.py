"""The processes of a comparison: some read the topic, some the store, then all compare.

    verify ── starts ──▶ host ── forks ──▶ workers: a part of the topic, of the store, some buckets
           ◀─ progress, verdict ─┘  ◀─ progress, results ─┘

The host is a process of its own, so that it forks before it has a thread; all workers are its
forks, so that the hashes of all are the same. What must hold: the end of the topic that is compared
is one that was asked for after the store was read; so a row that was committed and published
meanwhile is never taken for missing. Nor is one that was committed meanwhile and is published
seconds later, as the recount does: the topic's end is asked for again while anything is missing.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from eventpub.errors import StateError
from eventpub.ops.comparison import MOST_LOOKED_UP
from eventpub.ops.records import Place
from eventpub.ops.topic import Topic
from eventpub.ops.verdict import Progress, Verdict
from eventpub.ops.verify_work import Job, Spans, TopicPart, portable, work

_MOST_WORKERS = 8
_SECONDS_BETWEEN = 0.2
_OLD = 3600.0
"""Seconds after which a folder is looked at that may be of a comparison that was killed."""

_START = "import sys; from eventpub.ops.verify_run import main; sys.exit(main(sys.argv[1:]))"


def store_workers() -> int:
    """How many processes read the store at a time."""
    return max(1, _cores() // 2)


def _cores() -> int:
    # macOS does not say which ones are ours
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST_WORKERS, own or 1))


# --- the host, seen from outside


Compare = Callable[[Job, Callable[[Progress], None]], tuple[Verdict, Topic]]
"""Compares: the verdict, and what was found on the topic beside events."""


@contextmanager
def host() -> Iterator[tuple[Path, Compare]]:
    """A folder for what is read, and a host that starts; both end with the block."""
    with _folder() as (path, lock), _process(lock) as compare:
        yield path, compare


@contextmanager
def _folder() -> Iterator[tuple[Path, int]]:
    """A folder, and a lock on it; what comparisons that were killed have left is removed."""
    for former in Path(tempfile.gettempdir()).glob("eventpub-verify-*"):
        with suppress(OSError):
            _remove_left(former)
    try:
        made = tempfile.TemporaryDirectory(prefix="eventpub-verify-", ignore_cleanup_errors=True)
        lock = os.open(Path(made.name) / "new", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _no_space(tempfile.gettempdir(), error) from error
    with made as name:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            (Path(name) / "new").rename(Path(name) / "lock")
        try:
            yield Path(name), lock
        finally:
            os.close(lock)


def _remove_left(folder: Path) -> None:
    about = folder.lstat()
    if about.st_uid != os.geteuid() or time.time() - about.st_mtime < _OLD:
        return
    lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its processes hold it
        shutil.rmtree(folder)
    finally:
        os.close(lock)


@contextmanager
def _process(lock: int) -> Iterator[Compare]:
    ours, theirs = Pipe()
    environment = os.environ | {
        "MALLOC_ARENA_MAX": "2",  # librdkafka's threads would have one each, mostly empty
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _START, str(theirs.fileno())],
        pass_fds=[theirs.fileno(), lock],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,  # nothing but the answer may stand on ours
        start_new_session=True,  # Ctrl-C is for us: it ends by our leaving
    )
    theirs.close()

    def compare(job: Job, on_progress: Callable[[Progress], None]) -> tuple[Verdict, Topic]:
        try:
            ours.send(job)
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
        yield compare
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
        suggestion="run it again; if the system killed it for lack of memory,"
        " its log (`dmesg`) says so"
        if status == -9
        else "run it again; what the process wrote last is on stderr",
        retriable=True,
    )


def _no_space(folder: str, error: OSError) -> StateError:
    return StateError(
        "verify.no_space",
        f"the rows to compare cannot be kept: {error.strerror}",
        where=folder,
        suggestion="free about 150 bytes an event there, or set TMPDIR to a larger disk",
    )


# --- the host


def main(arguments: Sequence[str]) -> int:
    """The host: takes a job, says how far it is, and gives the result."""
    outside = Connection(int(arguments[0]))
    try:
        job: Job = outside.recv()
    except (EOFError, ConnectionError):
        return 1
    gc.freeze()  # so that workers share it
    host = _Host(job, outside)
    try:
        outside.send(("result", host.run()))
    except (ConnectionError, _LeftError):  # the caller has left
        host.end()
        shutil.rmtree(job.folder, ignore_errors=True)
        return 1
    except Exception as error:
        if isinstance(error, OSError):
            error = _no_space(str(job.folder), error)
        outside.send(("failed", portable(error)))
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

    def __init__(self, job: Job, outside: Any) -> None:
        self._job, self._outside = job, outside
        self._workers = [self._fork() for _ in range(_cores() + store_workers())]
        counted = ("rows", "without_identity", "records", "offsets", "slices", "compared")
        self._done = dict.fromkeys(counted, 0.0)
        self._topic = Topic(job.numbers[-1])
        self._said_at = 0.0
        self._doing = "reading store and topic"

    def _fork(self) -> _Worker:
        ours, theirs = Pipe()
        process = get_context("fork").Process(
            target=work, args=(self._job, theirs, ours), daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def end(self) -> None:
        """End the workers, whatever they do."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(5)

    def run(self) -> tuple[Verdict, Topic]:
        job = self._job
        reads: list[Task] = [("topic", part) for part in _parts(job.spans, _cores())]
        reads += [("store", bounds) for bounds in job.slices]
        for part in self._all(reads):
            if part is not None:
                self._add_topic(part)
        ends = self._read_rest({place: end for place, (_, end) in job.spans.items()})
        self._doing = "comparing"
        self._say(at_once=True)
        verdict, lacking = self._compare(range(job.buckets))
        self._add_lacking(verdict, lacking, ends)
        verdict.accounted["without_identity"] = int(self._done["without_identity"])
        return verdict, self._topic

    def _read_rest(self, ends: Mapping[Place, int]) -> dict[Place, int]:
        """Read what stands on the topic behind some ends; its ends now."""
        [(part, now)] = self._all([("rest", ends)])
        self._add_topic(part)
        found: dict[Place, int] = now
        return found

    def _compare(self, buckets: Sequence[int]) -> tuple[Verdict, dict[int, Verdict]]:
        """What was found where nothing is missing, and in each bucket in which something is."""
        verdict = Verdict(self._job.after + 1, self._job.upto)
        lacking: dict[int, Verdict] = {}
        width = max(1, self._job.buckets // (8 * len(self._workers)))
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
        deadline, pause = time.monotonic() + self._job.wait, 1.0
        while _are_few(lacking) and (left := deadline - time.monotonic()) > 0:
            self._doing = "waiting for missing events"
            self._say(at_once=True)
            if wait([self._outside], min(pause, left)):
                raise _LeftError
            pause *= 2
            known = self._done["records"]
            ends = self._read_rest(ends)
            if self._done["records"] == known:
                continue
            complete, lacking = self._compare(sorted(lacking))
            verdict.merge(complete)
            arrived -= _absent([complete])
        for found in lacking.values():
            verdict.merge(found)
        verdict.accounted["arrived"] += arrived - _absent(lacking.values())

    def _add_topic(self, part: TopicPart) -> None:
        self._topic.foreign_count += part.foreign_count
        self._topic.foreign = [*self._topic.foreign, *part.foreign][:20]

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
            self._done[name] += amount

    def _say(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._said_at < _SECONDS_BETWEEN:
            return
        self._said_at = time.monotonic()
        job, done = self._job, self._done
        offsets = sum(end - first for first, end in job.spans.values())
        parts = (
            0.5 * min(1.0, done["offsets"] / max(1, offsets)),
            0.4 * min(1.0, done["slices"] / len(job.slices)),
            0.1 * min(1.0, done["compared"] / job.buckets),
        )
        said = Progress(self._doing, int(done["rows"]), int(done["records"]), sum(parts))
        self._outside.send(("progress", said))


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
    return 0 < sum(found.counts["missing"] for found in lacking.values()) <= MOST_LOOKED_UP


def _absent(verdicts: Iterable[Verdict]) -> int:
    """Rows that are not on the topic, whether that is accounted for or not."""
    return sum(
        v.counts["missing"] + sum(v.accounted[k] for k in ("dead", "diverted", "dropped"))
        for v in verdicts
    )


def _parts(spans: Spans, number: int) -> list[Spans]:
    """Partitions in so many parts of about the same size."""
    parts: list[dict[Place, tuple[int, int]]] = [{} for _ in range(number)]
    sizes = [0] * number
    for place, (first, end) in sorted(spans.items(), key=lambda s: s[1][0] - s[1][1]):
        least = sizes.index(min(sizes))
        parts[least][place] = first, end
        sizes[least] += end - first
    return [part for part in parts if part]
