"""Dead letters: see them, and have one published after all; and rows that were never published.

They are read from `<topic>.dead`. To publish a row is the running publisher's work, since nobody
else writes its partitions: it is asked, and told how far the topic was searched for it, so that
what was published since the dead letter, or is asked for twice, is published once.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from eventpub.admission.rules import CONFLICT
from eventpub.channel import Request
from eventpub.config import Config, format_time
from eventpub.ops.asking import ask_shards
from eventpub.sink import records
from eventpub.sink.folded import time_of
from eventpub.sink.reading import Message, Place, offsets_at, read_committed
from eventpub.sink.topics import list_offsets, partition_counts
from eventpub.state import StateDir
from eventpub.store import EventStore

OF_ANOTHER = CONFLICT
"""Code of rows under whose version another row was published."""
_FIRST_BYTES = 512
_MOST_ROWS = 1_000
_ABOVE_ALL = 2**63 - 1
_SHOWN = (
    "aggregate_id", "version", "reason", "payload_bytes", "partition", "offset", "in_store",
    "is_searched", "is_last",
)  # fmt: skip
Key = tuple[str, int]
"""Aggregate and version."""
_Event = tuple[str | int | None, ...]
"""The same, and time and contents where these tell rows of one version apart."""


@dataclass(frozen=True)
class Letter:
    """A record of `<topic>.dead`.

    Attributes:
        aggregate_id, version: of the row; None: it has none that can be used.
        reason: why it was refused; begins with a code.
        partition, offset: where it is.
        timestamp: of the record, ms.
        headers: all of them, as text.
        payload_bytes: size of the row's payload; None: it is NULL.
        first_bytes: the first of the payload, as far as the letter has it.
        in_store: whether the row is still in the store; None: not asked.
        published: where it was published since; None: it was not, or nobody knows.
        is_searched: whether the topic was searched for it to its end.
        is_last: whether no later letter is of the same row.
    """

    aggregate_id: str | None
    version: int | None
    reason: str
    partition: int
    offset: int
    timestamp: int
    headers: dict[str, str]
    payload_bytes: int | None
    first_bytes: bytes
    in_store: bool | None = None
    published: tuple[int, int] | None = None
    is_searched: bool = False
    is_last: bool = True

    @property
    def key(self) -> Key | None:
        """Aggregate and version, where it has both."""
        if self.aggregate_id is None or self.version is None:
            return None
        return self.aggregate_id, self.version

    @property
    def event(self) -> _Event:
        """Tells its row from others of its version; one that a retry may change has its key."""
        if self.key is None:
            return self.partition, self.offset
        names = () if self.reason.startswith(records.REFUSED) else (records.TIME, records.CONTENT)
        return self.aggregate_id, self.version, *(self.headers.get(name) for name in names)

    def to_dict(self) -> dict[str, Any]:
        """As `dead list` and the dashboard show it; JSON-serializable."""
        at = self.published
        published = None if at is None else {"partition": at[0], "offset": at[1]}
        created = self.headers.get(records.TIME) or format_time(self.timestamp * 1000)
        shown = {name: getattr(self, name) for name in _SHOWN}
        return shown | {"created": created, "published": published}


@dataclass(frozen=True)
class Letters:
    """What was found.

    Attributes:
        count: how many dead letters there are.
        rows: of how many rows; each letter without aggregate or version counts as one.
        newest: those created last, the newest first.
        is_whole: whether their topic was read to its end.
    """

    count: int
    rows: int
    newest: list[Letter]
    is_whole: bool


@dataclass(frozen=True)
class Retried:
    """What came of a retry.

    Attributes:
        outcome: "published", "published before", "no dead letter", "not in the store",
            "refused again", "not running", "no answer", and others that say why not.
        letter: the newest of this row; None: there is none.
    """

    outcome: str
    letter: Letter | None = None

    @property
    def is_done(self) -> bool:
        """Whether the event is on the topic."""
        return self.outcome in {"published", "published before"}


@dataclass(frozen=True)
class Unpublished:
    """Rows of an aggregate that are not on the topic.

    Attributes:
        outcome: why none may be published, as of `Retried`; "": they may.
        versions: ascending.
        searched: by partition of the topic, up to which offset it has none of them.
    """

    outcome: str
    versions: tuple[int, ...] = ()
    searched: tuple[int, ...] = ()


def find(
    config: Config,
    *,
    only: Key | None = None,
    limit: int = 50,
    timeout: float = 60.0,
    ask_store: bool = True,
) -> Letters:
    """The dead letters, with what became of their rows.

    Args:
        only: those of one row.
        limit: the newest so many.
        timeout: seconds for reading the topics.
        ask_store: whether to look up which rows are still there.

    Raises:
        StoreError, SinkError: the store or the topics cannot be read.
    """
    until = time.monotonic() + timeout
    found = _read(config, only, limit, until)
    wanted = {letter.key for letter in found.newest if letter.key is not None}
    if not wanted:
        return found
    there: Collection[Key] | None = None
    if ask_store:
        with readable_store(config) as store:
            there = store.existing(sorted(wanted))
    since = min(_since(letter) for letter in found.newest if letter.key is not None)
    search = _search(config, wanted, since, until)
    newest = [
        letter
        if letter.key is None
        else replace(
            letter,
            in_store=None if there is None else letter.key in there,
            published=search.found.get(letter.event),
            is_searched=search.is_whole or letter.event in search.found,
        )
        for letter in found.newest
    ]
    return replace(found, newest=newest)


def retry(config: Config, aggregate_id: str, version: int, *, timeout: float = 60.0) -> Retried:
    """Have the row of a dead letter published, as a late event.

    Args:
        timeout: seconds for searching the topic, and for the publisher's answer.

    Raises:
        SinkError, StateError: the topics or the state cannot be read.
    """
    until = time.monotonic() + timeout
    key = (aggregate_id, version)
    found = _read(config, key, 1, until)
    if not found.newest:
        return Retried("no dead letter" if found.is_whole else "not searched")
    letter = found.newest[0]
    if letter.reason.startswith(OF_ANOTHER):
        return Retried("another event has its version", letter)
    if version < config.store.first_version:
        return Retried("below the first version", letter)
    if config.gaps.late != "publish":
        return Retried("late events are not published", letter)
    if not StateDir(config.app.state_dir).is_running():
        return Retried("not running", letter)
    # its time may have been changed since: a retry before this one has published it with that
    rows = unpublished(config, *key, since=_since(letter), timeout=until - time.monotonic())
    outcome = rows.outcome or publish(config, aggregate_id, rows, timeout=timeout)[1]
    if outcome == "refused again":  # which says why now, perhaps for another limit than before
        letter = next(iter(_read(config, key, 1, until + timeout).newest), letter)
    return Retried(outcome, letter)


def unpublished(
    config: Config,
    aggregate_id: str,
    version: int | None,
    *,
    since: int | None = None,
    timeout: float = 60.0,
) -> Unpublished:
    """Which of an aggregate's rows are not on the topic.

    Args:
        version: this one alone; None: of the last 1,000.
        since: there are no records of earlier timestamps, ms; None: than when they were created,
            as far as retention has left the topic.
        timeout: seconds for searching the topic.

    Raises:
        StoreError, SinkError: the store or the topic cannot be read.
    """
    bound, most = (_ABOVE_ALL, _MOST_ROWS) if version is None else (version + 1, 1)
    with readable_store(config) as store:
        keys = [r for b in store.below([(aggregate_id, bound)], most) for r in b.to_pylist()]
    rows = {row["version"]: row["create_time"] for row in keys if version in {None, row["version"]}}
    if not rows:
        return Unpublished("not in the store")
    first = max(0, min([*rows.values(), *([] if since is None else [since * 1000])]) // 1000)
    wanted = {(aggregate_id, number) for number in rows}
    search = _search(config, wanted, first, time.monotonic() + timeout)
    left = tuple(sorted(number for _, number in wanted - search.found.keys()))
    if not left:
        return Unpublished("published before")
    if not search.is_whole:
        return Unpublished("not searched")
    is_unknown = search.is_cut and since is None
    return Unpublished("not known" if is_unknown else "", left, search.searched)


def publish(
    config: Config, aggregate_id: str, rows: Unpublished, *, timeout: float = 60.0
) -> tuple[int, str]:
    """Have rows published, the lowest version first, until one is not.

    Args:
        timeout: seconds to wait for the publisher's answer, for each.

    Returns:
        How many were published, and what came of the last, as of `Retried`.

    Raises:
        StateError: run.paused, run.request_failed.
    """
    state, done, outcome = StateDir(config.app.state_dir), 0, "not running"
    for version in rows.versions if state.is_running() else ():
        request = Request(
            secrets.token_hex(8), "publish", aggregate_id, version, searched=rows.searched
        )
        answers = ask_shards(state, request, timeout)
        outcome = "no answer" if answers is None else next(iter(answers.values()))
        if outcome not in {"published", "published before"}:
            break
        done += outcome == "published"
    return done, outcome


# -- reading -----------------------------------------------------------------------------------


def _read(config: Config, only: Key | None, limit: int, until: float) -> Letters:
    """The newest dead letters of this publisher, without what became of them."""
    sink = config.sink
    count = partition_counts(sink).get(sink.dead_topic, 0)
    ids = {config.app.id, *config.app.former_ids}
    if not count:
        return Letters(0, 0, [], True)
    places: list[Place] = [(sink.dead_topic, number) for number in range(count)]
    reading = read_committed(sink, dict.fromkeys(places, 0), until)
    newest: list[tuple[int, int, int, Letter]] = []
    letters = 0
    rows: set[int] = set()  # hashes: 64 bits each are little, and enough to count by
    for chunk in reading:
        for message in chunk:
            headers = dict(message.headers() or ())
            if records.REASON not in headers or not records.is_ours(headers.items(), ids):
                continue
            letter = _letter(message, headers)
            if only is not None and letter.key != only:
                continue
            letters += 1
            rows.add(hash(letter.event))
            entry = (letter.timestamp, letter.partition, letter.offset, letter)
            if len(newest) < limit:
                heapq.heappush(newest, entry)
            else:
                heapq.heappushpop(newest, entry)
    found = _marked([e[3] for e in sorted(newest, reverse=True)])
    return Letters(letters, len(rows), found, not reading.unread)


def _marked(newest: list[Letter]) -> list[Letter]:
    """Letters, the newest first; the first of each row is its last one."""
    last = {letter.event: letter for letter in reversed(newest)}
    return [replace(letter, is_last=last[letter.event] is letter) for letter in newest]


def _letter(message: Message, headers: dict[str, bytes | None]) -> Letter:
    texts = {n: (v or b"").decode(errors="replace") for n, v in headers.items()}
    key, value = message.key(), message.value()
    try:
        version = int(texts[records.SEQUENCE])
    except (KeyError, ValueError):
        version = None
    if "eventpub_payload_bytes" in texts:
        size: int | None = int(texts["eventpub_payload_bytes"])
    else:
        size = None if value is None else len(value)
    return Letter(
        None if key is None else key.decode(errors="replace"),
        version,
        texts[records.REASON],
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        texts,
        size,
        (value or b"")[:_FIRST_BYTES],
    )


def readable_store(config: Config) -> EventStore:
    """A replica, too: what it has not applied yet is shown as what it is."""
    readable = config.store.model_copy(update={"allow_replica": True})
    return EventStore(readable, EventStore.discover(config.store))


def _since(letter: Letter) -> int:
    """No record of the row has an earlier timestamp, ms."""
    created = time_of(letter.headers.get(records.TIME, ""))
    return min(letter.timestamp, records.timestamp(created))


@dataclass
class _Search:
    """Events that were looked for on the topic.

    Attributes:
        found: partition and offset of each that is there, by its key, and with its contents.
        searched: by partition, up to which offset.
        is_whole: whether it was read that far.
        is_cut: whether retention has removed what might have been there.
    """

    found: dict[_Event, tuple[int, int]]
    searched: tuple[int, ...]
    is_whole: bool
    is_cut: bool = False


def _search(config: Config, wanted: Collection[Key], since: int, until: float) -> _Search:
    """Look for events on the topic, in all partitions: some may have been added.

    Args:
        since: their records' timestamps are at or after, ms.
    """
    sink = config.sink
    count = partition_counts(sink).get(sink.topic, 0)
    places: list[Place] = [(sink.topic, number) for number in range(count)]
    if not places:
        return _Search({}, (), True)
    ends = list_offsets(sink, places, "latest", committed=True)
    starts = {p: min(at, ends[p]) for p, at in offsets_at(sink, places, since).items()}
    ids = {config.app.id, *config.app.former_ids}
    keys = {aggregate_id.encode() for aggregate_id, _ in wanted}
    search = _Search({}, tuple(ends[place] for place in places), False)
    reading = read_committed(sink, starts, until, ends)
    for chunk in reading:
        for message in chunk:
            if message.key() not in keys:
                continue
            headers = dict(message.headers() or ())
            if not records.is_ours(headers.items(), ids):
                continue
            sequence = headers.get(records.SEQUENCE) or b""
            key = (message.key().decode(), int(sequence) if sequence.isdigit() else -1)
            if key in wanted:
                content = records.content_of_record(headers, message.value()).hex()
                event = *key, (headers.get(records.TIME) or b"").decode(errors="replace"), content
                search.found[key] = search.found[event] = message.partition(), message.offset()
    search.is_whole = not reading.unread
    first = list_offsets(sink, places, "earliest")
    search.is_cut = any(0 < first[place] >= starts[place] for place in places)
    return search
