"""Comparing the event table with the topic: is everything published, once, in order, unaltered.

Both sides are read once, side by side in processes of their own (`verify_run`), cut down to hashes,
and spread over buckets by aggregate; then bucket after bucket is compared. Memory does not grow
with the number of events, but with the largest aggregate. What must hold: no difference is passed
over, a row that commits while we compare is not taken for one, and a publisher that stands still is
not taken for one that has published everything.

    verify ─▶ verify_run ─ processes ─▶ verify_work ─▶ topic, records   what is on the topic
           │                                        ─▶ store            what is in the table
           │                                        ─▶ comparison       of what both have in `spill`
           └▶ behind                                ─▶ verdict          what was found
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eventpub.config import Config, format_time, parse_time
from eventpub.errors import ConfigError
from eventpub.ops import verify_run
from eventpub.ops.behind import GRACE, measure
from eventpub.ops.records import NO_TIME
from eventpub.ops.spill import bucket_count
from eventpub.ops.topic import Topic
from eventpub.ops.verdict import Difference, Progress, Sample, Verdict, line_of
from eventpub.ops.verify_work import Job, topic_reader
from eventpub.sources.mysql import EventStore
from eventpub.words import counted

if TYPE_CHECKING:
    from eventpub.sources.mysql.zones import Zone

_YEAR_3000 = 32_503_680_000_000

_SLICES = 8
"""Parts of the store's range for each worker that reads it."""


def verify(  # noqa: PLR0913 (what is compared, and how)
    config: Config,
    *,
    first: int | None = None,
    last: int | None = None,
    sample: int | None = None,
    differences: Path | None = None,
    former_partitions: Sequence[int] = (),
    patience: float = 15.0,
    wait: float = 10.0,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Verdict:
    """Compare store and topic.

    Args:
        first: compare events created at or after, µs; None: from where the publisher started.
        last: compare events created at or before, µs; None: up to where the publisher is, or to
            the boundary where its state cannot be read.
        sample: compare one aggregate in so many; None: all.
        differences: a file that gets all differences, one JSON object a line, in no order; of
            records that eventpub cannot have written, the first ones.
        former_partitions: how many the topic had before, the first number first; none: as the
            publisher's state says.
        patience: seconds to wait for open transactions on the topic to end.
        wait: seconds to wait for missing events, where they are few: a row that is committed late
            is published seconds after it can be read.
        on_progress: called some times a second.

    Raises:
        ConfigError: there is nothing between `first` and `last`; the file cannot be written.
        StoreError: the store cannot be read.
        SinkError: the topic cannot be read to its end.
        StateError: there is no disk space for what is compared, or a process was lost.
    """
    layout = EventStore.discover(config.store)
    # what a replica has not applied yet is shown as what it is
    readable = config.store.model_copy(update={"allow_replica": True})
    config = config.model_copy(update={"store": readable})
    first, last, widened = _whole_hours(config, layout.zone, first, last)
    chosen = None if sample is None else Sample(sample)
    progress = _state(config, "progress.json")
    former = tuple(former_partitions or progress.get("numbers", ()))
    with _written(differences) as listed, verify_run.host() as (folder, compare):
        with EventStore(config.store, layout) as store:
            after, upto, notes = _range(config, store, first, last)
            slices = _slices(store, after, upto)
            held_since = store.now() - _longest_hold(config)
        reader = topic_reader(config, patience, first, last)
        spans = reader.spans(reader.places())
        size = sum(end - begin for begin, end in spans.values()) // (sample or 1)
        job = Job(
            config=config,
            layout=layout,
            first=first,
            last=last,
            sample=chosen,
            patience=patience,
            wait=wait,
            lists_all=listed is not None,
            folder=folder,
            held_since=held_since,
            after=after,
            upto=upto,
            buckets=bucket_count(size),
            slices=slices,
            spans=spans,
            numbers=(*(n for n in former if n != reader.topic.partitions), reader.topic.partitions),
        )
        verdict, topic = compare(job, on_progress)
        topic.truncated = reader.topic.truncated
        if listed is not None:
            for bucket in range(job.buckets):
                listed.write(job.differences(bucket).read_text(encoding="utf-8"))
            listed.writelines(line_of("extra", one) for one in _foreign(topic))
    verdict.notes = [*widened, *notes]
    verdict.sample = chosen
    if last is None:
        with EventStore(config.store, layout) as store:
            progress = _state(config, "progress.json")  # as it is by now
            verdict.behind = measure(store, config.read, progress, verdict.last)
            verdict.notes += _of_other_times(store)
    note_topic(topic, verdict)
    if not former and any("partition" in d.note for d in verdict.examples["altered"]):
        verdict.notes.append(
            "records are not in their key's partition: if partitions were added and the"
            " publisher's state was lost since, give the earlier count with --former-partitions"
        )
    return verdict


def _of_other_times(store: EventStore) -> Iterator[str]:
    """What is in the store and cannot be on the topic, or not yet."""
    ahead, rows = store.ahead()
    if rows:
        newest = format_time(store.now() + ahead)
        yield f"not published yet: {counted(rows, 'row')} after the database's now, up to {newest}"
    if never := store.never_read():
        yield (
            f"not read: {counted(never, 'row')} with a create_time before 1970-01-01 00:00:01, or"
            " none (a zero date); eventpub publish ID publishes those that have one"
        )


def _foreign(topic: Topic) -> list[Difference]:
    found = []
    for f in topic.foreign:
        note = f"{f.topic}: {f.reason}"
        if 0 < f.timestamp < _YEAR_3000:  # a record's writer may set any
            note += f"; its timestamp is {format_time(f.timestamp * 1000)}"
        found.append(Difference(f.key, None, NO_TIME, f.partition, f.offset, note))
    return found


@contextmanager
def _written(file: Path | None) -> Iterator[IO[str] | None]:
    """The file, open; under its name only once the comparison has come to its end.

    What is no ordinary file, such as /dev/stdout, is written to as it is.
    """
    if file is None:
        yield None
        return
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if file.exists() and (not file.is_file() or _is_ours(file)):
            with file.open("a", encoding="utf-8") as listed:
                yield listed
            return
        file = file.resolve()  # the file behind a link, not the link
        unfinished = file.with_name(f"{file.name}.part")
        try:
            with unfinished.open("w", encoding="utf-8") as listed:
                yield listed
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            "verify.not_writable",
            f"{file} cannot be written: {error.strerror}",
            where="--differences",
            suggestion="name a file in a folder that exists and that you may write to, on a disk"
            " with space",
        ) from error


def _is_ours(file: Path) -> bool:
    """Whether stdout or stderr goes there."""
    about = file.stat()
    return any(os.path.samestat(about, os.fstat(descriptor)) for descriptor in (1, 2))


def note_topic(topic: Topic, verdict: Verdict) -> None:
    """What can be said of the topic alone: what nobody of us has written, and what is gone."""
    if topic.foreign_count:
        verdict.found(
            "extra",
            topic.foreign_count,
            _foreign(topic),
        )
    if topic.truncated:
        verdict.notes.append(
            f"{len(topic.truncated)} partitions of the topic no longer have their first records"
            " (retention): what was published there counts as missing unless --from is later"
        )


# --- the range


def _whole_hours(
    config: Config, zone: Zone | None, first: int | None, last: int | None
) -> tuple[int | None, int | None, list[str]]:
    """A range that neither begins nor ends within an hour that is lived twice, and notes about it.

    The table cannot tell which of two instants a row of it is of, so what lies on one side of a
    bound within it cannot be compared. It never becomes wider than what the publisher has done.
    """
    if zone is None or (first is not None and last is not None and last < first):
        return first, last, []
    notes: list[str] = []
    if first is not None and (hours := zone.lived_twice(first)):
        start = _start(config)
        begin = min(first, max(hours[0], 0 if start is None else start + 1))
        notes += _widened("--from", "from", first, begin)
        first = begin
    if last is not None and (hours := zone.lived_twice(last)):
        position = int(_state(config, "progress.json").get("position", last))
        end = max(last, min(hours[1] - 1, position))
        notes += _widened("--to", "up to", last, end)
        last = end
    return first, last, notes


def _widened(option: str, direction: str, asked: int, bound: int) -> list[str]:
    if bound == asked:
        return []
    when = format_time(bound)
    return [f"{option} lies within an hour that the clocks repeat: compared {direction} {when}"]


def _start(config: Config) -> int | None:
    """The position at which the publisher began; None where that is not known."""
    start = _state(config, "start.json").get("position")
    if start is not None:
        return int(start)
    if config.read.start == "now":
        return None
    return 0 if config.read.start == "beginning" else parse_time(config.read.start)


def _range(
    config: Config, store: EventStore, first: int | None, last: int | None
) -> tuple[int, int, list[str]]:
    notes: list[str] = []
    if first is not None:
        after = first - 1
    elif (start := _start(config)) is not None:
        after = start
    else:
        raise ConfigError(
            "verify.start_unknown",
            "read.start is 'now' and the publisher's state does not say when that was",
            where="app.state_dir",
            suggestion="give --from, or run this where the publisher's app.state_dir is",
        )
    progress = _state(config, "progress.json")
    if last is not None:
        upto = last
    elif "position" in progress:
        upto = int(progress["position"])
        if holds := progress.get("holds"):
            notes.append(f"{holds} aggregates are held: their events are not published yet")
    else:
        upto = store.now() - config.read.delay
        is_there = os.path.exists(config.app.state_dir / "progress.json")
        lacking = "no state that can be read" if is_there else "no publisher's state"
        notes.append(f"{lacking} in {config.app.state_dir}: compared up to the boundary")
    if upto <= after and last is None and first is not None:
        # nobody has written since, or the publisher is behind, which is found afterwards
        last = store.now() - config.read.delay
        notes.append("the publisher has not reached any event created since --from")
    if last is not None and last <= after:
        raise ConfigError(
            "verify.empty_range",
            f"nothing lies between {format_time(after + 1)} and {format_time(last)}",
            where="--from, --to",
            suggestion="give a --from that is before --to, and in the past, and a --to after the"
            " publisher's start",
        )
    return after, max(upto, after), notes


def _state(config: Config, name: str) -> dict[str, Any]:
    """One of the publisher's own notes; empty where there is none that can be read."""
    try:
        data = json.loads((config.app.state_dir / name).read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _longest_hold(config: Config) -> int:
    """Age up to which an event may wait for a version below it, µs."""
    gaps, read = config.gaps, config.read
    attempts = gaps.backoff_base * ((1 << gaps.max_backoff) - 1)
    return attempts + read.delay + read.max_wait + GRACE


def _slices(store: EventStore, after: int, upto: int) -> list[tuple[int, int]]:
    """The store's range in parts of equal time, from its first row on."""
    poll = store.poll(after, 0, 1)
    if poll.page_end is None or poll.page_end >= upto:
        return [(after, upto)]
    first = poll.page_end - 1
    number = _SLICES * verify_run.store_workers()
    bounds = [after, *(first + (upto - first) * n // number for n in range(1, number)), upto]
    return [(a, b) for a, b in pairwise(bounds) if b > a]
