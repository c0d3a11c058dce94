"""What rests on parts of other libraries that their makers do not promise.

Some things are much faster, or can be known at all, only with private parts of others:

    bulk         where confluent-kafka keeps librdkafka's handle.
                 Self-check: the version, and librdkafka itself. Else: record by record.
    packets      PyMySQL's socket.
                 Self-check: its names, and a known answer. Else: PyMySQL's own cursor.
    client_log   how librdkafka words its log.
                 Self-check: each commit must show. Else: each commit is in doubt.
    task_input   what a Python worker of Spark's reads from.
                 Self-check: it is there. Else: the sink publishes nothing, and says so.

Nothing else of eventpub does so, but for closing a connection at once. What must hold: where a
self-check fails, or a switch is off, the result is the same, only later; or there is none.
"""

from dataclasses import dataclass


@dataclass
class Switches:
    """Which of them may be used; asked at each use."""

    bulk: bool = True
    packets: bool = True
    client_log: bool = True


SWITCHES = Switches()
