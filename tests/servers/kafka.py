"""Brokers of any version, and nodes of a cluster; with an archive of classes where one was made.

`python -m tests.servers.kafka` makes that archive: it halves the CPU time of every start. A JVM
that cannot use it, of another version perhaps, starts without.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from eventpub.local.servers import KAFKA_VERSION as VERSION
from eventpub.local.servers import LOGGER, Kafka, jars_of

_CLASSES = "classes.jsa"
_LOGGER_3 = "org.slf4j", "slf4j-reload4j", "1.7.36"
_LOGGING_3 = """\
log4j.rootLogger=INFO, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


def kafka_jars(version: str = VERSION) -> Path:
    """The folder of a version's jars."""
    return jars_of(version, _LOGGER_3 if version.startswith("3.") else LOGGER)


def new_broker(
    directory: Path,
    *,
    port: int | None = None,
    properties: Mapping[str, str] | None = None,
    version: str = VERSION,
) -> Kafka:
    """One that has not been started."""
    jars = kafka_jars(version)
    made = Kafka(directory, port, properties or {}, jars)
    made.name = f"Kafka {version}"
    if version.startswith("3."):
        logging = made.directory / "log4j.properties"
        logging.write_text(_LOGGING_3)
        made.options.append(f"-Dlog4j.configuration={logging.as_uri()}")
    if (jars / _CLASSES).exists():
        made.options.append(f"-XX:SharedArchiveFile={jars / _CLASSES}")
    return made


def kafka(
    directory: Path,
    *,
    port: int | None = None,
    properties: Mapping[str, str] | None = None,
    version: str = VERSION,
) -> Kafka:
    """As `eventpub.local.servers.kafka`, of a version that is 3.9 or newer."""
    made = new_broker(directory, port=port, properties=properties, version=version)
    made.start()
    return made


def main() -> None:
    """Makes the archive unless it is there."""
    file = kafka_jars() / _CLASSES
    if file.exists():
        return
    partial = file.with_name(f"{_CLASSES}.{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder, new_broker(Path(folder)) as made:
        made.options.append(f"-XX:ArchiveClassesAtExit={partial}")
        made.start()
    partial.replace(file)


if __name__ == "__main__":
    main()
