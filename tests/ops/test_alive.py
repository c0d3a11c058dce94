"""Whether a container is to be left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventpub.channel.flight import Server
from eventpub.ops.alive import alive
from eventpub.state import Running, StateDir


@pytest.mark.parametrize("is_alive", [False, True])
def test_it_is_while_its_loop_turns_whatever_it_waits_for(tmp_path: Path, is_alive: bool) -> None:
    """A start would fail while the database is away; what runs goes on when it is back."""

    def answer(name: str, given: dict[str, Any]) -> dict[str, Any]:
        assert (name, given) == ("status", {})
        check = {"name": "database", "state": "error", "last_ok": None}
        return {"state": "running", "is_alive": is_alive, "checks": [check]}

    state = StateDir(tmp_path)
    server = Server("127.0.0.1", "token", lambda _: None, lambda s, n: True, answer)
    state.lock()
    address = server.address("127.0.0.1", "token")
    state.write_address(Running(1, address.location, address.token))
    try:
        assert alive(tmp_path)[0] is is_alive
    finally:
        server.end()
        state.unlock()
