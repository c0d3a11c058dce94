"""Notes and requests between Spark's processes on the driver's machine and the publisher.

The planner and the end of each batch run in Spark's own processes. They leave notes in a folder;
the publisher leaves requests for the planner in another, until a committed batch has answered them.
The next start removes both.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

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

_MOST = 2_000
"""Limit of pending notes, for a publisher that hangs."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")

Waiting = tuple[Request, Path, "queue.SimpleQueue[dict[int, str]]", dict[int, str]]


def _new(folder: Path) -> Path:
    return folder / f"{time.time_ns()}-{os.getpid()}.json"


def _leave(file: Path, data: dict[str, Any]) -> None:
    """Leave an object for another process, as a whole; raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(file, json.dumps(data, default=str))


def _left(folder: Path) -> Iterator[tuple[Path, Any]]:
    """What was left in a folder, oldest first."""
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):  # removed meanwhile, or damaged
            yield file, json.loads(file.read_text())


class Notes:
    def __init__(self, state: StateDir) -> None:
        self._folder = state.spark_scratch / "notes"

    def put(self, note: dict[str, Any]) -> None:
        """Leave a note; dropped if the disk is full or too many are pending."""
        with suppress(OSError):
            if len([*self._folder.glob("*.json")]) < _MOST:
                _leave(_new(self._folder), note)

    def take(self) -> Iterator[dict[str, Any]]:
        for file, note in _left(self._folder):
            try:
                file.unlink()
            except OSError:
                return
            yield note


def asked(state: StateDir) -> Iterator[Request]:
    """Unanswered requests to the running publisher."""
    for _, data in _left(state.spark_scratch / "asked"):
        with suppress(MalformedError):
            yield request_of(data)


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
        self._asked = state.spark_scratch / "asked"

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
        file = _new(self._asked)
        self._waiting[request.id] = request, file, answers, {}
        try:
            _leave(file, asdict(request))
            found = answers.get(timeout=timeout)
        except (queue.Empty, OSError):
            self.withdraw(request.id)
            return {"answers": None, "error": None}
        return {"answers": {str(s): answer for s, answer in found.items()}, "error": None}

    def withdraw(self, id_: str) -> None:
        """The client no longer waits; a planned batch may still do it."""
        if (waiting := self._waiting.pop(id_, None)) is not None:
            with suppress(OSError):
                waiting[1].unlink()

    def answered(self, id_: str, shard: int, answer: str) -> None:
        waiting = self._waiting.get(id_)
        if waiting is None:
            for request in self._state.kept():  # left for this publisher
                if request.id == id_:
                    _log(request, answer)
                    with suppress(EventpubError):
                        self._state.withdraw(request)
            return
        request, _, answers, given = waiting
        given[shard] = answer
        is_of_all = request.action == "list" and not request.aggregate_id
        if len(given) == (self._config.run.shards if is_of_all else 1):
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
