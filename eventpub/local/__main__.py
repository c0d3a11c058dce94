"""``python -m eventpub.local kafka|mariadb|mysql DIR``: one server until Ctrl-C.

Prints its address on stdout when it serves.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from eventpub.errors import EventpubError
from eventpub.local import Server, kafka, mariadb, mysql


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m eventpub.local", description=__doc__)
    parser.add_argument("server", choices=["kafka", "mariadb", "mysql"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--port", type=int, help="a free one when not given")
    parser.add_argument("--time-zone", help="of a database: an offset or a zone's name")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="Kafka: key=value; a database: one of its own options; may be repeated",
    )
    given = parser.parse_args(arguments)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server: Server
    try:
        if given.server == "kafka":
            properties = dict(option.split("=", 1) for option in given.option)
            server = broker = kafka(given.directory, port=given.port, properties=properties)
            address = broker.bootstrap_servers
        else:
            start = mariadb if given.server == "mariadb" else mysql
            server = database = start(
                given.directory, port=given.port, options=given.option, time_zone=given.time_zone
            )
            address = database.url()
    except EventpubError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    with server:
        print(address, flush=True)
        while not ended.wait(1) and server.running:
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
