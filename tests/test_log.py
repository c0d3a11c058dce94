"""Log lines are written by a thread, and bounded: who logs never waits."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventpub import log
from tests.publisher.harness import eventually
from tests.publisher.test_blocked_log import full_pipe


@pytest.fixture
def lines() -> Iterator[log.Lines]:
    made = log.Lines()
    yield made
    made.close()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, __file__, 1, text, None, None)


def test_what_does_not_fit_is_counted_and_said_when_it_is_read_again(
    lines: log.Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(log, "MOST_WAITING", 100)
    with full_pipe() as (reader, writer), os.fdopen(writer, "w", closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        for number in range(50):
            lines.emit(record(f"line {number:02d} of this"))
        assert lines.dropped == 44
        assert not lines.is_written
        read = bytearray()

        def has_come() -> bool:
            read.extend(os.read(reader, 4096))
            return b"44 log lines were dropped" in read

        eventually(has_come, 10, every=0)
        assert b"line 05 of this" in read
        assert b"line 06 of this" not in read


def test_what_cannot_be_formatted_is_said(
    lines: log.Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = record("%d")
    wrong.args = ("no number",)
    lines.emit(wrong)
    lines.flush()
    assert "cannot be formatted" in capsys.readouterr().err
