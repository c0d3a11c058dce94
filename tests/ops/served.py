"""The pages of a publisher that a test plays, served as a real one serves them."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from eventpub.channel import Request
from eventpub.config import Config
from eventpub.log import configure
from eventpub.ops.pages import Pages
from eventpub.state import StateDir
from tests.ops.documents import document, hold
from tests.publisher.harness import eventually


class Source:
    """Answers as a publisher does.

    Attributes:
        found: the status document.
        outcome: the answer to a retry or a skip; None: no shard answers.
        done: what was done, oldest first.
        lists: how often the shards were asked for their holds.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = document() | {"holds_open": 1}
        self.outcome: str | None = "found"
        self.done: list[Any] = []
        self.lists = 0

    def status(self) -> dict[str, Any]:
        return self.found

    def pause(self, is_paused: bool, by: str) -> None:
        self.done.append(is_paused)

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        if request.action == "list":
            self.lists += 1
            held = [hold("order-1", 1, 3, now=self.found["database_time"])]
            outcome = None if self.outcome is None else json.dumps({"holds": held, "count": 1})
        else:
            self.done.append(request)
            outcome = self.outcome
        return {"answers": None if outcome is None else {"0": outcome}, "error": None}

    def withdraw(self, id: str) -> None:
        self.done.append(id)


@contextmanager
def running(configuration: Config, source: Source) -> Iterator[StateDir]:
    """A publisher with this state directory, which commands can ask."""
    state = StateDir(configuration.app.state_dir)
    ops = configuration.ops.model_copy(update={"http": ""})
    pages = Pages(configuration.model_copy(update={"ops": ops}), source, state)
    state.lock()
    try:
        pages.begin()
        yield state
    finally:
        pages.end()
        state.unlock()


@contextmanager
def serving(configuration: Config, source: Source) -> Iterator[tuple[str, int]]:
    """At this address."""
    with TemporaryDirectory() as folder:
        yield from _serving(Pages(configuration, source, StateDir(Path(folder))))


def _serving(pages: Pages) -> Iterator[tuple[str, int]]:
    pages.begin()
    host, _, port = pages.address.rpartition(":")
    address = host.strip("[]"), int(port)
    try:
        eventually(lambda: exchange(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        yield address
    finally:
        pages.end()


@contextmanager
def logged() -> Iterator[StringIO]:
    """What a publisher writes to its log, one JSON object a line, and whatever else to stderr."""
    root, before = logging.getLogger(), structlog.get_config()
    kept = root.handlers[:], root.filters[:], root.level
    with redirect_stderr(StringIO()) as written:
        configure("json")
        try:
            yield written
        finally:
            root.handlers[0].flush()
            root.handlers[:], root.filters[:] = kept[:2]
            root.setLevel(kept[2])
            structlog.configure(**before)


def exchange(address: tuple[str, int], sent: bytes, timeout: float = 10.0) -> bytes:
    """What is answered to these bytes: as much as comes until the answer is whole, or it ends."""
    with socket.create_connection(address, timeout) as connection:
        with suppress(OSError):  # it need not read all of what it refuses
            connection.sendall(sent)
        return answer(connection)


def answer(connection: socket.socket) -> bytes:
    """The first answer that comes; b"": none."""
    received = b""
    with suppress(OSError):
        while more := connection.recv(65_536):
            received += more
            head, separator, body = received.partition(b"\r\n\r\n")
            if separator:
                fields = head.lower().split(b"\r\n")
                lengths = [int(f[15:]) for f in fields if f.startswith(b"content-length:")]
                if head.startswith((b"HTTP/1.1 204", b"HTTP/1.1 304")):
                    break
                if lengths and len(body) >= lengths[0]:
                    break
    return received


def status_of(received: bytes) -> int:
    """The status of an answer; 0: there was none."""
    return int(received.split(b" ", 2)[1]) if received.startswith(b"HTTP/") else 0
