"""Comparing the event table with the topic: is everything published, once, in order, unaltered.

Both sides are read once, side by side in processes of their own (`verify_run`), cut down to hashes,
and spread over buckets by aggregate; then bucket after bucket is compared. Memory does not grow
with the number of events, but with the largest aggregate. What must hold: no difference is passed
over, a row that commits while we compare is not taken for one, and a publisher that stands still is
not taken for one that has published everything.

    verify ─▶ verify_run ─ processes ─▶ verify_work ─▶ topic, records   what is on the topic
           │  │                                     ─▶ store            what is in the table
           │  └ verify_plan: what is kept           ─▶ comparison       of what both have in `spill`
           └▶ behind                                                    what is not published yet
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub.admission.model import Shard
from eventpub.config import Config, format_time, parse_time
from eventpub.errors import ConfigError
from eventpub.ops.behind import Behind, measure
from eventpub.ops.records import (
    NO_TIME,
    hash_of_metadata,
    hashes,
)
from eventpub.ops.topic import Topic
from eventpub.words import counted

if TYPE_CHECKING:
    from eventpub.store import EventStore
    from eventpub.store.zones import Zone

SHOWN = 20
"""Differences of a kind that are listed one by one."""

KINDS = ("missing", "repeated", "out_of_order", "altered", "extra")

STORE_FIELDS = {
    "version": np.int64,
    "create_time": np.int64,
    "payload": np.int64,
    "type": np.int64,
    "metadata": np.int64,
}
TOPIC_FIELDS = STORE_FIELDS | {
    "to_version": np.int64,
    "kind": np.int8,
    "partition": np.int32,
    "offset": np.int64,
    "faults": np.int8,
}

_RESIDUES = 1_000_003
"""A prime: what is chosen by it does not depend on partitions and shards."""

_YEAR_3000 = 32_503_680_000_000

Number = npt.NDArray[Any]


@dataclass(frozen=True)
class Difference:
    """One event about which store and topic do not agree; times in µs.

    Args:
        version: None: of a record that has none that can be read.
        partition: where it is on the topic; None where it is not.
        note: what exactly is wrong.
    """

    aggregate_id: str
    version: int | None
    create_time: int
    partition: int | None = None
    offset: int | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """Aggregate and version, as far as there are any."""
        if self.version is None:
            return self.aggregate_id or "a record without a key"
        return f"{self.aggregate_id}/{self.version}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        time = None if self.create_time == NO_TIME else format_time(self.create_time)
        return vars(self) | {"create_time": time}


@dataclass(frozen=True)
class Sample:
    """A share of the aggregates, chosen by hash; of each of these every row and every record.

    Args:
        one_in: one aggregate in so many is compared.
    """

    one_in: int

    @property
    def share(self) -> float:
        """The probability of any aggregate to be compared."""
        return -(-_RESIDUES // self.one_in) / _RESIDUES

    @property
    def may_have_missed(self) -> int:
        """With this many faulty aggregates or fewer, it may be (by more than 5%) that none was
        compared; of more, at least one is with a confidence of 95%."""
        return math.floor(math.log(0.05) / math.log1p(-self.share))

    def chooses(self, key: bytes) -> bool:
        """Whether an aggregate is compared, by its key's CRC32, as the store computes it, too."""
        return zlib.crc32(key) % _RESIDUES % self.one_in == 0

    @property
    def shard(self) -> Shard:
        """The same aggregates as a condition of the store's."""
        return Shard(0, self.one_in, _RESIDUES)

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "one_in": self.one_in,
            "share": round(self.share, 6),
            "may_have_missed": self.may_have_missed,
            "confidence": 0.95,
        }


@dataclass
class Verdict:
    """What the comparison found.

    Attributes:
        first, last: the range of `create_time` that was compared, both included, µs.
        events: rows of the store in the range.
        records: records of events on the topic in the range, those marked late included.
        counts: differences by kind, see `KINDS`.
        examples: the earliest of each kind.
        accounted: rows that are not on the topic for a recorded reason, and records exempt from
            the order: "late", "dead", "diverted", "dropped" (late events, by configuration),
            "arrived" (committed, or published, while we looked).
        skips: gaps that were given up, on the topic of gaps.
        notes: what a reader of the result should know.
        resumed: rows and records that an interrupted comparison had read already.
        sample: None where all aggregates were compared.
        behind: what the publisher has not published yet; None where an end of the range was asked
            for, or there is no publisher's state.
        keeps: the most examples of each kind; None: all differences are kept.
    """

    first: int
    last: int
    events: int = 0
    records: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    examples: dict[str, list[Difference]] = field(default_factory=lambda: {k: [] for k in KINDS})
    accounted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("late", "dead", "diverted", "dropped", "arrived"), 0)
    )
    skips: int = 0
    notes: list[str] = field(default_factory=list)
    resumed: int = 0
    sample: Sample | None = None
    behind: Behind | None = None
    keeps: int | None = SHOWN

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs in the range."""
        return not any(self.counts.values())

    @property
    def is_behind(self) -> bool:
        """Whether events after the range should be published by now."""
        return self.behind is not None and self.behind.events > 0

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and the publisher is not behind."""
        return self.is_equal and not self.is_behind

    def found(self, kind: str, count: int, examples: Sequence[Difference]) -> None:
        """Count differences; the earliest stay as examples."""
        self.counts[kind] += count
        if examples:
            known = [*self.examples[kind], *examples]
            known.sort(key=lambda d: (d.create_time, d.aggregate_id, d.version or 0))
            self.examples[kind] = known[: self.keeps]

    def merge(self, other: Verdict) -> None:
        """Add what was found of other aggregates."""
        self.events += other.events
        self.records += other.records
        self.skips += other.skips
        for kind in KINDS:
            self.found(kind, other.counts[kind], other.examples[kind])
        for name, count in other.accounted.items():
            self.accounted[name] += count

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "from": format_time(self.first) if self.first > 0 else None,
            "to": format_time(self.last),
            "events": self.events,
            "records": self.records,
            **self.counts,
            "accounted": self.accounted,
            "skips": self.skips,
            "examples": {k: [d.to_dict() for d in v] for k, v in self.examples.items()},
            "notes": self.notes,
            "resumed": self.resumed,
            "sample": None if self.sample is None else self.sample.to_dict(),
            "behind": None if self.behind is None else self.behind.to_dict(),
        }


@dataclass(frozen=True)
class Progress:
    """How far a comparison is.

    Args:
        doing: what is being done now, in words.
        rows: of the store, read so far.
        records: of the topic.
        done: the part of the whole work, 0 to 1.
        resumed: rows and records that an interrupted comparison had read already.
    """

    doing: str
    rows: int
    records: int
    done: float
    resumed: int


def verify(  # noqa: PLR0913 (what is compared, and how)
    config: Config,
    *,
    first: int | None = None,
    last: int | None = None,
    sample: int | None = None,
    restart: bool = False,
    differences: Path | None = None,
    former_partitions: Sequence[int] = (),
    patience: float = 15.0,
    wait: float = 10.0,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Verdict:
    """Compare store and topic; goes on where the same comparison was interrupted.

    Args:
        first: compare events created at or after, µs; None: from where the publisher started.
        last: compare events created at or before, µs; None: up to where the publisher is, or to
            the boundary where its state cannot be read.
        sample: compare one aggregate in so many; None: all.
        restart: begin anew, whatever was interrupted.
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
    from eventpub.ops.verify_plan import Asked
    from eventpub.ops.verify_run import run
    from eventpub.store import EventStore

    layout = EventStore.discover(config.store)
    # what a replica has not applied yet is shown as what it is
    readable = config.store.model_copy(update={"allow_replica": True})
    config = config.model_copy(update={"store": readable})
    first, last, widened = _whole_hours(config, layout.zone, first, last)

    def find_range() -> tuple[int, int, list[str]]:
        with EventStore(config.store, layout) as store:
            after, upto, notes = _range(config, store, first, last)
        return after, upto, [*widened, *notes]

    progress = _state(config, "progress.json")
    asked = Asked(
        config,
        layout,
        first,
        last,
        None if sample is None else Sample(sample),
        restart,
        patience,
        known=repr([progress.get("topics"), progress.get("server")]),
        wait=wait,
        lists_all=differences is not None,
        former_partitions=tuple(former_partitions or progress.get("numbers", ())),
    )
    with _written(differences) as listed:
        verdict, topic, read = run(asked, find_range, on_progress, listed)
        if listed is not None:
            listed.writelines(line_of("extra", one) for one in _foreign(topic))
    if last is None:
        with EventStore(config.store, layout) as store:
            progress = _state(config, "progress.json")  # as it is by now
            verdict.behind = measure(store, config.read, progress, verdict.last)
            verdict.notes += _of_other_times(store)
    note_topic(topic, verdict)
    if not asked.former_partitions and any(
        "partition" in d.note for d in verdict.examples["altered"]
    ):
        verdict.notes.append(
            "records stand in another partition than their key's: if partitions were added, and the"
            " publisher's state was lost since, --former-partitions says how many there were"
        )
    if layout.zone is None and (twice := read - verdict.events):
        verdict.notes.append(f"{twice} rows repeat an (aggregate_id, version) within the store")
    return verdict


def _of_other_times(store: EventStore) -> Iterator[str]:
    """What is in the store and cannot be on the topic, or not yet."""
    ahead, rows = store.ahead()
    if rows:
        newest = format_time(store.now() + ahead)
        yield f"not published yet: {counted(rows, 'row')} after the database's now, up to {newest}"
    if never := store.never_read():
        yield (
            f"never published: {counted(never, 'row')} with a create_time before 1970-01-01"
            " 00:00:01, or none that can be read (a zero date)"
        )


def _foreign(topic: Topic) -> list[Difference]:
    found = []
    for f in topic.foreign:
        note = f"{f.topic}: {f.reason}"
        if 0 < f.timestamp < _YEAR_3000:  # a record's writer may set any
            note += f"; its timestamp is {format_time(f.timestamp * 1000)}"
        found.append(Difference(f.key, None, NO_TIME, f.partition, f.offset, note))
    return found


def line_of(kind: str, difference: Difference) -> str:
    """A difference as a line of JSON."""
    return json.dumps({"kind": kind, **difference.to_dict()}, ensure_ascii=False) + "\n"


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
        raise not_writable(str(file), error) from error


def _is_ours(file: Path) -> bool:
    """Whether stdout or stderr goes there."""
    about = file.stat()
    return any(os.path.samestat(about, os.fstat(descriptor)) for descriptor in (1, 2))


def not_writable(file: str, error: OSError) -> ConfigError:
    """The error of the file of differences."""
    return ConfigError(
        "verify.not_writable",
        f"{file} cannot be written: {error.strerror}",
        where="--differences",
        suggestion="name a file in a folder that exists and that you may write to, on a disk with"
        " space",
    )


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
        notes.append("nothing that the publisher has come to was created since --from")
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


# --- reading


def store_columns(batch: pa.RecordBatch) -> tuple[pa.Array[Any], dict[str, Number]]:
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
