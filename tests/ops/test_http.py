"""The address of a publisher is asked by very many, slowly, or for what takes long."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eventpub.channel import Request
from eventpub.ops.asking import ask_running
from eventpub.ops.http import MOST_CONNECTIONS
from tests.coordinator.life import config
from tests.ops.served import Source, answer, exchange, logged, running, serving, status_of
from tests.publisher.harness import eventually

HEALTHZ = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
CONFIG = config(ops={"http": "127.0.0.1:0", "token": "a token of the dashboard"})


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


SLOW = {
    "say nothing": b"",
    "begin a request": b"GET /status HTTP/1.1\r\nHost: loc",
    "begin a body": b"POST /pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\nx",
    "have been answered": HEALTHZ,
}


@pytest.mark.parametrize("how", SLOW)
def test_the_probe_is_answered_beside_many_connections_that(how: str) -> None:
    """64 of them had /healthz answered with 503, and an orchestrator end a healthy publisher."""
    with serving(CONFIG, Source()) as address, ExitStack() as opened:
        for _ in range(300):
            connection = opened.enter_context(socket.create_connection(address, 10))
            connection.sendall(SLOW[how])
        assert exchange(address, HEALTHZ).endswith(b"ok\n")


def test_who_does_not_take_the_answer_is_let_go() -> None:
    source = Source()
    source.found["checks"][0]["message"] = "x" * 20_000_000
    with serving(CONFIG, source) as address, ExitStack() as opened:
        first = opened.enter_context(socket.create_connection(address, 10))
        first.sendall(get("/status"))
        assert first.recv(1)
        for _ in range(MOST_CONNECTIONS):
            opened.enter_context(socket.create_connection(address, 10)).sendall(HEALTHZ)
        assert exchange(address, HEALTHZ).endswith(b"ok\n")
        assert not answer(first).endswith(b"}")


def test_a_page_that_fails_says_so_once_and_its_traceback_is_in_the_log() -> None:
    source = Source()
    with logged() as log, serving(CONFIG, source) as address:
        source.found = {"is_alive": True}
        received = exchange(address, get("/status"))
        assert status_of(received) == 500
        assert b"KeyError" not in received
        assert exchange(address, HEALTHZ).endswith(b"ok\n")
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    [line] = [line for line in lines if line["level"] != "info"]
    assert (line["event"], line["error"]) == ("a page failed", "KeyError: 'checks'")
    assert "Traceback" in line["exception"]


class Slow(Source):
    """Its shards answer when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        self.may_answer.wait(timeout)
        return super().ask(request, timeout)


def test_many_that_ask_for_gaps_wait_for_one_list_and_too_many_are_refused() -> None:
    source = Slow()
    with serving(CONFIG, source) as address, ExitStack() as opened:
        waiting = [opened.enter_context(socket.create_connection(address, 10)) for _ in range(40)]
        for connection in waiting:
            connection.sendall(get("/gaps"))
        eventually(lambda: status_of(exchange(address, get("/gaps"))) == 503)
        assert exchange(address, HEALTHZ).endswith(b"ok\n")
        source.may_answer.set()
        found = [status_of(answer(connection)) for connection in waiting]
        assert set(found) == {200, 503}
        assert source.lists == 1


def test_shards_that_have_not_answered_are_not_shown_as_without_gaps() -> None:
    source = Source()
    source.outcome = None
    with serving(CONFIG, source) as address:
        for _ in range(2):
            received = exchange(address, get("/gaps"))
            assert status_of(received) == 503
            assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]
        assert source.lists == 1


def test_wrong_tokens_are_logged_once_and_slowed() -> None:
    """Guesses cost nothing, and nobody knew of them."""
    wrong = b"POST /pause HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer guess\r\n\r\n"
    source = Source()
    with logged() as written, serving(CONFIG, source) as address:
        began = time.monotonic()
        assert [status_of(exchange(address, wrong)) for _ in range(2)] == [401, 401]
        assert time.monotonic() - began >= 2
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    [refused] = [line for line in lines if "refused" in line["event"]]
    assert (refused["client"], refused["path"]) == ("127.0.0.1", "/pause")
    assert "guess" not in written.getvalue()
    assert source.done == []


PAUSE = "POST /pause HTTP/1.1\r\nAuthorization: Bearer a token of the dashboard\r\n"


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0", "127.0.0.2:0"])
def test_on_loopback_only_this_machines_names_are_answered(address: str) -> None:
    """A page of another site could make its own name lead here, also to ::1."""
    with serving(config(ops={"http": address}), Source()) as at:
        for name, status in (("evil.example", 400), ("[::2]:80", 400), ("[", 400), ("", 400)):
            request = f"GET /status HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()
            assert status_of(exchange(at, request)) == status, name
        for name in ("127.0.0.1", "localhost:8080", "[::1]", "[::1]:9464"):
            request = f"GET /status HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()
            assert status_of(exchange(at, request)) == 200, name


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("localhost:9464", "", 200),
        ("localhost:9464", "Origin: http://localhost:9464\r\n", 200),
        ("localhost:9464", "Origin: http://evil.example\r\n", 403),
        ("localhost:9464", "Origin: null\r\n", 403),
        ("localhost:9464", "Origin: http://localhost:8080\r\n", 403),
        (
            "localhost:9464",
            "Origin: https://ops.example\r\nX-Forwarded-Host: ops.example\r\n",
            200,
        ),
    ],
)
def test_another_sites_page_is_refused_whatever_token_it_has(
    host: str, headers: str, status: int
) -> None:
    with serving(CONFIG, Source()) as address:
        request = f"{PAUSE}Host: {host}\r\n{headers}Content-Length: 0\r\n\r\n".encode()
        assert status_of(exchange(address, request)) == status


def test_the_publishers_own_user_needs_no_token_and_strangers_have_no_page_for_requests(
    tmp_path: Path,
) -> None:
    source = Source()
    own = config(
        app={"id": "a", "state_dir": str(tmp_path)}, ops={"token": "a token of the dashboard"}
    )
    with running(own, source) as state:
        assert ask_running(state, "pause", {"by": "ann"}) == {"is_paused": True}
        assert ask_running(state, "request", {"request": {"id": "r"}, "timeout": 1}) is None
    assert source.done == [True]
    with serving(CONFIG, source) as address:
        for path in ("/request", "/withdraw"):
            asked = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
            assert status_of(exchange(address, asked.encode())) == 404
    assert source.done == [True]
