"""What happens to topics from outside: retention, deletion, lost tails, other producers, ….

Each function is a step of a schedule. What the checker needs of what was taken away stays in the
broker's log or is noted in the world.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

from tests.simulation.broker import Broker, Message, PartitionId, Transaction
from tests.simulation.world import World
from tests.twins.source import crc


def cut(world: World, which: int, records: int, partition: int = -1) -> None:
    """Retention removes so many of the first offsets of each partition.

    Args:
        which: topic, by its place in `Broker.topics`; -1: all.
        records: at most; nothing of an open transaction goes.
        partition: of these; -1: all.
    """
    broker = world.broker
    for place in _places(broker, which):
        if partition not in {-1, place[1]}:
            continue
        low = min(broker.lows.get(place, 0) + records, broker.stable(place))
        if low > broker.lows.get(place, 0):
            broker.lows[place] = low
            broker.mark_cut(place)
            world.counts["cut by retention"] += 1
            world.is_cut = True
            world.may_refuse |= {"state.start_lost"} if world.has_lost_progress else set()
            world.forget()


def remake(world: World, which: int) -> None:
    """Topics are deleted and created again, empty."""
    broker = world.broker
    broker.settle()
    places = _places(broker, which)
    if any(broker.log[place] for place in _places(broker, 0) if place in places):
        world.must_refuse = "a topic that was deleted and made again"
    world.may_refuse.add("sink.topic_recreated")
    for place in places:
        broker.log[place] = []
        broker.lows.pop(place, None)
    for topic in {topic for topic, _ in places}:
        broker.ids[topic] += 1
    for owner in broker.owners.values():
        if owner.transaction is not None and owner.transaction.places.keys() & set(places):
            owner.transaction = None
        for place in places:
            owner.left_open.pop(place, None)
    world.counts["topics made again"] += 1


def lose_tail(world: World, transactions: int) -> None:
    """An unclean leader election: the last transactions of the topic's partitions are gone."""
    broker = world.broker
    broker.settle()
    for place in _places(broker, 0):
        log = broker.log[place]
        if broker.stable(place) < len(log):
            continue
        ends = [at + 1 for at, (_, message) in enumerate(log) if message is None]
        kept = [0, *ends[:-1]][max(0, len(ends) - transactions)] if ends else len(log)
        if kept < len(log) and kept >= broker.lows.get(place, 0):
            world.counts["lost tails"] += 1
            world.may_refuse.add("sink.topic_recreated")
            del log[kept:]


def add_partitions(world: World, count: int) -> None:
    """All topics get so many partitions; never fewer."""
    broker = world.broker
    if count > broker.partitions:
        world.counts["partitions added"] += 1
        world.may_refuse.add("state.foreign")
    for topic in broker.topics:
        for number in range(broker.partitions, count):
            broker.log[topic, number] = []
    broker.partitions = max(broker.partitions, count)
    world.partition_counts.add(broker.partitions)


def foreign(
    world: World,
    how: Literal["garbage", "forged", "other", "skip"],
    which: int,
    aggregate: int,
    version: int,
) -> None:
    """Another producer writes a record, without a transaction.

    Args:
        how: something that says nothing; a key and a sequence, but no source; an event of another
            application id; a skip.
    """
    broker, aggregate_id = world.broker, f"a{aggregate}"
    topic = broker.topics[which]
    place = topic, _partition(world, aggregate_id)
    key: str | None = aggregate_id
    value = b"?"
    headers: list[tuple[str, str | bytes]] = []
    if how == "garbage":
        key = None if version % 2 else aggregate_id
        headers = [("ce_sequence", b"\xff")] if version % 3 else []
    elif how in {"forged", "other"}:
        headers = [("ce_sequence", str(version)), ("ce_time", "2023-11-14T22:13:21.000000Z")]
        if how == "other":
            world.may_refuse.add("sink.other_publisher")
            headers += [("ce_source", "another"), ("ce_id", f"{aggregate_id}/{version}")]
    else:
        time = "2023-11-14T22:13:21.000000Z"
        skip = {"aggregate_id": aggregate_id, "from_version": 1, "to_version": version}
        skip |= {"first_seen": time, "skipped_at": time, "attempts": 1, "reason": "expired"}
        value = json.dumps(skip).encode()
    message = Message(place, key, value, headers)
    message.is_foreign = True
    broker.log[place].append((Transaction(outcome="committed"), message))
    world.counts[f"foreign records, {how}"] += 1


def overlapping(world: World, lasts: int, count: int) -> None:
    """Another producer writes in transactions that overlap: one is open at any time.

    Args:
        lasts: how often time passes until each ends.
        count: of the transactions.
    """
    broker = world.broker

    def write() -> Transaction:
        made = Transaction()
        for place in _places(broker, 0):
            message = Message(place, "theirs", b"?", [("ce_source", "billing")])
            message.is_foreign = True
            made.places[place] = len(broker.log[place])
            broker.log[place].append((made, message))
        return made

    broker.others_begin(write, lasts, count - 1)


def _partition(world: World, aggregate_id: str) -> int:
    return crc(aggregate_id) % world.broker.partitions


def _places(broker: Broker, which: int) -> list[PartitionId]:
    topics = broker.topics if which < 0 else [broker.topics[which]]
    return [place for place in broker.log if place[0] in topics]


def damage(world: World, how: str, *arguments: int | str) -> None:
    """A step: what happens to the topics, and its arguments."""
    _STEPS[how](world, *arguments)


_STEPS: dict[str, Callable[..., None]] = {
    "cut": cut,
    "remake": remake,
    "lose tail": lose_tail,
    "add partitions": add_partitions,
    "foreign": foreign,
    "overlapping": overlapping,
}
