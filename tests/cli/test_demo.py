"""The newcomer's first minute: the demo as a process, from nothing to the verdict."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.test_command import MAIN, _environ, envelope

ARGUMENTS = [sys.executable, "-c", MAIN, "demo", "--rate", "200"]


def _run(
    folder: Path, *arguments: str, interrupt_at: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The demo in a session of its own; SIGINT goes to it as soon as it has said something."""
    temporary = folder / "temporary"
    temporary.mkdir()
    with (folder / "said").open("w") as said:
        child = subprocess.Popen(
            [*ARGUMENTS, *arguments],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=folder,
            env=_environ({"TMPDIR": str(temporary)}),
            start_new_session=True,
        )
        try:
            while interrupt_at and child.poll() is None:
                if re.search(interrupt_at, (folder / "said").read_text()):
                    child.send_signal(signal.SIGINT)
                    break
                time.sleep(0.2)
            out, _ = child.communicate(timeout=400)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    done = subprocess.CompletedProcess(
        ARGUMENTS, child.returncode, out, (folder / "said").read_text()
    )
    assert _left_running(child.pid, temporary) == []
    assert list(temporary.glob("eventpub-*")) == [], done.stderr
    return done


def _left_running(session: int, temporary: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and (str(temporary) in words or process.pid == session):
            found.append(words)
    return found


@pytest.mark.timeout(500)
def test_it_stops_by_itself_and_finds_nothing_missing(tmp_path: Path) -> None:
    done = _run(tmp_path, "--seconds", "8", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    data = envelope(done)
    assert data["command"] == "demo"
    assert data["ok"] is True
    result = data["result"]
    assert result["verify"]["events"] == result["verify"]["records"] > 1000
    assert result["publisher"]["published"] == result["verify"]["events"]
    assert result["publisher"]["backtracked"] + result["publisher"]["gaps_filled"] > 0
    assert "lag" in done.stderr


@pytest.mark.timeout(500)
@pytest.mark.long
def test_ctrl_c_stops_it_and_it_still_compares(tmp_path: Path) -> None:
    done = _run(tmp_path, interrupt_at=r"eventpub: +[1-9]\d* s ")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing differs" in done.stdout


def test_ctrl_c_while_servers_start_leaves_nothing_running(tmp_path: Path) -> None:
    done = _run(tmp_path, "--json", interrupt_at="starting")
    assert done.returncode == 130
    assert envelope(done)["error"]["code"] == "cli.stopped"
