"""What users ask of a query: done by a batch, and answered when that is committed.

Lists of what waits are read from the indexes, where these are on this machine: that needs no batch,
and so a paused publisher answers, too.
"""

from __future__ import annotations

import json
import queue
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import structlog

from eventpub.channel import Request
from eventpub.config import Config
from eventpub.coordinator.requests import COMMANDS, paused
from eventpub.errors import EventpubError
from eventpub.index import Pending, glance
from eventpub.ops.gaps import missing_versions
from eventpub.sources.mysql import EventStore
from eventpub.spark.notes import Asked
from eventpub.state import StateDir

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")

Waiting = tuple[Request, "queue.SimpleQueue[dict[int, str]]", dict[int, str]]


class Requests:
    """Those that wait for an answer; methods may be called in any thread.

    Args:
        config: the whole configuration.
        state: has the indexes, and the requests that were left for this publisher.
        query: whose indexes.
    """

    def __init__(self, config: Config, state: StateDir, query: str) -> None:
        self._config, self._state, self._query = config, state, query
        self._asked = Asked(state)
        self._waiting: dict[str, Waiting] = {}

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
            self._asked.put(request)
            found = answers.get(timeout=timeout)
        except (queue.Empty, OSError):
            self.withdraw(request.id)
            return {"answers": None, "error": None}
        return {"answers": {str(s): answer for s, answer in found.items()}, "error": None}

    def withdraw(self, id_: str) -> None:
        """The client has stopped waiting; a batch that is planned may still do it."""
        waiting = self._waiting.pop(id_, None)
        if waiting is not None:
            self._asked.remove(waiting[0])

    def answered(self, id_: str, shard: int, answer: str) -> None:
        """A shard has answered in a batch that is committed."""
        waiting = self._waiting.get(id_)
        if waiting is None:
            for request in self._state.kept():  # left for this publisher
                if request.id == id_:
                    self._say(request, answer)
                    with suppress(EventpubError):
                        self._state.withdraw(request)
            return
        request, answers, given = waiting
        given[shard] = answer
        is_of_all = request.action == "list" and not request.aggregate_id
        if len(given) == (self._config.run.shards if is_of_all else 1):
            self.withdraw(id_)
            self._say(request, answer)
            answers.put(given)

    def is_to_publish(self, id_: str, aggregate_id: str, version: int | None) -> bool:
        """Whether a request that waits wants this row published."""
        request = self._waiting[id_][0] if id_ in self._waiting else None
        found = None if request is None else (request.aggregate_id, request.version)
        return found == (aggregate_id, version)

    def _say(self, request: Request, answer: str) -> None:
        if request.action != "list":
            facts = {"aggregate_id": request.aggregate_id, "outcome": answer}
            log.info(f"{COMMANDS[request.action]} was requested", **facts)

    # -- lists ------------------------------------------------------------------------------------

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
