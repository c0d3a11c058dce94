"""The channel between the coordinator and the runners of its shards.

`messages` says what goes over it, `lane` what its two ends are, and `local` joins them: runners are
threads of the coordinator's process. Knows nothing of Kafka, SQL, RocksDB or Spark.
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
