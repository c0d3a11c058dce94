"""Notes and requests between Spark's processes on the driver's machine and the publisher.

The planner and the end of each batch run in Spark's own processes. They leave notes in a folder;
the publisher leaves requests for the planner in a file, until a committed batch has answered them.
The next start removes both.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eventpub.channel import MalformedError, Request, request_of
from eventpub.index import Pending, glance
from eventpub.state import StateDir
from eventpub.state_files import replace_file

_MOST = 2_000
"""Limit of pending notes, for a publisher that hangs."""

_ASKED = "asked.json"


class Notes:
    """Notes in the order in which they were left, each in a file that is there as a whole."""

    def __init__(self, state: StateDir) -> None:
        self._folder = state.spark_scratch / "notes"

    def put(self, note: dict[str, Any]) -> None:
        """Leave a note; dropped if the disk is full or too many are pending."""
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len([*self._folder.glob("*.json")]) < _MOST:
                file = self._folder / f"{time.time_ns()}-{os.getpid()}.json"
                replace_file(file, json.dumps(note, default=str))

    def take(self) -> Iterator[dict[str, Any]]:
        for file in sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError):
                note = json.loads(file.read_text())
                file.unlink()
                yield note


def leave(state: StateDir, requests: Sequence[Request]) -> bool:
    """Leave the planner all that it is to do, or nothing on a full disk: not what was answered."""
    file = state.spark_scratch / _ASKED
    with suppress(OSError):
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(file, json.dumps([asdict(request) for request in requests]))
            return True
        except OSError:
            file.unlink(missing_ok=True)
    return False


def asked(state: StateDir) -> list[Request]:
    """What was left last."""
    with suppress(OSError, ValueError, MalformedError):
        return [request_of(r) for r in json.loads((state.spark_scratch / _ASKED).read_text())]
    return []


def of_one_batch(requests: Sequence[Request]) -> list[Request]:
    """A publish only as the first: its search of the topic ends where the batch's transaction
    begins, and another request may publish the same event."""
    first = next((r for r in requests if r.action != "list"), None)
    return [r for r in requests if r.action != "publish" or r is first]


def listed(folders: Sequence[Path], upto: int, request: Request) -> list[Pending]:
    """What waits, by shard; empty unless all indexes are on this machine and have the batch."""
    found = [glance(folder, request.most, request.about) for folder in folders]
    return [] if any(shard.batch is None or shard.batch < upto for shard in found) else found
