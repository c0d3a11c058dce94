"""What Spark's processes on the driver's machine and the publisher exchange.

Spark runs the planner, and the end of each batch, in processes of their own, whose output goes to
`spark.log`. They leave notes for the publisher in a file; the publisher leaves users' requests for
the planner in another, until a committed batch has answered them. Both files belong to one run: the
next start removes them.
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
from eventpub.index import Pending, glance
from eventpub.ops.gaps import missing_versions
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir
from eventpub.state_files import replace_file

_MOST_BYTES = 1 << 20
"""Of notes that wait: a publisher that hangs takes none."""

_ASKED = "asked.json"

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")

Waiting = tuple[Request, "queue.SimpleQueue[dict[int, str]]", dict[int, str]]


class Notes:
    """Notes for the publisher, each taken once.

    Args:
        state: of the driver's machine.
    """

    def __init__(self, state: StateDir) -> None:
        self._file = state.spark_scratch / "notes"

    def put(self, note: dict[str, Any]) -> None:
        """Leave a note; without space on the disk, or where too many wait, none is left."""
        with suppress(OSError), self._opened() as file:
            if file.tell() < _MOST_BYTES:
                file.write(json.dumps(note, default=str) + "\n")

    def take(self) -> list[dict[str, Any]]:
        """Those that wait."""
        lines: list[str] = []
        with suppress(OSError), self._opened() as file:
            if file.tell():
                file.seek(0)
                lines = file.readlines()
                file.truncate(0)
        found = []
        for line in lines:
            with suppress(ValueError):  # the disk was full
                found.append(json.loads(line))
        return found

    @contextmanager
    def _opened(self) -> Iterator[IO[str]]:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._file.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0, 2)
            yield file


def asked(state: StateDir) -> list[Request]:
    """The requests to the running publisher that are not answered."""
    with suppress(OSError, ValueError, MalformedError):
        return [request_of(r) for r in json.loads((state.spark_scratch / _ASKED).read_text())]
    return []


def of_one_batch(requests: Sequence[Request]) -> list[Request]:
    """Those that may be done together: one that publishes looks for its event on the topic, which
    ends where the transaction of its batch begins."""
    publishing = [r for r in requests if r.action == "publish"]
    return [r for r in requests if r not in publishing[1:]]


class Requests:
    """Requests that wait for an answer; methods may be called in any thread.

    Lists of what is held are read from the indexes where these are on this machine, so that a
    paused publisher answers, too. Everything else is done by a batch.

    Args:
        config: the whole configuration.
        state: has the indexes, and the requests that were left for this publisher.
        query: whose indexes.
    """

    def __init__(self, config: Config, state: StateDir, query: str) -> None:
        self._config, self._state, self._query = config, state, query
        self._waiting: dict[str, Waiting] = {}
        self._writing = threading.Lock()

    def ask(self, request: Request, timeout: float, *, is_paused: bool) -> dict[str, Any]:
        """As of `ops.pages.Source`."""
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
        """The client has stopped waiting; a batch that is planned may still do it."""
        if self._waiting.pop(id_, None) is not None:
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        file = self._state.spark_scratch / _ASKED
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._writing:
            requests = [asdict(waiting[0]) for waiting in [*self._waiting.values()]]
            replace_file(file, json.dumps(requests))

    def answered(self, id_: str, shard: int, answer: str) -> None:
        """A shard has answered in a batch that is committed."""
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
        is_of_all = request.action == "list" and not request.aggregate_id
        if len(given) == (self._config.run.shards if is_of_all else 1):
            self.withdraw(id_)
            _log(request, answer)
            answers.put(given)

    def is_to_publish(self, id_: str, aggregate_id: str, version: int | None) -> bool:
        """Whether a request that waits wants this row published."""
        waiting = self._waiting.get(id_)
        if waiting is None:
            return False
        return (waiting[0].aggregate_id, waiting[0].version) == (aggregate_id, version)

    def _list(self, request: Request) -> dict[str, str]:
        """What waits, by shard, of indexes that are on this machine; none: they are not."""
        a = request.aggregate_id
        about = (a,) if a else request.about
        found: dict[str, Pending] = {}
        for number in range(self._config.run.shards):
            folder = self._state.query_index(self._query, number)
            if not (folder / "CURRENT").exists():
                return {}
            found[str(number)] = glance(folder, request.most, about)
        if a:
            holds = [h for shard in found.values() for h in shard.holds if h.aggregate_id == a]
            return {"0": json.dumps({"gap": self._gap(holds[0]) if holds else None})}
        return {number: json.dumps(asdict(pending)) for number, pending in found.items()}

    def _gap(self, hold: Any) -> tuple[int, int] | None:
        """The versions that a skip would give up."""
        if hold.catching_up:
            return None
        with EventStore(self._config.store, EventStore.discover(self._config.store)) as store:
            first, last = missing_versions(store, hold)
        return (first, last) if last >= first else None


def _log(request: Request, answer: str) -> None:
    if request.action != "list":
        facts = {"aggregate_id": request.aggregate_id, "outcome": answer}
        log.info(f"{COMMANDS[request.action]} was requested", **facts)
