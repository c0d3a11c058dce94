"""Names of librdkafka's properties: the nearest one to a name that it does not know, and the name
under which the user has set one that it calls by another.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

_NAMES = """
    acks allow.auto.create.topics api.version.fallback.ms api.version.request
    api.version.request.timeout.ms auto.commit.interval.ms auto.offset.reset batch.num.messages
    batch.size bootstrap.servers broker.address.family broker.address.ttl
    broker.version.fallback check.crcs client.dns.lookup client.rack compression.codec
    compression.level compression.type connections.max.idle.ms coordinator.query.interval.ms
    debug delivery.timeout.ms enable.auto.commit enable.auto.offset.store enable.idempotence
    enable.metrics.push enable.partition.eof enable.sasl.oauthbearer.unsecure.jwt
    enable.sparse.connections enable.ssl.certificate.verification fetch.error.backoff.ms
    fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms
    fetch.wait.max.ms group.id group.instance.id group.protocol group.remote.assignor
    heartbeat.interval.ms https.ca.location https.ca.pem isolation.level linger.ms
    log.connection.close log.thread.name max.in.flight max.in.flight.requests.per.connection
    max.partition.fetch.bytes max.poll.interval.ms message.copy.max.bytes message.max.bytes
    message.send.max.retries message.timeout.ms metadata.max.age.ms
    metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy
    metadata.request.timeout.ms partition.assignment.strategy partitioner
    queue.buffering.backpressure.threshold queue.buffering.max.kbytes
    queue.buffering.max.messages queue.buffering.max.ms queued.max.messages.kbytes
    queued.min.messages receive.message.max.bytes reconnect.backoff.jitter.ms
    reconnect.backoff.max.ms reconnect.backoff.ms request.required.acks request.timeout.ms
    retries retry.backoff.max.ms retry.backoff.ms sasl.kerberos.keytab sasl.kerberos.kinit.cmd
    sasl.kerberos.min.time.before.relogin sasl.kerberos.principal sasl.kerberos.service.name
    sasl.mechanism sasl.mechanisms sasl.oauthbearer.assertion.algorithm
    sasl.oauthbearer.assertion.claim.aud sasl.oauthbearer.assertion.claim.exp.seconds
    sasl.oauthbearer.assertion.claim.iss sasl.oauthbearer.assertion.claim.jti.include
    sasl.oauthbearer.assertion.claim.nbf.seconds sasl.oauthbearer.assertion.claim.sub
    sasl.oauthbearer.assertion.file sasl.oauthbearer.assertion.jwt.template.file
    sasl.oauthbearer.assertion.private.key.file
    sasl.oauthbearer.assertion.private.key.passphrase sasl.oauthbearer.assertion.private.key.pem
    sasl.oauthbearer.client.credentials.client.id
    sasl.oauthbearer.client.credentials.client.secret sasl.oauthbearer.client.id
    sasl.oauthbearer.client.secret sasl.oauthbearer.config sasl.oauthbearer.extensions
    sasl.oauthbearer.grant.type sasl.oauthbearer.metadata.authentication.type
    sasl.oauthbearer.method sasl.oauthbearer.scope sasl.oauthbearer.sub.claim.name
    sasl.oauthbearer.token.endpoint.url sasl.password sasl.username security.protocol
    session.timeout.ms socket.connection.setup.timeout.ms socket.keepalive.enable
    socket.nagle.disable socket.receive.buffer.bytes socket.send.buffer.bytes socket.timeout.ms
    ssl.ca.certificate.stores ssl.ca.location ssl.ca.pem ssl.certificate.location
    ssl.certificate.pem ssl.cipher.suites ssl.crl.location ssl.curves.list
    ssl.endpoint.identification.algorithm ssl.engine.id ssl.engine.location ssl.key.location
    ssl.key.password ssl.key.pem ssl.keystore.location ssl.keystore.password ssl.providers
    ssl.sigalgs.list statistics.interval.ms sticky.partitioning.linger.ms
    topic.metadata.propagation.max.ms topic.metadata.refresh.fast.interval.ms
    topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse transaction.timeout.ms
    transactional.id
"""

NAMES = tuple(_NAMES.split())

_ALIASES = {
    "acks": "request.required.acks",
    "bootstrap.servers": "metadata.broker.list",
    "compression.type": "compression.codec",
    "delivery.timeout.ms": "message.timeout.ms",
    "linger.ms": "queue.buffering.max.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
    "retries": "message.send.max.retries",
    "sasl.mechanism": "sasl.mechanisms",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
}
"""By an alias the name that the client's messages have."""

_NAME = re.compile(r"[a-z0-9]+(?:\.[a-z0-9]+)+|retries|acks|debug|partitioner")
_UNKNOWN = re.compile(r'No such configuration property: "([^"]*)"')


def unknown_name(reason: str) -> str | None:
    """The property that the client says it does not know; None: it says another thing."""
    found = _UNKNOWN.search(reason)
    return None if found is None else found.group(1)


def refused_value(reason: str, properties: Mapping[str, str]) -> tuple[str, str] | None:
    """The user's property that the client's words are about, and the words with the user's name.

    None: they speak of none that the user has set.
    """
    for said in _NAME.findall(reason):
        names = [said, *(alias for alias, name in _ALIASES.items() if name == said)]
        own = next((name for name in names if name in properties), None)
        if own is not None:
            return own, reason.replace(said, own).strip()
    return None


def nearest(name: str) -> str | None:
    """The known name that a misspelt one may mean; None: none is near."""
    found = difflib.get_close_matches(name.lower().replace("_", "."), NAMES, n=1, cutoff=0.75)
    return found[0] if found else None
