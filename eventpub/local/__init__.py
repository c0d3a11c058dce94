"""Servers for people who have none: a Kafka broker and a MariaDB on this machine.

For the demo, the tests and the bench; a publisher in production uses nothing of this. What must
hold: no root and no container engine is needed, a second start downloads nothing, and nothing is
left running, however the process that started a server ends.
"""

from eventpub.local.broker import Kafka, kafka
from eventpub.local.databases import Database, mariadb
from eventpub.local.java import find_java
from eventpub.local.processes import Server
from eventpub.local.progress import Progress, Silent

__all__ = [
    "Database",
    "Kafka",
    "Progress",
    "Server",
    "Silent",
    "find_java",
    "kafka",
    "mariadb",
]
