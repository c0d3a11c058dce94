"""Dead letters: the records of `<topic>.dead`, what became of their rows, and a second try."""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from eventpub.admission.rules import CONFLICT
from eventpub.config import Config, format_time
from eventpub.ops.unpublished import (
    Event,
    Key,
    publish,
    readable_store,
    search_topic,
    unpublished,
)
from eventpub.sink import records
from eventpub.sink.folded import time_of
from eventpub.sink.reading import Message, Place, own_records, read_committed
from eventpub.sink.topics import partition_counts
from eventpub.state import StateDir

OF_ANOTHER = CONFLICT
"""Code of rows under whose version another row was published."""
_FIRST_BYTES = 512
_SHOWN = (
    "aggregate_id", "version", "reason", "payload_bytes", "partition", "offset", "in_store",
    "is_searched", "is_last",
)  # fmt: skip


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
    def event(self) -> Event:
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
    search = search_topic(config, wanted, since, until)
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


# -- reading -----------------------------------------------------------------------------------


def _read(config: Config, only: Key | None, limit: int, until: float) -> Letters:
    """The newest dead letters of this publisher, without what became of them."""
    sink = config.sink
    count = partition_counts(sink).get(sink.dead_topic, 0)
    if not count:
        return Letters(0, 0, [], True)
    places: list[Place] = [(sink.dead_topic, number) for number in range(count)]
    reading = read_committed(sink, dict.fromkeys(places, 0), until)
    newest: list[tuple[int, int, int, Letter]] = []
    letters = 0
    rows: set[int] = set()  # hashes: 64 bits each are little, and enough to count by
    for message, headers in own_records(reading, {config.app.id, *config.app.former_ids}):
        letter = None if records.REASON not in headers else _letter(message, headers)
        if letter is None or (only is not None and letter.key != only):
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


def _since(letter: Letter) -> int:
    """No record of the row has an earlier timestamp, ms."""
    created = time_of(letter.headers.get(records.TIME, ""))
    return min(letter.timestamp, records.timestamp(created))
