"""A command on a terminal of its own, as a person has it: what it wrote, and how it ended."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_INTERRUPT = "\x03"
_WITH_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Only the terminal that a session has as its own sends it the signal of Ctrl-C."""


@dataclass(frozen=True)
class Shown:
    """What was written to the terminal.

    Attributes:
        raw: with the codes that move the cursor and colour.
        out: stdout, where it was no terminal.
        status: the exit status.
    """

    raw: str
    out: str
    status: int

    @property
    def text(self) -> str:
        """Without codes; what was drawn again is there again."""
        return _CODE.sub("", self.raw).replace("\r", "\n")

    @property
    def is_cursor_hidden(self) -> bool:
        """Whether the cursor was left hidden."""
        return self.raw.rfind("\x1b[?25l") > self.raw.rfind("\x1b[?25h")


def on_terminal(
    command: Sequence[str],
    *,
    cwd: Path,
    environ: Mapping[str, str],
    width: int = 80,
    interrupt_at: str | None = None,
    press: str = _INTERRUPT,
    out_is_pipe: bool = False,
    timeout: float = 120.0,
) -> Shown:
    """Run it.

    Args:
        interrupt_at: press keys as soon as this pattern is on the terminal.
        press: these keys, Ctrl-C by default.
        out_is_pipe: whether stdout goes to a pipe, and only stderr to the terminal.
    """
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))

    left_out = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
    mine = {name: value for name, value in environ.items() if name not in left_out}
    child = subprocess.Popen(
        [sys.executable, "-c", _WITH_ITS_TERMINAL, *command],
        stdin=its,
        stdout=subprocess.PIPE if out_is_pipe else its,
        stderr=its,
        cwd=cwd,
        env={"TERM": "xterm-256color", **mine},
        start_new_session=True,
    )
    os.close(its)
    raw, is_pressed, deadline = b"", False, time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    raw += os.read(ours, 65_536)
                except OSError:  # the last one who had it open has gone
                    break
            if (
                interrupt_at
                and not is_pressed
                and re.search(
                    interrupt_at,
                    raw.decode(errors="replace"),  # the last character may be cut
                )
            ):
                is_pressed = True
                os.write(ours, press.encode())
        out, _ = child.communicate(timeout=timeout)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.close(ours)
    assert is_pressed or not interrupt_at, raw.decode()
    return Shown(raw.decode(), (out or b"").decode(), child.returncode)
