"""The pages are sent what no browser sends, with the token and without: nothing but what is
documented is answered, nothing is done without the token, and no secret or traceback is seen."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

import pytest

from eventpub.channel import request_of
from eventpub.ops import http
from tests.coordinator.life import config
from tests.ops.served import Source, answer, exchange, logged, serving, status_of

TOKEN = "the-token-of-this-dashboard"
PASSWORD = "the-password-of-the-database"
SASL = "the-password-of-the-broker"
CONFIG = config(
    ops={"http": "127.0.0.1:0", "token": TOKEN},
    store={"url": f"mysql+pymysql://u:{PASSWORD}@h:1/d"},
    sink={"topic": "events", "properties": {"sasl.password": SASL}},
)

CASES = 4_000
FAULTS = {503, 504}
"""Of the server, that are documented."""

ACTIONS = [
    "/gap",
    "/gap?aggregate_id=a",
    "/pause",
    "/resume",
    "/retry?aggregate_id=a",
    "/retry",
    "/skip",
    "/skip?aggregate_id=a",
]
ACTIONS += [
    f"/skip?aggregate_id=a&from_version={first}&to_version={last}"
    for first in ("1", "-1", "0x1", "", "9" * 30, "9" * 5_000, "%00", "1e9", "%D9%A1", "NaN")
    for last in ("2", "9" * 30)
]
ACTIONS += [
    f"/retry?aggregate_id={a}" for a in ("%ff", "%00", "%ed%a0%80", "x" * 9_000, "%", "a&a")
]
READING = ["/", "/healthz", "/readyz", "/metrics", "/status", "/history", "/config", "/gaps"]
READING += ["/dashboard.js", "/d3.min.js", "/no-page", "/a/b/c", "//", "/%00", "/..%2f..%2fetc"]
READING += [
    "/%ff%fe",
    "/pause/",
    "/" + "x" * 9_000,
    f"/status?token={TOKEN}",
    "/?" + "a=b&" * 2_000,
]
TARGETS = ["*", "http://somewhere.example/pause", "pause", "", "/a b", "/\xff", "/\0", "/#/pause"]
METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH"]
METHODS += ["BREW", "get", "", "G T", "\0", "P" * 20_000, "POST\r\nX: y"]
VERSIONS = ["HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.1.1", "http/1.1", "", "\xff"]
HEADERS = [
    "Host: localhost",
    "Host: somewhere.example",
    "Host: localhost, somewhere.example",
    "Host: [::1]:80",
    "Host:",
    "Content-Length: 5",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999999999",
    "Content-Length: 0\r\nContent-Length: 7",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: x",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x",
    "Connection: close",
    "Range: bytes=0-1,5-2,-99999999999999999999",
    "Accept-Encoding: \xff",
    "Content-Type: application/json",
    "Content-Type: multipart/form-data; boundary=" + "-" * 300,
    "X-Forwarded-For: \0",
    "X-HTTP-Method-Override: POST",
    "X: " + "y" * 15_000,
    "X: " + "y" * 200_000,
    "\r\n".join(f"X-{n}: {n}" for n in range(500)),
    " folded",
    "no colon",
    ": no name",
    "Authorization: Bearer",
    "Authorization: Bearer \xff",
    "Authorization: Bearer " + "x" * 9_000,
    "Authorization: Basic " + "eDp5",
    f"Cookie: authorization=Bearer {TOKEN}",
    f"X-Authorization: Bearer {TOKEN}",
    f"Authorization: Bearer {TOKEN}x",
    f"Authorization: Bearer {TOKEN[:-1]}",
    f"Authorization: Bearer wrong\r\nAuthorization: Bearer {TOKEN}",
]
BODIES = [
    b"",
    b"{",
    b"[" * 100_000,
    b'{"is_paused": "yes"}',
    b"\0" * 1_000,
    b"\xff\xfe\xfd",
    b"null",
]
BODIES += [b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffffffff\r\n", b"\r\n" * 1_000]
BODIES += [f"token={TOKEN}&aggregate_id=a".encode(), f"Authorization: Bearer {TOKEN}\r\n".encode()]
LARGE = b"x" * 10_000_000


@dataclass(frozen=True)
class Case:
    """What is sent, and whether it ends there or is left half open."""

    sent: bytes
    has_token: bool
    is_ended: bool


def cases(seed: int) -> Iterator[Case]:
    chance = random.Random(seed)
    for number in range(CASES):
        has_token = number % 3 == 0
        target = chance.choice(
            chance.choice([ACTIONS, ACTIONS, ACTIONS, READING, READING, TARGETS])
        )
        method = chance.choice(["POST", "POST", "GET", chance.choice(METHODS)])
        version = chance.choice(["HTTP/1.1"] * 6 + [chance.choice(VERSIONS)])
        headers = ["Host: 127.0.0.1"] * (chance.random() < 0.9)
        headers += [f"Authorization: Bearer {TOKEN}"] * has_token
        headers += chance.sample(HEADERS, chance.choice([0, 0, 1, 1, 2, 4]))
        body = LARGE if number % 100 == 0 else chance.choice(BODIES)
        if chance.random() < 0.6:
            headers.append(f"Content-Length: {len(body)}")
        text = "\r\n".join([f"{method} {target} {version}", *headers, "", ""])
        sent = text.encode("latin-1") + body
        if chance.random() < 0.1:
            sent = bytes(chance.choice([b, b, b ^ 1 << chance.randrange(8)]) for b in sent[:2_000])
        if chance.random() < 0.1:
            sent = sent[: chance.randrange(len(sent))]
        yield Case(sent, has_token, chance.random() < 0.8)


def play(address: tuple[str, int], case: Case) -> bytes:
    with socket.create_connection(address, 0.5 if case.is_ended else 0.2) as connection:
        with suppress(OSError):
            connection.sendall(case.sent)
            if case.is_ended:
                connection.shutdown(socket.SHUT_WR)
        return answer(connection)


def check(received: bytes, what: object) -> None:
    status = status_of(received)
    assert status < 500 or status in FAULTS, (what, received[:300])
    for secret in (TOKEN, PASSWORD, SASL):
        assert secret.encode() not in received, what
    assert b"Traceback" not in received, what


def test_whatever_is_sent_nothing_is_done_without_the_token_and_nothing_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_REFUSED_AFTER", 0.0)  # longer than this sender waits for answers
    stranger, owner = Source(), Source()
    answered: dict[int, int] = {}
    with (
        logged() as log,
        serving(CONFIG, stranger) as strangers,
        serving(CONFIG, owner) as owners,
        ThreadPoolExecutor(16) as pool,
    ):
        played = list(cases(seed=20261125))
        at = [owners if case.has_token else strangers for case in played]
        for case, received in zip(played, pool.map(play, at, played), strict=True):
            check(received, case.sent[:300])
            answered[status_of(received)] = answered.get(status_of(received), 0) + 1
        for address in (strangers, owners):
            healthy(address)
    assert stranger.done == []
    assert {True, False} <= {done for done in owner.done if isinstance(done, bool)}
    asked = [done for done in owner.done if not isinstance(done, bool)]
    assert {request.action for request in asked} == {"retry", "skip"}
    assert [request_of(asdict(request)) for request in asked] == asked
    assert answered.keys() >= {0, 200, 400, 401, 404, 405}, answered
    said = [json.loads(line)["event"] for line in log.getvalue().splitlines()]
    refused = "an action was refused: the token is not ops.token"
    assert {*said} == {"metrics, health and dashboard", refused}, "no traceback"
    assert said.count(refused) < 10, "nobody fills the log"


def healthy(address: tuple[str, int]) -> None:
    found = exchange(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", timeout=1.0)
    assert found.endswith(b"ok\n"), found


def test_half_open_connections_and_slow_senders_keep_nobody_out() -> None:
    request = b"POST /pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n" + b"x" * 100
    source = Source()
    with serving(CONFIG, source) as address, ExitStack() as opened:
        slow = []
        for number in range(200):
            connection = opened.enter_context(socket.create_connection(address, 5))
            slow.append(connection)
            if number % 3 == 0:
                connection.shutdown(socket.SHUT_WR)
        for at in range(0, len(request), 8):
            for connection in slow:
                with suppress(OSError):
                    connection.sendall(request[at : at + 8])
            if at % 40 == 0:
                healthy(address)
        healthy(address)
    assert source.done == []
