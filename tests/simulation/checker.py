"""What must be true of the topic once a schedule has ended and everything has settled.

It reads the modelled broker's log itself, and shares nothing with the publisher.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tests.simulation.broker import Message
from tests.simulation.driver import TOPIC
from tests.simulation.world import Row, Setup, World
from tests.twins.source import crc

GAPS, LATE, DEAD = f"{TOPIC}.gaps", f"{TOPIC}.late", f"{TOPIC}.dead"
CONFLICT = b"version_conflict"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ViolationError(AssertionError):
    """Something that must hold does not. `kind` is what; the text says where."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class Skip:
    """A recorded skip."""

    first: int
    last: int
    first_seen: int
    skipped_at: int
    attempts: int
    looked: int
    reason: str


def check(world: World, start: int, counted_from: int | None) -> None:
    """Complete, once, in order.

    Args:
        start: where the publisher started, µs.
        counted_from: what was created after this is found by the recount, even where it committed
            behind the window and nothing has followed it; None: nothing is, but something has
            followed everything.

    Raises:
        ViolationError: what does not hold.
    """
    broker = world.broker
    for place in broker.log:
        if broker.stable(place) != broker.high(place):
            raise ViolationError("open transaction", f"{place} cannot be read to its end")
    skips = _skips(world)
    seen: dict[bytes, Message] = {}
    late: set[tuple[str, int]] = set()
    order = Order(world)
    if world.requests:
        raise ViolationError("never answered", f"{world.requests}")
    if world.must_refuse:
        raise ViolationError("not refused", world.must_refuse)
    if world.too_much:
        raise ViolationError("too much at once", world.too_much)
    dead = _dead(world, start)
    accounted = dead | _unrecorded(world)
    letters = {(_key(world, message), message.value()) for message in _messages(world, DEAD)}
    for topic in (TOPIC, LATE):
        for message in _messages(world, topic):
            aggregate_id, version = _key(world, message)
            where = f"{aggregate_id}/{version} at {topic}[{message.partition()}]@{message.offset()}"
            key = (aggregate_id, version)
            payload = message.value() or b""
            row = _row(world, key, payload)
            is_again = payload in seen and _is_said_to_repeat(world, row, seen[payload], message)
            world.counts["repeated after a cut, and said"] += is_again
            if topic == LATE and payload in seen and world.setup.executors > 1:
                # what one executor has diverted, another knows from that topic alone
                is_again = is_again or seen[payload].cut_at is not None
            is_dead = key in dead and key not in world.undone
            if (payload in seen and not is_again) or (is_dead and not _was_asked_for(world, key)):
                raise ViolationError("repeated", where)
            seen[payload] = message
            if row is None:
                raise ViolationError("never committed", where)
            if row.refused and not (world.has_accepted and version > 0):
                raise ViolationError("published what is refused", where)
            if row.create_time <= start:
                raise ViolationError("before the start", where)
            if topic == LATE or "eventpub_late" in dict(message.headers()):
                late.add(key)
                continue
            if (after := order.highest(aggregate_id, message)) >= version:
                raise ViolationError("out of order", f"{where} after {after}")
            upto = max(start, world.forgotten.upto(crc(aggregate_id)))
            for missing in range(after + 1, version):
                of_it = (aggregate_id, missing)
                if of_it in accounted or order.had(of_it):
                    continue
                if not _explained(world, aggregate_id, missing, upto, skips):
                    raise ViolationError("passed over", f"version {missing} before {where}")
            order.add(key, row, message)
    order.check()
    for key, row in (((row.aggregate_id, row.version), row) for row in world.rows):
        skipped = any(s.first <= key[1] <= s.last for s in skips.get(key[0], ()))
        if key in world.promised and row.payload not in seen:
            raise ViolationError("lost", f"{key}, which was published on request")
        was_asked_for = key in dead and _was_asked_for(world, key)
        if key in late and not (skipped or was_asked_for or _is_below_forgotten(world, key)):
            raise ViolationError("late without a skip", f"{key}")
        if row.payload in seen or key in accounted or row.create_time <= start:
            continue
        if key in world.second and (key, row.payload) in letters:
            if not any(other.payload in seen for other in world.rows_of(key)):
                raise ViolationError("lost", f"each row of {key} is a dead letter")
            continue
        if _is_unknown_below(world, key) or (
            (row.late or world.has_lost_progress) and _is_forgotten(world, row)
        ):
            world.counts["forgotten by topic and index"] += 1
            continue
        if world.setup.late == "drop" and (skipped or _is_below_forgotten(world, key)):
            continue
        if key in _forgotten_skips(world):
            world.counts["skipped, which was cut and forgotten"] += 1
            continue
        if key[1] < 1:
            found = not row.late
        elif counted_from is None:
            # of a version that was written anew, no later one shows that it is missing
            found = not (skipped or _is_below_forgotten(world, key))
            found = found and not (row.late and (key in world.undone or key in world.second))
        else:
            found = row.sought or not row.late or row.create_time > counted_from
        if not found:
            world.counts["beyond the recount"] += 1
            continue
        if _is_hidden(world, key, row):
            world.counts["written anew, hidden by a newer version"] += 1
            continue
        if _is_baseline(world, key, start):
            continue
        raise ViolationError("lost", f"{key} created at {row.create_time}")
    world.counts["late events"] += len(late)


def _was_asked_for(world: World, key: tuple[str, int]) -> bool:
    """Whether a user wanted the row of a dead letter published after all, and was not refused."""
    return world.asked["publish", *key] > world.not_done["publish", *key]


def _is_said_to_repeat(world: World, row: Row | None, before: Message, again: Message) -> bool:
    """Whether it was cut before it was published again, and that was said."""
    after, cut_at = world.repeats_after, before.cut_at
    if row is None or cut_at is None or cut_at >= again.number or after is None:
        return False
    least = world.forgotten.at_least(crc(row.aggregate_id))
    # where nobody knows what another executor has published, what was late comes again, too
    return row.create_time > max(after, least) or (row.late and world.has_lost_progress)


def _is_forgotten(world: World, row: Row) -> bool:
    """Whether it may count as published: index and topic have forgotten what was."""
    remembers = not world.has_lost_progress
    upto = world.forgotten.upto(crc(row.aggregate_id), row, is_hidden=remembers)
    return row.create_time <= upto


def _is_below_forgotten(world: World, key: tuple[str, int]) -> bool:
    """Whether a version above it may count as published, and what is missing there as skipped."""
    above = (row for (a, v), row in world.committed.items() if a == key[0] and v > key[1])
    return any(_is_forgotten(world, row) for row in above)


def _is_unknown_below(world: World, key: tuple[str, int]) -> bool:
    """Whether it may be missing there, and the publisher may not know that it is skipped.

    One executor knows what counts as skipped, and none does below rows of the future.
    """
    is_ahead = any(row.is_ahead for row in [*world.rows_of(key), *world.undone.get(key, ())])
    return (is_ahead or world.setup.executors > 1) and _is_below_forgotten(world, key)


def _is_below_baseline(world: World, letter: Message) -> bool:
    """Whether a version above it is baseline, and nothing is left of its aggregate: then what
    is missing there is not known."""
    aggregate_id, version = _key(world, letter)
    of_it = (row for (a, v), row in world.committed.items() if a == aggregate_id and v > version)
    before = (m for m in _messages(world, TOPIC) if m.number < letter.number and m.cut_at is None)
    return any(row.create_time <= world.forgotten.baseline for row in of_it) and not any(
        _key(world, message)[0] == aggregate_id for message in before
    )


class Order:
    """Of the events of each aggregate that are not marked as late."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._there: dict[str, list[tuple[int, Row, Message]]] = {}
        self._again: list[tuple[str, Row, Message, Message]] = []

    def highest(self, aggregate_id: str, at: Message) -> int:
        """The highest version that stood on the topic when a record was written."""
        there = self._there.get(aggregate_id, ())
        return max((v for v, _, m in there if m.cut_at is None or m.cut_at >= at.number), default=0)

    def had(self, key: tuple[str, int]) -> bool:
        """Whether a version ever stood there."""
        return any(version == key[1] for version, *_ in self._there.get(key[0], ()))

    def add(self, key: tuple[str, int], row: Row, message: Message) -> None:
        """The next record."""
        there = self._there.setdefault(key[0], [])
        self._again += [(key[0], of, m, message) for v, of, m in there if v > key[1]]
        there.append((key[1], row, message))

    def check(self) -> None:
        """Whoever comes behind a higher version that was cut: that one comes again, which is said,
        or it is so old that it counts as published, and nobody knows that it ever was."""
        for aggregate_id, row, before, behind in self._again:
            comes_again = any(
                other is row and message.number > behind.number
                for _, other, message in self._there[aggregate_id]
            )
            if not comes_again and not _is_forgotten(self._world, row):
                text = f"{behind.key()!r} at {behind.offset()} after version {row.version}"
                raise ViolationError("out of order", f"{text} at {before.offset()}, which was cut")


def _messages(world: World, topic: str) -> list[Message]:
    """Of this publisher, in the order in which they were written, and what is cut by now, too."""
    broker = world.broker
    messages = [m for place in broker.log if place[0] == topic for m in broker.read(place, 0)]
    if broker.partitions > 1:
        messages.sort(key=lambda m: m.number)
    return [m for m in messages if not m.is_foreign]


def _row(world: World, key: tuple[str, int], payload: bytes) -> Row | None:
    """What was committed with this payload, also if it is gone since the database was restored."""
    rows = [*world.rows_of(key), *world.undone.get(key, ())]
    return next((row for row in rows if row.payload == payload), None)


def _dead(world: World, start: int) -> set[tuple[str, int]]:
    """The dead letters: each once, and only of what is refused.

    Again where a user wanted it published and it was refused again: once each time it was tried.
    Or of what has the version of an event that was published before the database was restored.
    """
    found: set[tuple[str, int]] = set()
    letters: set[tuple[str, int, bytes | None]] = set()
    for message in _messages(world, DEAD):
        world.counts["dead letters"] += 1
        key = _key(world, message)
        where = f"{key} at {DEAD}[{message.partition()}]@{message.offset()}"
        letter = (*key, message.value())
        if letter in letters and not _was_asked_for(world, key):
            raise ViolationError("repeated", where)
        letters.add(letter)
        rows = [*world.rows_of(key), *world.undone.get(key, ())]
        is_right = _is_conflict(world, key, message) or (
            _is_baseline(world, key, start, undone=True) and CONFLICT in _reason(message)
        )
        of_version = {row.payload for row in world.rows_of(key)}
        is_unknown = key in _forgotten_skips(world) or _was_cut(world, message)
        is_unknown |= _is_unknown_below(world, key)
        is_below = world.has_lost_progress and _is_below_baseline(world, message)
        if CONFLICT in _reason(message) and (is_unknown or is_below):
            world.counts["taken for another event after a cut"] += 1
            found |= {key} if is_below and not is_unknown else set()
            continue
        if len(of_version) > 1 and message.value() in of_version and CONFLICT in _reason(message):
            continue
        if not any(row.refused for row in rows) and not is_right:
            raise ViolationError("refused for nothing", where)
        if all(row.create_time <= start for row in rows):
            raise ViolationError("before the start", where)
        if key in world.committed and message.value() in {None, world.committed[key].payload}:
            found.add(key)
    return found


def _unrecorded(world: World) -> set[tuple[str, int]]:
    """Refused or skipped by records of which nobody can tell any more that they were committed.

    Two things have happened: the broker has left the markers of a transaction out, and the index
    is gone that knew of it, before it was published again.
    """
    found: set[tuple[str, int]] = set()
    for message in world.unrecorded:
        if message.topic() == DEAD and message.key():
            found.add(_key(world, message))
        elif message.topic() == GAPS:
            gap = json.loads(message.value() or b"{}")
            versions = range(gap["from_version"], gap["to_version"] + 1) if gap else ()
            found |= {(gap["aggregate_id"], version) for version in versions}
    world.counts["records of which no index knew"] += len(found)
    return found


def _was_cut(world: World, letter: Message) -> bool:
    """Whether the row was published ahead of its time, and that was cut: nothing tells it then."""
    row = _row(world, _key(world, letter), letter.value() or b"")
    return (
        row is not None
        and row.is_ahead
        and any(
            m.value() == letter.value() and m.cut_at is not None and m.cut_at < letter.number
            for m in _messages(world, TOPIC)
        )
    )


def _is_conflict(world: World, key: tuple[str, int], message: Message) -> bool:
    """Whether another event of this version was published, and the reason says so."""
    gone = {row.payload for row in world.undone.get(key, ())} - {message.value()}
    was_published = gone and any(m.value() in gone for m in _messages(world, TOPIC))
    return bool(was_published) and CONFLICT in _reason(message)


def _reason(message: Message) -> bytes:
    return dict(message.headers()).get("eventpub_reason") or b""


def _key(world: World, message: Message) -> tuple[str, int]:
    headers = dict(message.headers())
    aggregate_id = (message.key() or b"").decode()
    if all(crc(aggregate_id) % n != message.partition() for n in world.partition_counts):
        raise ViolationError("wrong partition", f"{aggregate_id} in {message.partition()}")
    return aggregate_id, int(headers["ce_sequence"] or b"")


def _explained(
    world: World, aggregate_id: str, version: int, start: int, skips: dict[str, list[Skip]]
) -> bool:
    return any(s.first <= version <= s.last for s in skips.get(aggregate_id, ())) or _is_baseline(
        world, (aggregate_id, version), start, undone=True
    )


def _is_baseline(world: World, key: tuple[str, int], start: int, *, undone: bool = False) -> bool:
    """What was created before the start counts as published, and so does all that lies below.

    Args:
        undone: also what is gone since the database was restored.
    """
    rows = [*world.committed.values()]
    if undone:
        rows += [row for gone in world.undone.values() for row in gone]
    return any(
        row.aggregate_id == key[0] and row.version >= key[1] and row.create_time <= start
        for row in rows
    )


def _is_hidden(world: World, key: tuple[str, int], row: Row) -> bool:
    """Whether a version that was written anew committed behind a newer one, and no time tells it.

    What tells events of one version apart is the newest time of their aggregate. Of one transaction
    that stayed open, the window shows what is young, and the recount the rest of it later. Where a
    whole shard waits for a version, so does what committed before it.
    """
    there = [other for other in world.committed.values() if other.aggregate_id == key[0]]
    gone = [other for (a, _), undone in world.undone.items() if a == key[0] for other in undone]
    holds_shard = world.setup.policy == "hold_shard"
    return key in world.undone and any(
        other.version > key[1]
        and other.create_time >= row.create_time
        and (
            other.committed < row.committed
            or (row.late and other.committed == row.committed)
            or (holds_shard and _has_waited_for_version(other, there))
        )
        for other in [*there, *gone]
    )


def _has_waited_for_version(row: Row, rows: list[Row]) -> bool:
    """Whether the version before was not there when it was committed."""
    before = row.version - 1
    return before > 0 and not any(
        other.version == before and other.committed <= row.committed for other in rows
    )


def _skips(world: World) -> dict[str, list[Skip]]:
    """The recorded skips, each checked by itself: once, after its whole wait, and with reason."""
    setup = world.setup
    found: dict[str, list[Skip]] = {}
    cut: dict[str, list[Skip]] = {}
    unnamed: Counter[str] = Counter()
    for message in _messages(world, GAPS):
        world.counts["skips"] += 1
        gap = json.loads(message.value() or b"")
        aggregate_id = gap["aggregate_id"]
        skip = Skip(
            gap["from_version"],
            gap["to_version"],
            _micros(gap["first_seen"]),
            _micros(gap["skipped_at"]),
            gap["attempts"],
            message.looked,
            gap["reason"],
        )
        where = f"{aggregate_id} {skip}"
        others = found.setdefault(aggregate_id, [])
        for other in others:
            if other.first <= skip.last and skip.first <= other.last:
                if not (world.forgotten and other in cut.get(aggregate_id, ())):
                    raise ViolationError("skipped twice", where)
                world.counts["skipped again after a cut"] += 1  # where the index is lost, too
        if message.offset() < world.broker.lows.get((GAPS, message.partition()), 0):
            cut.setdefault(aggregate_id, []).append(skip)
        waited = skip.skipped_at - skip.first_seen
        if skip.reason == "requested":
            unnamed[aggregate_id] += not world.asked["skip", aggregate_id, skip.first]
            if unnamed[aggregate_id] > world.asked["skip", aggregate_id, None]:
                raise ViolationError("skipped what nobody asked for", where)
        elif not _has_waited(setup, skip.attempts, waited):
            raise ViolationError("skipped early", where)
        for version in range(skip.first, skip.last + 1):
            row = world.committed.get((aggregate_id, version))
            if row is not None and row.committed < skip.looked:
                raise ViolationError("skipped what was there", f"version {version} of {where}")
            if row is not None and _was_seen_open(world, row, skip):
                raise ViolationError("skipped what was open", f"version {version} of {where}")
        others.append(skip)
    return found


def _forgotten_skips(world: World) -> set[tuple[str, int]]:
    """What was skipped and then cut, where an index was lost: nobody knows of it if it commits.

    Versions above it are known, so it counts as published, or as another event of its version.
    """
    found: set[tuple[str, int]] = set()
    for message in _messages(world, GAPS) if world.forgotten else ():
        if message.cut_at is not None:
            gap = json.loads(message.value() or b"")
            versions = range(gap["from_version"], gap["to_version"] + 1)
            found |= {(gap["aggregate_id"], version) for version in versions}
    return found


def _has_waited(setup: Setup, attempts: int, waited: int) -> bool:
    """All attempts were made; more where open transactions had not been looked at since."""
    return attempts >= setup.max_backoff and waited >= setup.backoff_base * (
        (1 << setup.max_backoff) - 1
    )


def _was_seen_open(world: World, row: Row, skip: Skip) -> bool:
    """Whether the publisher knew of the transaction that fills the gap, and every answer since
    was fresh."""
    return (
        0 < row.seen < skip.looked < row.committed
        and row.begun <= skip.first_seen
        and skip.reason != "requested"
        and not world.counts["polls in vain"]
    )


def _micros(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
