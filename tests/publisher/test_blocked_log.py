"""Nobody reads what the publisher prints any more: a log driver that blocks, a stopped `tee`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, commit, eventually


@contextmanager
def full_pipe() -> Iterator[tuple[int, int]]:
    """A pipe, from where it is read and where it is written, that takes not one byte more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        pass
    os.set_blocking(writer, True)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def test_a13_nobody_drains_stdout_and_stderr(database: FreshDatabase, publisher: Publisher) -> None:
    """It publishes, answers, and stops when it is asked to; its lines come when they are read."""
    publisher.settings["ops"]["log"] = "json"
    with full_pipe() as (reader, writer):
        publisher.process = subprocess.Popen(
            [publisher.program, "run", "--config", str(publisher.config)],
            stdout=writer,
            stderr=writer,
            cwd=publisher.folder,
            start_new_session=True,
        )
        for version in range(1, 4):
            commit(database, "a-1", version)
            publisher.until_published("a-1", list(range(1, version + 1)))
        assert publisher.answer(0, "status")["running"]

        os.set_blocking(reader, False)
        read = bytearray()

        def has_come() -> bool:
            while True:
                try:
                    read.extend(os.read(reader, 65536))
                except BlockingIOError:
                    return b'"event": "progress"' in read
                time.sleep(0)

        eventually(has_come, 30)

    with full_pipe() as (_, writer):
        publisher.stop()
        publisher.process = subprocess.Popen(
            [publisher.program, "run", "--config", str(publisher.config)],
            stdout=writer,
            stderr=writer,
            cwd=publisher.folder,
            start_new_session=True,
        )
        commit(database, "a-1", 4)
        publisher.until_published("a-1", [1, 2, 3, 4])
        publisher.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert publisher.finish(60) == 143
        assert time.monotonic() - began < 20  # for ever, before; 2 s without load
