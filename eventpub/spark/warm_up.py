"""A job like the publisher's, without a store and a sink: what it loads is worth archiving."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from eventpub.config import App, Config, Run, Sink, Store
from eventpub.spark.session import Session


def _task(shards: Iterable[int]) -> Iterator[int]:
    yield from shards


def run_a_little(archive: Path) -> None:
    """A few jobs, then the JVM ends and writes the archive."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            app=App(id="warm-up", state_dir=Path(folder)),
            store=Store.model_validate({"url": "mysql+pymysql://nobody@localhost/none"}),
            sink=Sink(topic="none"),
            run=Run(shards=1),
        )
        with Session(config, Path(folder) / "spark.log", archive=archive) as session:
            for shard in range(3):
                session.context.parallelize([shard], 1).mapPartitions(_task).collect()
