"""A broker with passwords and permissions: what each client is told, and how it is said."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink.base import Content
from eventpub.sink.checks import checks
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_topics
from eventpub.sink.shard import ShardSink
from tests.publisher.harness import eventually
from tests.sink.conftest import PASSWORDS, OwnBroker
from tests.sink.helpers import APP, WHOLE, read_topic, settings, some_events


def as_user(topic: str, address: str, name: str, **more: Any) -> config.Sink:
    login = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": name,
        "sasl.password": more.pop("password", PASSWORDS.get(name, "")),
    }
    return settings(topic, address, properties=login, **more)


def allow(address: str, kind: Any, name: str, *operations: Any) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    bindings = [
        AclBinding(
            kind,
            name,
            ResourcePatternType.PREFIXED,
            "User:poor",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]
    for future in admin.create_acls(bindings).values():
        future.result(10)
    anybody: Any = None
    those = AclBindingFilter(
        kind, name, ResourcePatternType.PREFIXED, anybody, anybody,
        AclOperation.ANY, AclPermissionType.ANY,
    )  # fmt: skip
    # the controller has written them; the broker applies them a moment later
    eventually(lambda: {*bindings} <= {*admin.describe_acls(those).result(10)})


def test_the_login_reaches_producer_consumer_and_admin_client(
    own_broker: OwnBroker, topic_name: str
) -> None:
    sink = as_user(topic_name, own_broker.guarded, "owner")
    check_topics(Clients(sink))
    with ShardSink(Clients(sink), APP, WHOLE) as made:
        made.publish(Content(some_events(WHOLE, 10)))
        assert sum(len(part.aggregate_ids) for part in made.fold({})) == 10
    assert {c.status for c in checks(Clients(sink), APP, 1)} == {"ok"}


def test_a_wrong_password_is_said_at_once_and_never_shown(
    own_broker: OwnBroker, topic_name: str
) -> None:
    sink = as_user(topic_name, own_broker.guarded, "owner", password="not-this-word")
    with pytest.raises(SinkError) as caught:
        check_topics(Clients(sink))
    assert (caught.value.code, caught.value.retriable) == ("sink.auth_failed", False)
    assert "not-this-word" not in str(caught.value)
    with pytest.raises(SinkError) as caught:
        ShardSink(Clients(sink), APP, WHOLE).ready()
    assert caught.value.code == "sink.auth_failed"


def test_a_client_without_the_login_is_told_that_connections_are_closed(
    own_broker: OwnBroker, topic_name: str
) -> None:
    with pytest.raises(SinkError) as caught:
        check_topics(Clients(settings(topic_name, own_broker.guarded)))
    assert caught.value.code == "sink.unreachable"
    closed = f"{own_broker.guarded}: Disconnected: connection closed by peer"
    assert closed in caught.value.message
    assert "security.protocol" in str(caught.value.suggestion)


def test_each_permission_that_is_missing_is_named(own_broker: OwnBroker) -> None:
    topic = f"orders.{uuid.uuid4().hex[:8]}"
    address, guarded = own_broker.open, own_broker.guarded
    check_topics(Clients(settings(topic, address)))
    poor = as_user(topic, guarded, "poor")

    with pytest.raises(SinkError) as caught:
        check_topics(Clients(poor))
    assert caught.value.code == "sink.not_authorized", "what it may not describe is not there"
    assert "Describe, Read, Write on" in caught.value.message

    allow(address, ResourceType.TOPIC, topic, AclOperation.DESCRIBE)
    with pytest.raises(SinkError) as caught:
        check_topics(Clients(poor))
    assert caught.value.message.startswith("this account lacks rights: Read, Write on")
    with pytest.raises(SinkError) as caught:
        ShardSink(Clients(poor), APP, WHOLE).ready()
    assert caught.value.code == "sink.not_authorized"
    assert "transactional ids" in (caught.value.suggestion or "")
    transactions = {c.name: c for c in checks(Clients(poor), APP, 1)}["transactions"]
    assert (transactions.status, transactions.code) == ("wrong", "sink.not_authorized")

    allow(address, ResourceType.TRANSACTIONAL_ID, "eventpub.", AclOperation.WRITE)
    with ShardSink(Clients(poor), APP, WHOLE) as sink:
        with pytest.raises(SinkError) as caught:
            sink.publish(Content(some_events(WHOLE, 10)))
        assert (caught.value.code, caught.value.retriable) == ("sink.not_authorized", False)
        assert read_topic(address, topic) == []

    allow(address, ResourceType.TOPIC, topic, AclOperation.WRITE)
    with ShardSink(Clients(poor), APP, WHOLE) as sink:
        assert sink.publish(Content(some_events(WHOLE, 10))).events == 10
        with pytest.raises(SinkError) as caught:
            list(sink.fold({}))
        assert (caught.value.code, caught.value.retriable) == ("sink.not_authorized", False)

    allow(address, ResourceType.TOPIC, topic, AclOperation.READ)
    check_topics(Clients(poor))
    with ShardSink(Clients(poor), APP, WHOLE) as sink:
        assert sum(len(part.aggregate_ids) for part in sink.fold({})) == 10
