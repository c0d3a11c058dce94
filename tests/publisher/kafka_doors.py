"""One broker with a door for each way of logging in, its certificates, and tokens for it."""

from __future__ import annotations

import base64
import datetime
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from eventpub.local.processes import free_port
from eventpub.local.servers import Kafka
from tests.servers.kafka import kafka

PASSWORD = "correct-horse-battery"
USER = "publisher"
REAUTHENTICATION_MS = 3000
_LOGIN = "org.apache.kafka.common.security"


@dataclass(frozen=True)
class Doors:
    """The addresses of one broker; all but `open` by the name `localhost`, as its certificate.

    Attributes:
        scram: SCRAM-SHA-512 over TLS; demands a new login every 3 s.
        plain: PLAIN over TLS.
        token: OAUTHBEARER, unsecured tokens.
        mutual: TLS with a certificate of the client, whose name is `CN=publisher`.
        certificates: a folder with ca.pem, other-ca.pem, client.pem and client.key.
        issuer: the token endpoint of an identity provider that knows `USER` by its `PASSWORD`.
        issued: how many tokens it has given out, one entry each.
    """

    server: Kafka
    open: str
    scram: str
    plain: str
    token: str
    mutual: str
    certificates: Path
    issuer: str
    issued: list[float]


@contextmanager
def doors(folder: Path) -> Iterator[Doors]:
    """Starts it. Who is neither `USER` nor without a name may do what ACLs allow: nothing."""
    certificates = folder / "certificates"
    certificates.mkdir(parents=True)
    _certificates(certificates)
    names = ["PLAINTEXT", "CONTROLLER", "SCRAM", "PLAIN", "TOKEN", "MUTUAL"]
    ports = {name: free_port() for name in names}

    def listeners(*, controller: bool) -> str:
        hosts = {"PLAINTEXT": "127.0.0.1", "CONTROLLER": "127.0.0.1"}
        return ",".join(
            f"{name}://{hosts.get(name, 'localhost')}:{port}"
            for name, port in ports.items()
            if controller or name != "CONTROLLER"
        )

    tls = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificates / "broker.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificates / "ca.pem"),
    }
    properties = tls | {
        "listeners": listeners(controller=True),
        "advertised.listeners": listeners(controller=False),
        "controller.quorum.voters": f"1@127.0.0.1:{ports['CONTROLLER']}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
        "SCRAM:SASL_SSL,PLAIN:SASL_SSL,TOKEN:SASL_PLAINTEXT,MUTUAL:SSL",
        "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.scram.scram-sha-512.sasl.jaas.config": f"{_LOGIN}.scram.ScramLoginModule"
        " required;",
        "listener.name.scram.scram-sha-512.connections.max.reauth.ms": str(REAUTHENTICATION_MS),
        "listener.name.plain.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.plain.plain.sasl.jaas.config": f"{_LOGIN}.plain.PlainLoginModule required"
        f' user_{USER}="{PASSWORD}" user_poor="{PASSWORD}";',
        "listener.name.token.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.token.oauthbearer.sasl.jaas.config": f"{_LOGIN}.oauthbearer."
        'OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";',
        "listener.name.mutual.ssl.client.auth": "required",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:{USER};User:CN={USER}",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    }
    issued: list[float] = []
    with (
        kafka(folder / "kafka", port=ports["PLAINTEXT"], properties=properties) as server,
        _issuer(issued) as issuer,
    ):
        admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        upsertion = UserScramCredentialUpsertion(USER, scram, PASSWORD.encode())
        for done in admin.alter_user_scram_credentials([upsertion]).values():
            done.result(20)
        yield Doors(
            server=server,
            open=server.bootstrap_servers,
            scram=f"localhost:{ports['SCRAM']}",
            plain=f"localhost:{ports['PLAIN']}",
            token=f"localhost:{ports['TOKEN']}",
            mutual=f"localhost:{ports['MUTUAL']}",
            certificates=certificates,
            issuer=issuer,
            issued=issued,
        )


def renew_client(folder: Path, target: Path, life: datetime.timedelta) -> None:
    """Writes a certificate of the client and its key, `renewed.pem` and `renewed.key`."""
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    signs = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    client, key = _certificate(USER, (authority, signs), life)
    _write(target / "renewed.pem", client)
    _write(target / "renewed.key", key)


@contextmanager
def _issuer(issued: list[float]) -> Iterator[str]:
    """Serves OAuth's client credentials grant; the address."""
    known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = self.rfile.read(int(self.headers["Content-Length"])).decode()
            knows = self.headers["Authorization"] == f"Basic {known}"
            if knows and "grant_type=client_credentials" in form:
                token, expires = unsecured_token(5.0)
                issued.append(expires)
                answer = {"access_token": token, "token_type": "Bearer", "expires_in": 5}
            else:
                answer = {"error": "invalid_client"}
            body = json.dumps(answer).encode()
            self.send_response(200 if "access_token" in answer else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/token"
        server.shutdown()


def _certificates(folder: Path) -> None:
    authority = _certificate("authority", None)
    _write(folder / "ca.pem", authority[0])
    _write(folder / "ca.key", authority[1])
    _write(folder / "other-ca.pem", _certificate("another authority", None)[0])
    broker, key = _certificate("localhost", authority)
    _write(folder / "broker.pem", key, broker, authority[0])
    client, key = _certificate(USER, authority)
    _write(folder / "client.pem", client)
    _write(folder / "client.key", key)


def _write(file: Path, *parts: Any) -> None:
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(
        b"".join(
            part.public_bytes(pem)
            if isinstance(part, x509.Certificate)
            else part.private_bytes(pem, *plain)
            for part in parts
        )
    )


def _certificate(
    name: str,
    issuer: tuple[Any, Any] | None,
    life: datetime.timedelta = datetime.timedelta(days=1),
) -> tuple[Any, Any]:
    """A certificate for a name (also as a DNS name) and its key; without issuer a CA's."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + life)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        made = made.add_extension(names, critical=False)
    return made.sign(issuer[1] if issuer else key, hashes.SHA256()), key


def unsecured_token(life: float, user: str = USER) -> tuple[str, float]:
    """An unsigned token that lives for so many seconds, and when it expires."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": user, "iat": now - 200, "exp": now + life})
    texts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts
    ]
    return f"{'.'.join(texts)}.", now + life


# --- what a configuration names as sink.token_provider


def good_token(_: str) -> tuple[str, float]:
    """Lives for 5 s, so that it has to be called again."""
    return unsecured_token(5.0)


def expired_token(_: str) -> tuple[str, float]:
    """The client thinks that it is good, the broker does not."""
    return unsecured_token(-100.0)[0], time.time() + 100


def no_token(_: str) -> tuple[str, float]:
    """As when the identity provider is away."""
    raise ConnectionError("no identity provider today")
