"""The channel between the coordinator and the runners of its shards, threads of one process.

`messages` says what goes over it; `lane` takes a runner's work to it, and what a runner says is
posted among the coordinator's other events. Of a shard there is one runner at a time: the next one
is started when `Ended` of the last has come. Knows nothing of Kafka, SQL, RocksDB or Spark.
"""

from eventpub.channel.lane import Lane
from eventpub.channel.messages import (
    LATENCY_BOUNDS,
    Beginning,
    Comparison,
    Ended,
    Folding,
    FromRunner,
    MalformedError,
    PartitionId,
    Post,
    Report,
    Request,
    Stop,
    Window,
    Work,
    request_of,
)

__all__ = [
    "LATENCY_BOUNDS",
    "Beginning",
    "Comparison",
    "Ended",
    "Folding",
    "FromRunner",
    "Lane",
    "MalformedError",
    "PartitionId",
    "Post",
    "Report",
    "Request",
    "Stop",
    "Window",
    "Work",
    "request_of",
]
