"""A broker of the sink's own: with passwords, permissions, a proxy before it, little patience."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from eventpub import config
from eventpub.local.processes import free_port
from eventpub.local.servers import Kafka
from eventpub.private_apis import bulk
from eventpub.sink.client import Clients
from eventpub.sink.shard import ShardSink
from tests import cautions
from tests.servers.kafka import kafka
from tests.sink.helpers import APP, WHOLE
from tests.sink.proxy import Proxy

PASSWORDS = {"owner": "owner-word", "poor": "poor-word"}


@dataclass(frozen=True)
class OwnBroker:
    """The addresses of one broker.

    Attributes:
        open: asks for nothing.
        guarded: asks for a password, and for permissions.
        proxied: leads through `proxy`.
        to_itself: a proxy before what the broker sends to itself, such as a transaction's markers.
        server: the broker.
    """

    open: str
    guarded: str
    proxied: str
    proxy: Proxy
    to_itself: Proxy
    server: Kafka


@pytest.fixture(scope="session")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    """A broker with several doors, which stays up."""
    with broker_with_doors(tmp_path_factory.mktemp("own")) as made:
        yield made


@contextmanager
def broker_with_doors(folder: Path) -> Iterator[OwnBroker]:
    """A broker that can be reached in several ways."""
    names = ["PLAINTEXT", "CONTROLLER", "GUARDED", "PROXIED", "ITSELF"]
    *inside, outside, around = (free_port() for _ in range(len(names) + 2))
    ports = dict(zip(names, inside, strict=True))
    doors = {**ports, "PROXIED": outside, "ITSELF": around}
    users = " ".join(f'user_{name}="{word}"' for name, word in PASSWORDS.items())
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    properties = {
        "listeners": _listeners(ports),
        "advertised.listeners": _listeners({k: v for k, v in doors.items() if k != "CONTROLLER"}),
        "controller.quorum.voters": f"1@127.0.0.1:{ports['CONTROLLER']}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
        "GUARDED:SASL_PLAINTEXT,PROXIED:PLAINTEXT,ITSELF:PLAINTEXT",
        "inter.broker.listener.name": "ITSELF",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.guarded.plain.sasl.jaas.config": f"{module} required {users};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # a transaction that has timed out is aborted at once, not up to 10 s later
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
        "super.users": "User:ANONYMOUS;User:owner",
    }
    proxy, to_itself = Proxy(outside, ports["PROXIED"]), Proxy(around, ports["ITSELF"])
    with kafka(folder, port=ports["PLAINTEXT"], properties=properties) as server:
        yield OwnBroker(
            open=f"127.0.0.1:{ports['PLAINTEXT']}",
            guarded=f"127.0.0.1:{ports['GUARDED']}",
            proxied=f"127.0.0.1:{outside}",
            proxy=proxy,
            to_itself=to_itself,
            server=server,
        )
        proxy.close()
        to_itself.close()


@pytest.fixture
def new_sink(sink: config.Sink) -> Iterator[Callable[[], ShardSink]]:
    """Producers of the whole topic, one after the other; of the module's own `sink`."""
    made: list[ShardSink] = []

    def make() -> ShardSink:
        made.append(ShardSink(Clients(sink), APP, WHOLE))
        made[-1].ready()
        return made[-1]

    yield make
    for each in made:
        each.close()


def _listeners(ports: dict[str, int]) -> str:
    return ",".join(f"{door}://127.0.0.1:{port}" for door, port in ports.items())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches are handed over like large ones, so that all tests here go both ways."""
    monkeypatch.setattr(bulk, "WORTHWHILE", 10)


@pytest.fixture(autouse=True)
def _nothing_unanswered() -> None:
    """What other tests have left without an answer fences nobody here."""
    cautions.forget_all()
