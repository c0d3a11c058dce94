"""Whether a container is to be left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventpub.ops.alive import alive
from tests.coordinator.life import config
from tests.ops.served import Source, running


@pytest.mark.parametrize("is_alive", [False, True])
def test_it_is_while_its_loop_turns_whatever_it_waits_for(tmp_path: Path, is_alive: bool) -> None:
    """A start would fail while the database is away; what runs goes on when it is back."""
    source = Source()
    source.found["is_alive"] = is_alive
    source.found["checks"][0] |= {"state": "error", "last_ok": None}
    with running(config(app={"id": "a", "state_dir": str(tmp_path)}), source):
        assert alive(tmp_path)[0] is is_alive
