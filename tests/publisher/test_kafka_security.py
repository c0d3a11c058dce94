"""Scenario D5 on a broker with passwords, tokens and certificates, by the installed command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from eventpub.config import Sink
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_topics
from eventpub.sink.topics import partition_counts, topic_ids
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, compare, insert
from tests.publisher.kafka_doors import (
    PASSWORD,
    REAUTHENTICATION_MS,
    USER,
    Doors,
    doors,
    renew_client,
)
from tests.publisher.test_set_up import ask, assert_both_say
from tests.servers.signals import restart
from tests.variants import variants

ROOT = Path(__file__).parents[2]
THIS = "tests.publisher.kafka_doors"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """One for all tests of this file."""
    with doors(tmp_path_factory.mktemp("doors")) as made:
        yield made


def through(publisher: Publisher, address: str, **sink: Any) -> None:
    """From now on to another address, in another way."""
    publisher.settings["sink"] |= {"bootstrap_servers": address, **sink}
    publisher.environment["PYTHONPATH"] = str(ROOT)


def tls(broker: Doors, **more: Any) -> dict[str, str]:
    """Properties of a client that trusts the broker's CA."""
    return {
        "security.protocol": "ssl",
        "ssl.ca.location": str(broker.certificates / "ca.pem"),
        **more,
    }


def password(broker: Doors, mechanism: str, **more: str) -> dict[str, str]:
    """Properties of a login by a password, over TLS."""
    login = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanism": mechanism,
        "sasl.username": USER,
        "sasl.password": PASSWORD,
    }
    return tls(broker, **(login | more))


def oidc(broker: Doors, **more: str) -> dict[str, str]:
    """Properties of a client that gets its tokens from an identity provider by itself."""
    return {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": broker.issuer,
        "sasl.oauthbearer.client.id": USER,
        "sasl.oauthbearer.client.secret": PASSWORD,
        **more,
    }


def of_file(
    publisher: Publisher, properties: dict[str, str], name: str = "sasl.password"
) -> dict[str, str]:
    """The password in a file of its own."""
    file = publisher.folder / "kafka-password"
    file.write_text(properties.pop(name) + "\n")
    return properties | {f"{name}.file": str(file)}


WAYS: dict[str, Callable[[Doors, Publisher], tuple[str, dict[str, Any]]]] = {
    "SCRAM-SHA-512, its password in a file, over TLS": lambda d, p: (
        d.scram,
        {"properties": of_file(p, password(d, "SCRAM-SHA-512"))},
    ),
    "PLAIN over TLS": lambda d, p: (d.plain, {"properties": password(d, "PLAIN")}),
    "tokens of a function": lambda d, p: (
        d.token,
        {
            "properties": {"security.protocol": "sasl_plaintext", "sasl.mechanism": "OAUTHBEARER"},
            "token_provider": f"{THIS}:good_token",
        },
    ),
    "tokens that librdkafka makes": lambda d, p: (
        d.token,
        {
            "properties": {
                "security.protocol": "sasl_plaintext",
                "sasl.mechanism": "OAUTHBEARER",
                "enable.sasl.oauthbearer.unsecure.jwt": "true",
                "sasl.oauthbearer.config": f"principal={USER}",
            }
        },
    ),
    "tokens of an identity provider, the secret in a file": lambda d, p: (
        d.token,
        {"properties": of_file(p, oidc(d), "sasl.oauthbearer.client.secret")},
    ),
    "a certificate": lambda d, p: (
        d.mutual,
        {
            "properties": tls(
                d,
                **{
                    "ssl.certificate.location": str(d.certificates / "client.pem"),
                    "ssl.key.location": str(d.certificates / "client.key"),
                },
            )
        },
    ),
}


@pytest.mark.parametrize("way", variants(WAYS))
def test_d5_every_client_logs_in_and_stays_in(
    publisher: Publisher, database: FreshDatabase, broker: Doors, way: str
) -> None:
    """`doctor`, `run`, `verify` and `gaps list`; the first way has to log in again meanwhile."""
    address, sink = WAYS[way](broker, publisher)
    through(publisher, address, **sink)
    publisher.topic.bootstrap_servers = broker.open
    done = publisher.command("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    publisher.start()
    versions = 0
    again = way.startswith(("SCRAM", "tokens of"))
    until = time.monotonic() + (2.5 * REAUTHENTICATION_MS / 1000 if again else 0)
    with database.connect() as connection, connection.cursor() as cursor:
        while not versions or time.monotonic() < until:
            versions += 1
            insert(cursor, "a", versions)
            time.sleep(0.2)
    publisher.until_published("a", [*range(1, versions + 1)])
    said = publisher.log.read_text()
    assert "waiting before a retry" not in said, said
    publisher.stop()  # what it publishes last is written down
    for command in (["verify"], ["gaps", "list"]):
        done = publisher.command(*command, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
    assert not compare(database, publisher.topic)
    done = publisher.command("config", "show")
    secrets = said + done.stdout + done.stderr
    assert PASSWORD not in secrets


WRONG: dict[str, tuple[Callable[[Doors], tuple[str, dict[str, Any]]], str, list[str]]] = {
    "a wrong password, SCRAM": (
        lambda d: (
            d.scram,
            {"properties": password(d, "SCRAM-SHA-512", **{"sasl.password": "no"})},
        ),
        "sink.auth_failed",
        ["sasl.password"],
    ),
    "a wrong password, PLAIN": (
        lambda d: (d.plain, {"properties": password(d, "PLAIN", **{"sasl.password": "no"})}),
        "sink.auth_failed",
        ["sasl.password"],
    ),
    "a mechanism that the broker does not take": (
        lambda d: (d.plain, {"properties": password(d, "SCRAM-SHA-512")}),
        "sink.auth_failed",
        ["sasl.mechanism"],
    ),
    "an expired token": (
        lambda d: (d.token, {**TOKENS, "token_provider": f"{THIS}:expired_token"}),
        "sink.auth_failed",
        ["token", "expired"],
    ),
    "a function that gives no token": (
        lambda d: (d.token, {**TOKENS, "token_provider": f"{THIS}:no_token"}),
        "sink.token_failed",
        ["sink.token_provider", "ConnectionError", "no identity provider today"],
    ),
    "an identity provider that does not know the secret": (
        lambda d: (
            d.token,
            {"properties": oidc(d, **{"sasl.oauthbearer.client.secret": "no"})},
        ),
        "sink.token_failed",
        ["invalid_client", "sasl.oauthbearer.client.secret"],
    ),
    "an identity provider that is away": (
        lambda d: (
            d.token,
            {
                "properties": oidc(
                    d, **{"sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1/token"}
                )
            },
        ),
        "sink.token_failed",
        ["127.0.0.1", "sasl.oauthbearer.token.endpoint.url"],
    ),
    "an unknown CA": (
        lambda d: (
            d.plain,
            {
                "properties": password(
                    d, "PLAIN", **{"ssl.ca.location": str(d.certificates / "other-ca.pem")}
                )
            },
        ),
        "sink.auth_failed",
        ["ssl.ca.location"],
    ),
    "a wrong host name": (
        lambda d: (
            d.plain.replace("localhost", "127.0.0.1"),
            {"properties": password(d, "PLAIN")},
        ),
        "sink.auth_failed",
        ["another host name", "sink.bootstrap_servers"],
    ),
    "no certificate of ours": (
        lambda d: (d.mutual, {"properties": tls(d)}),
        "sink.auth_failed",
        ["ssl.certificate.location"],
    ),
}
TOKENS: dict[str, Any] = {
    "properties": {"security.protocol": "sasl_plaintext", "sasl.mechanism": "OAUTHBEARER"}
}


@pytest.mark.parametrize("way", variants(WRONG, 2))
def test_d5_what_is_wrong_with_a_login_is_named_with_what_fixes_it(
    publisher: Publisher, broker: Doors, way: str
) -> None:
    make, code, words = WRONG[way]
    address, sink = make(broker)
    through(publisher, address, **sink)
    began = time.monotonic()
    said = ask(publisher, doctor_status=3)
    assert_both_say(said, code, *words)
    assert PASSWORD not in str(said)
    print(json.dumps(said.run), f"{time.monotonic() - began:.1f} s")


def test_d6_tokens_that_nothing_gives_are_named(publisher: Publisher, broker: Doors) -> None:
    """Its client would connect to nothing, and say nothing."""
    through(publisher, broker.token, **TOKENS)
    for command in (["run"], ["doctor"], ["config", "check"]):
        done = publisher.command(*command, "--json")
        assert done.returncode == 2, done.stdout
        error = json.loads(done.stdout)["error"]
        assert (error["code"], error["where"]) == ("config.contradiction", "sink.token_provider")


@pytest.mark.parametrize(
    ("name", "word"),
    [("no.such_module:token", "no.such_module"), (f"{THIS}:nothing", "nothing"), ("x y", "module")],
)
def test_d6_a_token_provider_that_is_not_there_is_named(
    publisher: Publisher, broker: Doors, name: str, word: str
) -> None:
    through(publisher, broker.token, **TOKENS, token_provider=name)
    for command in ("run", "doctor"):
        done = publisher.command(command, "--json")
        assert done.returncode in {1, 2}, done.stdout
        assert word in done.stdout
        assert "sink.token_provider" in done.stdout


def test_a_certificate_of_ours_that_is_renewed_is_used_from_then_on(
    broker: Doors, topic_name: str, tmp_path: Path
) -> None:
    """Also by the clients that a process keeps for as long as it lives."""
    life = timedelta(seconds=20)
    renew_client(broker.certificates, tmp_path, life)
    until = time.monotonic() + life.total_seconds() + 1
    files = {
        "ssl.certificate.location": str(tmp_path / "renewed.pem"),
        "ssl.key.location": str(tmp_path / "renewed.key"),
    }
    sink = Sink(topic=topic_name, bootstrap_servers=broker.mutual, properties=tls(broker, **files))
    check_topics(Clients(sink))
    renew_client(broker.certificates, tmp_path, timedelta(days=1))
    while time.monotonic() < until:
        time.sleep(0.1)
    restart(broker.server)  # as after ten idle minutes, the connections that there were are gone
    deadline = time.monotonic() + 60
    while topic_name not in partition_counts(Clients(sink), 20):
        assert time.monotonic() < deadline
    assert topic_name in topic_ids(Clients(sink), [topic_name])
