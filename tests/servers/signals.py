"""A server that hangs, goes on, or is restarted."""

from __future__ import annotations

import os
import signal

from eventpub.local.processes import Server


def pause(server: Server) -> None:
    """SIGSTOP: it keeps its connections and answers nothing."""
    server._deliver(signal.SIGSTOP)
    if type(server)._deliver is Server._deliver:  # its threads stop one after the other
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def resume(server: Server) -> None:
    """After `pause`."""
    server._deliver(signal.SIGCONT)


def restart(server: Server) -> None:
    """On the same port, with the same data."""
    server.stop()
    server.start()
