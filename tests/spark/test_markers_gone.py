"""The topic of the markers changes while a batch is published: a repeated task would not find its
own, and publish again."""

from __future__ import annotations

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewPartitions,
    NewTopic,
)

from eventpub.local.servers import Kafka
from eventpub.sink.client import Clients
from eventpub.sink.markers import place_of
from eventpub.sink.numbered import NumberedSink, markers_of
from eventpub.spark.options import sink_options
from tests.publisher.harness import eventually
from tests.spark.test_sink import Task, event, tasks, versions

__all__ = ["tasks"]


@pytest.fixture
def sink(kafka_server: Kafka, topic_name: str) -> Task:
    """The topic of its markers was made by hand, without `cleanup.policy=compact`."""
    sink = Task(kafka_server, topic_name)
    name = markers_of(sink_options(sink.options).sink)
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap_servers})
    [done] = admin.create_topics([NewTopic(name, 2, 1)]).values()
    done.result(10)
    eventually(lambda: name in admin.list_topics(timeout=5).topics)
    return sink


def changed(server: Kafka, sink: Task, how: str) -> None:
    """The partition in which markers are looked for has none of before."""
    options = sink_options(sink.options)
    name, id_, left = markers_of(options.sink), options.id, {"deleted": 0}.get(how, 2)
    admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
    if how == "grown":
        left = next(n for n in range(3, 99) if place_of(name, id_, n) != place_of(name, id_, 2))
        [done] = admin.create_partitions([NewPartitions(name, left)]).values()
    elif how == "deleted":
        [done] = admin.delete_topics([name]).values()
    else:
        place = NumberedSink(Clients(options.sink), options.id).markers.place
        [done] = admin.delete_records([TopicPartition(*place, -1)]).values()
    done.result(10)

    def is_seen() -> bool:
        topic = admin.list_topics(timeout=5).topics.get(name)
        return len(topic.partitions if topic else ()) == left

    eventually(is_seen)


@pytest.mark.parametrize("how", ["grown", "deleted", "emptied"])
def test_no_task_publishes_once_the_markers_are_gone(
    sink: Task, kafka_server: Kafka, topic_name: str, how: str
) -> None:
    assert sink.write(0, [event("z", 1)]).is_new
    assert sink.write(1, [event("a", 1)], task=0).is_new
    changed(kafka_server, sink, how)
    assert sink.refused(1, [event("b", 1)], task=1).code == "sink.markers_gone"
    sink.attempt = 1
    assert sink.refused(1, [event("a", 1)], task=0).code == "sink.markers_gone"
    sink.run = "r2"
    assert sink.refused(1, [event("a", 1)], task=0).code == "sink.markers_gone"
    assert sorted(versions(kafka_server, topic_name)) == [("a", 1), ("z", 1)]
    sink.options["after_query"] = "q1"
    assert sink.write(2, [event("b", 1)], task=1).is_new, "once an operator has looked"


def test_what_is_left_after_a_cut_counts_for_nothing(sink: Task, kafka_server: Kafka) -> None:
    """Another task's marker of the batch does not show that this one has none."""
    assert sink.write(0, [event("z", 1)]).is_new
    assert sink.write(1, [event("a", 1)], task=0).is_new
    options = sink_options(sink.options)
    place = NumberedSink(Clients(options.sink), options.id).markers.place
    assert sink.write(1, [event("b", 1)], task=1).is_new
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap_servers})
    [done] = admin.delete_records([TopicPartition(*place, 4)]).values()
    done.result(10)
    sink.attempt = 1
    assert sink.refused(1, [event("a", 1)], task=0).code == "sink.markers_gone"
