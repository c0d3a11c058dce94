"""The channel between the coordinator and the runners of its shards.

`messages` says what goes over it. `local` joins both ends in one process, `flight` over the network
(Arrow Flight): the coordinator and the runner see the same `Lane` and `Link` and cannot tell which.
Knows nothing of Kafka, SQL, RocksDB or Spark.
"""

from eventpub.channel.messages import (
    Comparison,
    Farewell,
    Folding,
    FromRunner,
    Hello,
    Lease,
    MalformedError,
    PartitionId,
    Report,
    Request,
    Stop,
    Window,
    Work,
    request_of,
)

__all__ = [
    "Comparison",
    "Farewell",
    "Folding",
    "FromRunner",
    "Hello",
    "Lease",
    "MalformedError",
    "PartitionId",
    "Report",
    "Request",
    "Stop",
    "Window",
    "Work",
    "request_of",
]
