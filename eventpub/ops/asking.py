"""Asking the running publisher of a state directory, wherever its shards are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eventpub.channel import Request
from eventpub.errors import StateError, from_dict
from eventpub.state import StateDir


def ask_running(
    state: StateDir, name: str, argument: dict[str, Any] | None = None, timeout: float = 10.0
) -> dict[str, Any] | None:
    """What the publisher answers; None: none is running, or it is starting, or does not answer.

    Args:
        name: of an action of the channel.
        timeout: seconds.
    """
    if not state.is_running():
        return None
    running = state.running()
    if running is None or not running.location:
        return None
    from eventpub.channel.flight import Address, ask

    address = Address(running.location, running.token, running.root_certificates)
    try:
        return ask(address, name, argument or {}, timeout)
    except StateError:
        return None


def ask_shards(state: StateDir, request: Request, timeout: float) -> dict[int, str] | None:
    """What came of a request, by shard; None: nobody has answered, and nothing is done any more.

    Raises:
        StateError: run.paused, run.request_failed: it was not done.
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
