"""Whether a container is to be left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventpub.channel.flight import Server
from eventpub.ops.alive import alive
from eventpub.state import Running, StateDir


@pytest.mark.parametrize(("age", "fine"), [(None, False), (3.0, True), (61.0, False)])
def test_it_is_while_the_database_answers_though_no_shard_is_published(
    tmp_path: Path, age: float | None, fine: bool
) -> None:
    """Without a runner nobody polls, and a broker that was away for a minute ended it."""
    now = 1_700_000_000.0
    last_ok = None if age is None else now - age

    def answer(name: str, given: dict[str, Any]) -> dict[str, Any]:
        assert (name, given) == ("status", {})
        check = {"name": "database", "state": "ok", "last_ok": last_ok}
        return {"at": now, "poll_age_seconds": 600.0, "checks": [check]}

    state = StateDir(tmp_path)
    server = Server("127.0.0.1", "token", lambda _: None, lambda s, n: True, answer)
    state.lock()
    address = server.address("127.0.0.1", "token")
    state.write_address(Running(1, address.location, address.token))
    try:
        assert alive(tmp_path)[0] is fine
    finally:
        server.end()
        state.unlock()
