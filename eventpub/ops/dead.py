"""Dead letters and rows that are not on the topic: listing them, and publishing them after all.

Only the running publisher writes its partitions. A request to it says up to which offsets the topic
was searched for the row, so that the row is published once.
"""

from __future__ import annotations

import heapq
import secrets
import time
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from eventpub.admission.model import CONFLICT
from eventpub.channel import Request
from eventpub.config import Config, format_time
from eventpub.ops.asking import ask_shards
from eventpub.ops.lookup import Found, Key, OwnTopics, found_in, require_utf8
from eventpub.sink import records
from eventpub.sink.topics import list_offsets
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir

Event: TypeAlias = tuple[str | int | None, ...]

PUBLISHED = {"published", "published before"}
"""Outcomes of `publish` and `retry` after which the row is on the topic."""

OF_ANOTHER = CONFLICT
"""Reason of rows whose version was published with another row."""
_SHOWN = (
    "aggregate_id", "version", "reason", "payload_bytes", "partition", "offset", "in_store",
    "is_searched", "is_last",
)  # fmt: skip


@dataclass(frozen=True)
class Letter(Found):
    """A record of `<topic>.dead`.

    Attributes:
        published: partition and offset where it was published since; None: not, or unknown.
        is_searched: the topic was searched to its end, and retention has removed nothing of it.
        is_last: no later letter is of the same row.
    """

    in_store: bool | None = None
    published: tuple[int, int] | None = None
    is_searched: bool = False
    is_last: bool = True

    @property
    def event(self) -> Event:
        """Distinguishes rows of one version; only the key for a row that a retry may change."""
        if self.key is None:
            return self.partition, self.offset
        is_of_time = not (self.reason or "").startswith(records.REFUSED)
        names = (records.TIME, records.CONTENT) if is_of_time else ()
        return self.aggregate_id, self.version, *(self.headers.get(name) for name in names)

    def to_dict(self) -> dict[str, Any]:
        at = self.published
        published = None if at is None else {"partition": at[0], "offset": at[1]}
        created = self.headers.get(records.TIME) or format_time(self.timestamp * 1000)
        shown = {name: getattr(self, name) for name in _SHOWN}
        return shown | {"created": created, "published": published}


@dataclass(frozen=True)
class Letters:
    """Dead letters; of `rows` rows, where one without aggregate or version counts as one."""

    count: int
    rows: int
    newest: list[Letter]
    is_whole: bool


def find(
    config: Config,
    *,
    only: Key | None = None,
    limit: int = 50,
    timeout: float = 60.0,
    ask_store: bool = True,
) -> Letters:
    """The dead letters, and whether their rows are stored and published."""
    until = time.monotonic() + timeout
    found = _read(config, only, limit, until)
    wanted = {letter.key for letter in found.newest if letter.key is not None}
    if not wanted:
        return found
    there: Collection[Key] | None = None
    if ask_store:
        with readable_store(config) as store:
            there = store.existing(sorted(wanted))
    times = sorted({_since(letter) for letter in found.newest if letter.key is not None})
    places, _, topics = search_topic(config, wanted, times[0], until)

    def is_kept(since: int) -> bool:
        topics.starts(topics.places(config.sink.topic), since)
        return not topics.is_cut

    kept = {*times[bisect_left(times, True, key=is_kept) :]}
    newest = [
        letter
        if letter.key is None
        else replace(
            letter,
            in_store=None if there is None else letter.key in there,
            published=places.get(letter.event),
            is_searched=letter.event in places or (not topics.unread and _since(letter) in kept),
        )
        for letter in found.newest
    ]
    return replace(found, newest=newest)


def retry(
    config: Config, aggregate_id: str, version: int, *, timeout: float = 60.0
) -> tuple[str, Letter | None]:
    """Have the row of a dead letter published, as a late event, within `timeout` seconds.

    Returns:
        The outcome (`cli.events` explains each), and the newest letter of the row.
    """
    until = time.monotonic() + timeout
    key = (aggregate_id, version)
    found = _read(config, key, 1, until)
    if not found.newest:
        return "no dead letter" if found.is_whole else "not searched", None
    letter = found.newest[0]
    if (letter.reason or "").startswith(OF_ANOTHER):
        return "another event has its version", letter
    if not StateDir(config.app.state_dir).is_running():
        return "not running", letter
    # its time may have changed since, and an earlier retry published it with that time
    outcome = publish(config, *key, since=_since(letter), timeout=until - time.monotonic())
    if outcome == "refused again":  # the new letter has the current reason
        letter = next(iter(_read(config, key, 1, until + timeout).newest), letter)
    return outcome, letter


def _read(config: Config, only: Key | None, limit: int, until: float) -> Letters:
    topics, count = OwnTopics(config, until), 0
    rows: set[int] = set()  # 64-bit hashes: small, and enough to count by

    def letters() -> Iterator[Letter]:
        nonlocal count
        for found in topics.letters():
            letter = Letter(**vars(found))
            if letter.reason is not None and only in {None, letter.key}:
                count += 1
                rows.add(hash(letter.event))
                yield letter

    newest = heapq.nlargest(limit, letters(), lambda x: (x.timestamp, x.partition, x.offset))
    last = {letter.event: letter for letter in reversed(newest)}
    marked = [replace(letter, is_last=last[letter.event] is letter) for letter in newest]
    return Letters(count, len(rows), marked, not topics.unread)


def _since(letter: Letter) -> int:
    created = records.time_of(letter.headers.get(records.TIME, ""))
    return min(letter.timestamp, records.timestamp(created))


def publish(
    config: Config,
    aggregate_id: str,
    version: int,
    *,
    since: int | None = None,
    timeout: float = 60.0,
) -> str:
    """Have a row published that is not on the topic; returns the outcome, like `retry`.

    Args:
        since: lower bound of its records' timestamps, ms; None: its creation time, as far back as
            retention has left the topic.
    """
    require_utf8(aggregate_id)
    key = (aggregate_id, version)
    with readable_store(config) as store:
        batches = list(store.below([(aggregate_id, version + 1)], 1))  # names an invalid row
        now, moved_by = store.now(), store.moved_by if since is None else 0
    times = [
        row["create_time"] for b in batches for row in b.to_pylist() if row["version"] == version
    ]
    if not times:
        return "not in the store"
    # published before its time, or with another one than the row has now
    is_unknown = times[0] > now or moved_by is None
    first = 0 if is_unknown else max(0, (times[0] - (moved_by or 0)) // 1000)
    first = first if since is None else min(first, since)
    found, searched, topics = search_topic(config, {key}, first, time.monotonic() + timeout)
    if key in found:
        return "published before"
    if topics.unread:
        return "not searched"
    if topics.is_cut and since is None:
        return "not known"
    state = StateDir(config.app.state_dir)
    if not state.is_running():
        return "not running"
    request = Request(secrets.token_hex(8), "publish", *key, searched=searched)
    answers = ask_shards(state, request, timeout)
    return "no answer" if answers is None else next(iter(answers.values()))


def readable_store(config: Config) -> EventStore:
    """The store, even if it is a replica: a row not applied yet is just shown as absent."""
    readable = config.store.model_copy(update={"allow_replica": True})
    return EventStore(readable, EventStore.discover(config.store))


def search_topic(
    config: Config, wanted: Collection[Key], since: int, until: float
) -> tuple[dict[Key | Event, tuple[int, int]], tuple[int, ...], OwnTopics]:
    """Search the topic for events whose records' timestamps are at or after `since`, ms.

    Returns:
        Partition and offset of each, by its key and by key and content; the offset up to which each
        partition was searched; and the reader, which knows the partitions left unread.
    """
    topics = OwnTopics(config, until)
    places = topics.places(config.sink.topic)
    ends = list_offsets(topics.clients, places, "latest", committed=True)
    starts = {place: min(at, ends[place]) for place, at in topics.starts(places, since).items()}
    found: dict[Key | Event, tuple[int, int]] = {}
    keys = {aggregate_id for aggregate_id, _ in wanted}
    for message, headers in topics.read(starts, ends=ends, keys=keys):
        record = found_in(message, headers)
        if record.key is not None and record.key in wanted:
            content = records.content_of_record(headers, message.value()).hex()
            event = *record.key, record.headers.get(records.TIME, ""), content
            found[record.key] = found[event] = record.partition, record.offset
    return found, tuple(ends[place] for place in places), topics
