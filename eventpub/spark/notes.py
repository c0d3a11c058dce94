"""Notes and requests between Spark's processes on the driver's machine and the publisher.

The planner and the end of each batch run in Spark's own processes. They leave notes in a file; the
publisher leaves requests for the planner in another, until a committed batch has answered them. The
next start removes both files.
"""

from __future__ import annotations

import fcntl
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, Any

import structlog

from eventpub.channel import MalformedError, Request, request_of
from eventpub.config import Config
from eventpub.coordinator.requests import COMMANDS, paused
from eventpub.errors import EventpubError
from eventpub.index import glance
from eventpub.state import StateDir
from eventpub.state_files import replace_file

_MOST_BYTES = 1 << 20
"""Limit of pending notes, for a publisher that hangs."""

_ASKED = "asked.json"

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")

Waiting = tuple[Request, "queue.SimpleQueue[dict[int, str]]", dict[int, str]]


class Notes:
    def __init__(self, state: StateDir) -> None:
        self._file = state.spark_scratch / "notes"

    def put(self, note: dict[str, Any]) -> None:
        """Leave a note; dropped if the disk is full or too many are pending."""
        with suppress(OSError), self._opened(fcntl.LOCK_EX) as file:
            if file.tell() < _MOST_BYTES:  # on a line of its own, also after one that was cut off
                file.write(f"\n{json.dumps(note, default=str)}\n")

    def take(self) -> list[dict[str, Any]]:
        """All notes; none while one is being left, since who leaves it may be frozen."""
        lines: list[str] = []
        with suppress(OSError), self._opened(fcntl.LOCK_EX | fcntl.LOCK_NB) as file:
            if file.tell():
                file.seek(0)
                lines = file.readlines()
                file.truncate(0)
        found = []
        for line in lines:
            with suppress(ValueError):  # an empty line, or one cut off by a full disk
                found.append(json.loads(line))
        return found

    @contextmanager
    def _opened(self, lock: int) -> Iterator[IO[str]]:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._file.open("a+") as file:
            fcntl.flock(file, lock)
            file.seek(0, 2)
            yield file


def asked(state: StateDir) -> list[Request]:
    """Unanswered requests to the running publisher."""
    with suppress(OSError, ValueError, MalformedError):
        return [request_of(r) for r in json.loads((state.spark_scratch / _ASKED).read_text())]
    return []


def of_one_batch(requests: Sequence[Request]) -> list[Request]:
    """One publish per batch: its search of the topic ends where the batch's transaction begins."""
    publishing = [r for r in requests if r.action == "publish"]
    return [r for r in requests if r not in publishing[1:]]


class Requests:
    """Pending requests; thread-safe.

    Holds are listed from the indexes if those are on this machine, so that a paused publisher
    answers too. Batches do everything else.
    """

    def __init__(self, config: Config, state: StateDir, query: str) -> None:
        self._config, self._state, self._query = config, state, query
        self._waiting: dict[str, Waiting] = {}
        self._writing = threading.Lock()

    def ask(self, request: Request, timeout: float, *, is_paused: bool) -> dict[str, Any]:
        if is_paused and request.action != "list":
            return {"answers": None, "error": paused().to_dict()}
        try:
            here = self._list(request) if request.action == "list" else {}
        except EventpubError as error:
            return {"answers": None, "error": error.to_dict()}
        if here:
            return {"answers": here, "error": None}
        answers: queue.SimpleQueue[dict[int, str]] = queue.SimpleQueue()
        self._waiting[request.id] = request, answers, {}
        try:
            self._write()
            found = answers.get(timeout=timeout)
        except (queue.Empty, OSError):
            self.withdraw(request.id)
            return {"answers": None, "error": None}
        return {"answers": {str(s): answer for s, answer in found.items()}, "error": None}

    def withdraw(self, id_: str) -> None:
        """The client no longer waits; a planned batch may still do it."""
        if self._waiting.pop(id_, None) is not None:
            try:
                self._write()
            except OSError:  # a full disk: what was answered must not be done again
                with suppress(OSError):
                    (self._state.spark_scratch / _ASKED).unlink()

    def _write(self) -> None:
        file = self._state.spark_scratch / _ASKED
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._writing:
            requests = [asdict(waiting[0]) for waiting in [*self._waiting.values()]]
            replace_file(file, json.dumps(requests))

    def answered(self, id_: str, shard: int, answer: str) -> None:
        waiting = self._waiting.get(id_)
        if waiting is None:
            for request in self._state.kept():  # left for this publisher
                if request.id == id_:
                    _log(request, answer)
                    with suppress(EventpubError):
                        self._state.withdraw(request)
            return
        request, answers, given = waiting
        given[shard] = answer
        if len(given) == (self._config.run.shards if request.action == "list" else 1):
            self.withdraw(id_)
            _log(request, answer)
            answers.put(given)

    def is_to_publish(self, id_: str, aggregate_id: str, version: int | None) -> bool:
        waiting = self._waiting.get(id_)
        if waiting is None:
            return False
        return (waiting[0].aggregate_id, waiting[0].version) == (aggregate_id, version)

    def _list(self, request: Request) -> dict[str, str]:
        """Holds by shard, from indexes on this machine; empty if they are not here."""
        found: dict[str, str] = {}
        for number in range(self._config.run.shards):
            folder = self._state.query_index(self._query, number)
            if not (folder / "CURRENT").exists():
                return {}
            pending = glance(folder, request.most, request.about)
            found[str(number)] = json.dumps(asdict(pending))
        return found


def _log(request: Request, answer: str) -> None:
    if request.action != "list":
        facts = {"aggregate_id": request.aggregate_id, "outcome": answer}
        log.info(f"{COMMANDS[request.action]} was requested", **facts)
