"""``python -m eventpub.local kafka|mariadb [DIR]``: a server until Ctrl-C or SIGTERM.

Prints its address on stdout when it serves. Without DIR its data live in a temporary folder, which
is removed at the end.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from eventpub.errors import EventpubError
from eventpub.local import Database, kafka, mariadb


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eventpub.local", description=__doc__)
    parser.add_argument("server", choices=["kafka", "mariadb"])
    parser.add_argument("directory", type=Path, nargs="?", help="a temporary one when not given")
    parser.add_argument("--port", type=int, help="a free one when not given")
    given = parser.parse_args(arguments)
    signals: list[int] = []  # no lock that the interrupted thread may hold
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: signals.append(got))
    with ExitStack() as stack:
        folder = given.directory
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eventpub-")))
        start = mariadb if given.server == "mariadb" else kafka
        try:
            server = start(folder, port=given.port)
        except EventpubError as error:
            print(error, file=sys.stderr)
            return error.exit_status
        stack.enter_context(server)
        print(
            server.url() if isinstance(server, Database) else server.bootstrap_servers, flush=True
        )
        while not signals and server.running:
            time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
