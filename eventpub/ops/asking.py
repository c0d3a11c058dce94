"""Requests to the running publisher over the socket in its state directory."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from http.client import HTTPConnection, HTTPException
from typing import Any

from eventpub.channel import Request
from eventpub.errors import from_dict
from eventpub.state import StateDir
from eventpub.state_files import mapping

_NOT_UNDERSTOOD = {400, 404, 405, 500}
"""Statuses of a publisher of another version without such a page, or of a broken one."""


def ask_running(
    state: StateDir, page: str, argument: dict[str, Any] | None = None, timeout: float = 10.0
) -> dict[str, Any] | None:
    """The publisher's answer to a page of `ops.pages`; None: none runs, or it does not answer.

    Raises:
        StateError: state.not_writable: it belongs to another user.
    """
    if not state.is_running():
        return None
    connection = HTTPConnection("localhost")
    try:
        connection.sock = state.connect(timeout)
        with closing(connection):
            body = None if argument is None else json.dumps(argument)
            connection.request("GET" if body is None else "POST", f"/{page}", body)
            reply = connection.getresponse()
            answer: dict[str, Any] = json.loads(reply.read())
            return None if reply.status in _NOT_UNDERSTOOD else answer
    except PermissionError:
        with mapping(state.socket_file):
            raise
    except (OSError, HTTPException, ValueError):
        return None


def ask_shards(state: StateDir, request: Request, timeout: float) -> dict[int, str] | None:
    """The outcome of a request, by shard; None: no answer, and nothing more will be done.

    Raises:
        StateError: run.paused, run.request_failed
    """
    argument = {"request": asdict(request), "timeout": timeout}
    answer = ask_running(state, "request", argument, timeout + 5.0)
    if answer is None:
        return None
    if (error := answer.get("error")) is not None:
        raise from_dict(error)
    if answer["answers"] is None:
        return None
    return {int(shard): str(outcome) for shard, outcome in answer["answers"].items()}
