"""Compares the event table with the topic: everything published, once, in order, unaltered.

Both sides are read once, each in a thread, into a database that spills to disk (`sides`), and
compared there (`comparison`). While few events are missing, the topic is read on for some seconds:
events published meanwhile are not missing.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO, Any, TypeAlias

import pyarrow as pa

from eventpub.config import Config, Read, format_time
from eventpub.errors import ConfigError, StateError, counted
from eventpub.ops.comparison import MOST_LOOKED_UP, Comparison
from eventpub.ops.dead import readable_store
from eventpub.ops.gaps import indexes, pending
from eventpub.ops.sides import (
    KINDS,
    Sides,
    Verdict,
    no_space_is_named,
    spill_folder,
    store_columns,
)
from eventpub.ops.topic import PORTION, TopicReader
from eventpub.sink.reading import Place
from eventpub.sources.base import start_position
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir

_SECONDS_BETWEEN = 0.2

_GRACE = 10_000_000
"""µs that an event may wait beyond `read.delay` and `read.max_wait`."""


OnProgress: TypeAlias = Callable[[str, float], None]
"""Takes what is being done, and which part of all work is done, 0 to 1."""


def verify(  # noqa: PLR0913 (what is compared, and how)
    config: Config,
    *,
    first: int | None = None,
    last: int | None = None,
    differences: Path | None = None,
    wait: float = 10.0,
    on_progress: OnProgress = lambda *_: None,
) -> Verdict:
    """Compare store and topic.

    Args:
        first: compare events created at or after, µs; None: from the publisher's start.
        last: compare events created at or before, µs; None: up to the publisher's position, or to
            the boundary if its state cannot be read.
        differences: file for all differences, one JSON object per line.
        wait: seconds to wait for missing events, if few: a row that is committed late is published
            seconds after it becomes visible.
    """
    store = readable_store(config)
    known = _read_state(config, "progress.json")
    former = dict.fromkeys((*known.get("numbers", ()), known.get("partitions")))
    # an event of an hour that the clocks repeat may have its other time on the topic
    longest = max((back for _, back in store.repeated), default=0)
    since = None if first is None else first - longest
    reader = TopicReader(config.sink, config.app.id, first=since, last=last)
    with (
        nullcontext() if differences is None else _opened(differences) as listed,
        spill_folder() as folder,
        store,
    ):
        after, upto, notes = _compared_range(config, store, first, last)
        spans = reader.spans()
        numbers = *(n for n in former if n not in {None, reader.partitions}), reader.partitions
        with Sides(folder, after, upto) as sides:
            comparison = Comparison(
                sides,
                numbers,
                store.existing,
                late_policy=config.gaps.late,
                clock_changes=store.repeated,
                first_version=config.store.first_version,
                held_since=_held_since(config, store.now()),
                held=partial(_held, config),
            )
            with no_space_is_named():
                verdict = _Run(store, reader, comparison, on_progress).compare(spans, wait)
            if listed is not None:
                _write_differences(listed, sides)
        verdict.notes = notes + verdict.notes
        if last is None:
            progress = _read_state(config, "progress.json")  # its current content
            verdict.behind = behind(store, config.read, progress, verdict.last)
            verdict.notes += _of_other_times(store)
    if reader.truncated:
        verdict.notes.append(
            f"{len(reader.truncated)} partitions of the topic no longer have their first records"
            " (retention): what was published there counts as missing unless --from is later"
        )
    if len(numbers) == 1 and any("partition" in d.note for d in verdict.examples["altered"]):
        verdict.notes.append(
            "records are not in their key's partition: if partitions were added and the"
            " publisher's state was lost since, compare what came later: --from"
        )
    return verdict


def _held_since(config: Config, now: int) -> int:
    """Events created at or after this may wait for a lower version, µs."""
    gaps, read = config.gaps, config.read
    attempts = gaps.backoff_base * ((1 << gaps.max_backoff) - 1)
    return now - attempts - read.delay - read.max_wait - _GRACE


def _held(config: Config, ids: Collection[str]) -> dict[str, int] | None:
    """The first missing version of those aggregates that the publisher holds; None: unknown."""
    state = StateDir(config.app.state_dir)
    if len(ids) > MOST_LOOKED_UP:  # for one request
        return None
    try:
        found, is_answered = pending(config, state, 0, tuple(ids))
    except StateError:  # such as another user's
        return None
    is_here = all((folder / "CURRENT").exists() for folder in indexes(config, state))
    if not (is_answered or is_here or state.is_of_spark()):
        return None
    return {hold.aggregate_id: hold.first_missing for hold in found.holds}


@dataclass
class _Run:
    _store: EventStore
    _reader: TopicReader
    _comparison: Comparison
    _on_progress: OnProgress
    _stop: Event = field(default_factory=Event)
    _rows: int = 0
    _done: dict[str, float] = field(default_factory=lambda: {"store": 0.0, "topic": 0.0})

    def compare(self, spans: Mapping[Place, tuple[int, int]], wait: float) -> Verdict:
        doing = "reading store and topic"
        gc.disable()  # no cycles are made, and looking for them takes a third of the CPU
        try:
            self._beside(doing, self._read_store, lambda: self._read_topic(spans))
        finally:
            gc.enable()
        ends = self._read_on(doing, {place: end for place, (_, end) in spans.items()})
        verdict = self._compared()
        absent = verdict.absent
        deadline, pause = time.monotonic() + wait, 1.0
        while 0 < verdict.counts["missing"] <= MOST_LOOKED_UP:
            left = min(pause, deadline - time.monotonic())
            if left <= 0:
                break
            doing, pause, known = "waiting for missing events", 2 * pause, self._reader.records
            self._beside(doing, partial(self._stop.wait, left))
            ends = self._read_on(doing, ends)
            if self._reader.records > known:
                verdict = self._compared()
        verdict.accounted["arrived"] += absent - verdict.absent
        verdict.accounted["without_identity"] = self._store.without_identity
        return verdict

    def _compared(self) -> Verdict:
        self._beside("comparing", self._comparison.run)
        return self._comparison.verdict

    def _read_store(self) -> None:
        sides = self._comparison.sides
        begin: int | None = None
        portion: list[pa.Table] = []
        for batch in self._store.window(sides.after, sides.upto, None):
            self._check_stopped()
            portion.append(store_columns(batch))
            if sum(map(len, portion)) >= PORTION:
                sides.add("store", portion)
            self._rows += batch.num_rows
            at = batch.column("create_time")[-1].as_py()
            begin = at if begin is None else begin
            self._done["store"] = (at - begin) / max(1, sides.upto - begin)
        sides.add("store", portion)
        self._done["store"] = 1.0

    def _read_topic(self, spans: Mapping[Place, tuple[int, int]]) -> None:
        offsets = sum(end - first for first, end in spans.values())
        for records in self._reader.read(spans, self._check_stopped):
            self._comparison.sides.add("topic", [records])
            self._done["topic"] = min(1.0, self._reader.records / max(1, offsets))
        self._done["topic"] = 1.0

    def _read_on(self, doing: str, ends: Mapping[Place, int]) -> dict[Place, int]:
        spans = self._reader.spans()
        left = {p: (max(first, ends.get(p, first)), end) for p, (first, end) in spans.items()}
        self._beside(doing, lambda: self._read_topic(left))
        return {place: end for place, (_, end) in spans.items()}

    def _beside(self, doing: str, *tasks: Callable[[], object]) -> None:
        self._say(doing)
        with ThreadPoolExecutor(len(tasks)) as threads:
            left = {threads.submit(task) for task in tasks}
            try:
                while left:
                    done, left = wait_for(left, _SECONDS_BETWEEN, FIRST_COMPLETED)
                    for task in done:
                        task.result()
                    self._say(doing)
            except BaseException:
                self._stop.set()
                self._comparison.sides.database.interrupt()
                raise

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise CancelledError  # another thread or the caller failed

    def _say(self, doing: str) -> None:
        done = 0.45 * (self._done["store"] + self._done["topic"])
        read = f"{self._rows:,} rows, {self._reader.records:,} records"
        self._on_progress(f"{doing}: {read}", done)


def _write_differences(listed: IO[str], sides: Sides) -> None:
    if listed.seekable() and not listed.name.startswith("/dev/"):
        listed.truncate(0)
    for kind in KINDS:
        for one in sides.differences(kind):
            line = json.dumps({"kind": kind, **one.to_dict()}, ensure_ascii=False)
            listed.write(line + "\n")


@contextmanager
def _opened(file: Path) -> Iterator[IO[str]]:
    """The file for the differences; an interrupted comparison leaves it unchanged."""
    is_new = not file.exists()
    try:
        with file.open("a", encoding="utf-8") as listed:
            try:
                yield listed
            except BaseException:
                if is_new:
                    file.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(
            "verify.not_writable",
            f"{file} cannot be written: {error.strerror}",
            where="--differences",
            suggestion="name a writable file on a disk with free space",
        ) from error


def _of_other_times(store: EventStore) -> Iterator[str]:
    ahead, rows = store.ahead()
    if rows:
        newest = format_time(store.now() + ahead)
        yield f"not published yet: {counted(rows, 'row')} after the database's now, up to {newest}"
    if never := store.never_read():
        yield (
            f"not read: {counted(never, 'row')} with a create_time before 1970-01-01 00:00:01, or"
            " none (a zero date); eventpub publish ID VERSION publishes one that has a time"
        )


def _read_state(config: Config, name: str) -> dict[str, Any]:
    """A file of the publisher's state; empty if unreadable: other users may compare, too."""
    state = StateDir(config.app.state_dir)
    try:
        return state.read(state.root / name) or {}
    except StateError:
        return {}


def _compared_range(
    config: Config, store: EventStore, first: int | None, last: int | None
) -> tuple[int, int, list[str]]:
    notes: list[str] = []
    start = _read_state(config, "start.json").get("position")
    if first is not None:
        after = first - 1
    elif start is not None:
        after = int(start)
    elif config.read.start != "now":
        after = start_position(config.read, store.now)
    else:
        raise ConfigError(
            "verify.start_unknown",
            "read.start is 'now' and the publisher's state does not say when that was",
            where="app.state_dir",
            suggestion="give --from, or run this where the publisher's app.state_dir is",
        )
    progress = _read_state(config, "progress.json")
    if last is not None:
        upto = last
    elif "position" in progress:
        upto = int(progress["position"])
        if holds := progress.get("holds"):
            notes.append(
                counted(holds, "aggregate is held", "aggregates are held")
                + ": some of their events are not published yet"
            )
    else:
        upto = store.now() - config.read.delay
        lacking = f"no publisher's position in {config.app.state_dir}"
        notes.append(f"{lacking}: compared up to the boundary")
    if upto <= after and last is None and first is not None:
        # nothing was written since, or the publisher is behind; that is checked afterwards
        last = store.now() - config.read.delay
        notes.append("the publisher has not reached any event created since --from")
    if last is not None and last <= after:
        raise ConfigError(
            "verify.empty_range",
            f"the range from {format_time(after + 1)} to {format_time(last)} is empty",
            where="--from, --to",
            suggestion="give a --from that is before --to, and in the past, and a --to after the"
            " publisher's start",
        )
    return after, max(upto, after), notes


def behind(store: EventStore, read: Read, progress: Mapping[str, Any], compared: int) -> float:
    """Age in seconds of the oldest event that is due after `compared`, µs, and the position."""
    if "position" not in progress:
        return 0.0
    after, now = max(int(progress["position"]), compared), store.now()
    due = store.poll(after, 0, 1, at_most=now - read.delay - read.max_wait - _GRACE)
    return 0.0 if due.page_end is None else (now - due.page_end) / 1e6
