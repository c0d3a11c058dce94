"""What uses private parts of other libraries, since it is much faster, or else cannot be known.

    bulk         where confluent-kafka keeps librdkafka's handle.
                 Self-check: the version, and librdkafka itself. Else: record by record.
    packets      PyMySQL's socket.
                 Self-check: its names, and a known answer. Else: PyMySQL's own cursor.
    client_log   how librdkafka words its log.
                 Self-check: each commit must show. Else: each commit is in doubt.

`spark.input_rows` reads the stream of a Python worker of Spark's. Where a self-check fails, or a
switch is off, the result is the same, only slower; or there is none.
"""

from dataclasses import dataclass


@dataclass
class Switches:
    """Which of them may be used; asked at each use."""

    bulk: bool = True
    packets: bool = True
    client_log: bool = True


SWITCHES = Switches()
