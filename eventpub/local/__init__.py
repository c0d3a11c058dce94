"""A Kafka broker and a MariaDB on this machine, for the demo, the tutorial and the tests.

They need neither root nor a container engine, download once, and never outlive the process that
started them.
"""

from eventpub.local.downloads import find_java, on_stderr, silent
from eventpub.local.processes import Server
from eventpub.local.servers import Database, Kafka, kafka, mariadb

__all__ = ["Database", "Kafka", "Server", "find_java", "kafka", "mariadb", "on_stderr", "silent"]
