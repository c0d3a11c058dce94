"""What Spark's processes on the driver's machine and the publisher exchange.

Spark runs the planner, and the end of each batch, in processes of their own, whose output goes to
`spark.log`. What users must learn of them is a note: a small file that the publisher takes within
a second. Requests of users go the other way, and stay until they are answered. All of it belongs to
one run: the next start removes it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from eventpub.channel import MalformedError, Request, request_of
from eventpub.state import StateDir
from eventpub.state_files import replace_file

_MOST = 1_000
"""Most notes that may wait: a publisher that hangs takes none."""


class Notes:
    """Notes for the publisher, each taken once.

    Args:
        state: of the driver's machine.
    """

    def __init__(self, state: StateDir) -> None:
        self._folder = state.spark_scratch / "notes"
        self._number = 0
        self._writer = secrets.token_hex(4)

    def put(self, note: dict[str, Any]) -> None:
        """Leave a note; without space on the disk, or where too many wait, none is left."""
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len([*self._folder.iterdir()]) < _MOST:
                self._number += 1
                name = f"{self._writer}-{self._number:09d}.json"
                replace_file(self._folder / name, json.dumps(note, default=str))

    def take(self) -> Iterator[dict[str, Any]]:
        """Those that wait; of one writer in their order."""
        with suppress(OSError):
            for file in sorted(self._folder.glob("*.json")):
                text = file.read_text()
                file.unlink()
                yield json.loads(text)


class Asked:
    """Requests to the running publisher that are not answered.

    Args:
        state: of the driver's machine.
    """

    def __init__(self, state: StateDir) -> None:
        self._folder = state.spark_scratch / "asked"

    def put(self, request: Request) -> None:
        """Have it done in the next batch.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._folder / f"{request.id}.json", json.dumps(asdict(request)))

    def remove(self, request: Request) -> None:
        """The request is answered, or no longer wanted."""
        (self._folder / f"{request.id}.json").unlink(missing_ok=True)

    def all(self) -> list[Request]:
        """Those that wait."""
        found = []
        with suppress(OSError):
            for file in sorted(self._folder.glob("*.json")):
                with suppress(OSError, ValueError, MalformedError):
                    found.append(request_of(json.loads(file.read_text())))
        return found


def of_one_batch(requests: Sequence[Request]) -> list[Request]:
    """Those that may be done together: one that publishes looks for its event on the topic, which
    ends where the transaction of its batch begins."""
    publishing = [r for r in requests if r.action == "publish"]
    return [r for r in requests if r not in publishing[1:]]
