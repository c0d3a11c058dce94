"""Whether an event stands in a range of the topic, asked by a runner that may be to leave."""

from __future__ import annotations

import time

import pytest

from eventpub.errors import StateError
from eventpub.sink.client import Clients
from eventpub.sink.reading import has_event
from tests.sink.helpers import settings
from tests.sink.mock_cluster import MockCluster, library_path


@pytest.mark.skipif(library_path() is None, reason="librdkafka's mock cluster is not there")
def test_who_is_to_leave_does_not_wait_for_records_that_do_not_come() -> None:
    """It took a minute, in which a runner on an executor did not end."""
    cluster = MockCluster({"events": 1})
    leaves_at = time.monotonic() + 1.0

    def require_going_on() -> None:
        if time.monotonic() > leaves_at:
            raise StateError("run.stopping", "stopped", retriable=True)

    try:
        sink = settings("events", cluster.bootstrap_servers)
        with pytest.raises(StateError) as caught:
            has_event(
                Clients(sink),
                ("events", 0),
                (0, 10),
                "a",
                1,
                app_id="app",
                meanwhile=require_going_on,
            )
    finally:
        cluster.close()
    assert caught.value.code == "run.stopping"
    assert time.monotonic() < leaves_at + 1.0
