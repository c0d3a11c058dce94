"""Servers for people who have none: a Kafka broker and a MariaDB on this machine.

For the demo and the tutorial; the tests build upon them. No root and no container engine is needed,
a second start downloads nothing, and nothing is left running, however the starting process ends.
"""

from eventpub.local.downloads import find_java, on_stderr, silent
from eventpub.local.processes import Server
from eventpub.local.servers import Database, Kafka, kafka, mariadb

__all__ = ["Database", "Kafka", "Server", "find_java", "kafka", "mariadb", "on_stderr", "silent"]
