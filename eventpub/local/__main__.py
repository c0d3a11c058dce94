"""``python -m eventpub.local kafka|mariadb [DIR]``: a server until Ctrl-C or SIGTERM.

Prints its address on stdout when it serves. Without DIR its data live in a temporary folder, which
is removed at the end.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from eventpub.errors import EventpubError
from eventpub.local import Server, kafka, mariadb
from eventpub.stop_flag import StopFlag


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m eventpub.local", description=__doc__)
    parser.add_argument("server", choices=["kafka", "mariadb"])
    parser.add_argument("directory", type=Path, nargs="?", help="a temporary one when not given")
    parser.add_argument("--port", type=int, help="a free one when not given")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="Kafka: key=value; a database: one of its own options; may be repeated",
    )
    given = parser.parse_args(arguments)
    ended = StopFlag()
    for stopping in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stopping, lambda *_: ended.set())
    with ExitStack() as stack:
        folder = given.directory
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eventpub-")))
        try:
            server, address = _started(given, folder)
        except EventpubError as error:
            print(error, file=sys.stderr)
            return error.exit_status
        stack.enter_context(server)
        print(address, flush=True)
        while not ended.wait(1) and server.running:
            pass
    return 0


def _started(given: argparse.Namespace, folder: Path) -> tuple[Server, str]:
    """The server that was asked for, and its address."""
    if given.server == "mariadb":
        database = mariadb(folder, port=given.port, options=given.option)
        return database, database.url()
    properties = dict(option.split("=", 1) for option in given.option)
    broker = kafka(folder, port=given.port, properties=properties)
    return broker, broker.bootstrap_servers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
