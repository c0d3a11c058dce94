"""Processes at the other end of the network: a runner that waits, and a coordinator that does."""

from __future__ import annotations

import sys
import time

from eventpub.channel import Hello, Lease, Report
from eventpub.channel.flight import Address, FlightLink
from tests.channel.ends import TOKEN, Coordinator, serving


def runner(location: str) -> None:
    """Connects, reports when it has its lease, and waits."""
    link = FlightLink(Address(location, TOKEN), Hello(1, 7, "elsewhere"))
    print("connected", flush=True)
    link.lease()
    link.send(Report(1, done=1))
    time.sleep(600)


def coordinator() -> None:
    """Says where it is, and gives a lease to who comes."""
    here = Coordinator()
    with serving(here) as server:
        print(server.address("127.0.0.1", TOKEN).location, flush=True)
        here.joined().send(Lease(1, low=0, position=0))
        time.sleep(600)


if __name__ == "__main__":
    if sys.argv[1] == "coordinator":
        coordinator()
    else:
        runner(sys.argv[2])
