"""What must be true of the topic once a schedule has ended and everything has settled.

It reads the modelled broker's log itself, and shares nothing with the publisher.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tests.simulation.broker import Message
from tests.simulation.spark import TOPIC
from tests.simulation.store import crc
from tests.simulation.world import World

GAPS, LATE, DEAD = f"{TOPIC}.gaps", f"{TOPIC}.late", f"{TOPIC}.dead"
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
    seen: dict[tuple[str, int], int] = {}
    late: set[tuple[str, int]] = set()
    highest: dict[str, int] = {}
    if world.requests:
        raise ViolationError("never answered", f"{world.requests}")
    dead = _dead(world, start)
    seen.update(dict.fromkeys(dead, 1))
    for topic in (TOPIC, LATE):
        for partition in range(world.setup.partitions):
            for message in broker.read((topic, partition), 0):
                aggregate_id, version = _key(world, message)
                where = f"{aggregate_id}/{version} at {topic}[{partition}]@{message.offset()}"
                key = (aggregate_id, version)
                seen[key] = seen.get(key, 0) + 1
                if seen[key] > 1:
                    raise ViolationError("repeated", where)
                row = world.committed.get(key)
                if row is None or row.payload != message.value():
                    raise ViolationError("never committed", where)
                if row.refused:
                    raise ViolationError("published what is refused", where)
                if row.create_time <= start:
                    raise ViolationError("before the start", where)
                if topic == LATE or "eventpub_late" in dict(message.headers()):
                    late.add(key)
                    continue
                before = highest.get(aggregate_id, 0)
                if version <= before:
                    raise ViolationError("out of order", f"{where} after {before}")
                for missing in range(before + 1, version):
                    if (aggregate_id, missing) not in dead and not _explained(
                        world, aggregate_id, missing, start, skips
                    ):
                        raise ViolationError("passed over", f"version {missing} before {where}")
                highest[aggregate_id] = version
    for key, row in world.committed.items():
        skipped = any(s.first <= key[1] <= s.last for s in skips.get(key[0], ()))
        if key in late and not skipped:
            raise ViolationError("late without a skip", f"{key}")
        if key in seen or row.create_time <= start:
            continue
        if skipped and world.setup.late == "drop":
            continue
        if key[1] < 1:
            found = not row.late
        elif counted_from is None:
            found = not skipped
        else:
            found = not row.late or row.create_time > counted_from
        if not found:
            world.counts["beyond the recount"] += 1
            continue
        if _is_baseline(world, key, start):
            continue
        raise ViolationError("lost", f"{key} created at {row.create_time}")
    world.counts["late events"] += len(late)


def _dead(world: World, start: int) -> set[tuple[str, int]]:
    """The dead letters: each once, and only of what is refused."""
    found: set[tuple[str, int]] = set()
    for partition in range(world.setup.partitions):
        for message in world.broker.read((DEAD, partition), 0):
            world.counts["dead letters"] += 1
            key = _key(world, message)
            row = world.committed.get(key)
            where = f"{key} at {DEAD}[{partition}]@{message.offset()}"
            if key in found:
                raise ViolationError("repeated", where)
            if row is None or not row.refused:
                raise ViolationError("refused for nothing", where)
            if row.create_time <= start:
                raise ViolationError("before the start", where)
            found.add(key)
    return found


def _key(world: World, message: Message) -> tuple[str, int]:
    headers = dict(message.headers())
    aggregate_id = (message.key() or b"").decode()
    if crc(aggregate_id) % world.setup.partitions != message.partition():
        raise ViolationError("wrong partition", f"{aggregate_id} in {message.partition()}")
    return aggregate_id, int(headers["ce_sequence"] or b"")


def _explained(
    world: World, aggregate_id: str, version: int, start: int, skips: dict[str, list[Skip]]
) -> bool:
    return any(s.first <= version <= s.last for s in skips.get(aggregate_id, ())) or _is_baseline(
        world, (aggregate_id, version), start
    )


def _is_baseline(world: World, key: tuple[str, int], start: int) -> bool:
    """What was created before the start counts as published, and so does all that lies below."""
    return any(
        a == key[0] and v >= key[1] and row.create_time <= start
        for (a, v), row in world.committed.items()
    )


def _skips(world: World) -> dict[str, list[Skip]]:
    """The recorded skips, each checked by itself: once, after its whole wait, and with reason."""
    setup = world.setup
    found: dict[str, list[Skip]] = {}
    unnamed: Counter[str] = Counter()
    for partition in range(setup.partitions):
        for message in world.broker.read((GAPS, partition), 0):
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
            if any(o.first <= skip.last and skip.first <= o.last for o in others):
                raise ViolationError("skipped twice", where)
            waited = skip.skipped_at - skip.first_seen
            if skip.reason == "requested":
                unnamed[aggregate_id] += not world.asked["skip", aggregate_id, skip.first]
                if unnamed[aggregate_id] > world.asked["skip", aggregate_id, None]:
                    raise ViolationError("skipped what nobody asked for", where)
            elif skip.attempts != setup.max_backoff or waited < setup.backoff_base * (
                (1 << setup.max_backoff) - 1
            ):
                raise ViolationError("skipped early", where)
            for version in range(skip.first, skip.last + 1):
                row = world.committed.get((aggregate_id, version))
                if row is not None and row.committed < skip.looked:
                    raise ViolationError("skipped what was there", f"version {version} of {where}")
            others.append(skip)
    return found


def _micros(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)
