"""Pages of a backlog that the source has read for all shards, as files for their tasks.

Left to themselves, the shards of one machine each have the database find every row, to be sent a
part of them. While the reader is far behind, the source reads each page once, in a process of its
own, and leaves every shard its rows as an Arrow file in the state directory; a task that finds no
file for the next page, or is on a machine that has none, reads from the database as ever.

A page's rows are as old as its file: a row that is committed later into its window is found like
any other that commits behind the reader. So files live for seconds: a folder serves one run of the
query, and a task takes its file away as soon as it has opened it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub.admission.model import EVENTS, topic_partitions

MOST_BYTES = 32 << 20
"""Of a page; the rows of a larger one are read by who publishes them."""


class PageFiles:
    """The files of one run of the query.

    Args:
        folder: theirs; made when needed.
        shards: how many there are.
        partitions: of the topic.
    """

    def __init__(self, folder: Path, shards: int, partitions: int) -> None:
        self._folder = folder
        self._shards = shards
        self._partitions = partitions

    def leave(
        self,
        after: int,
        upto: int,
        rows: Iterable[pa.RecordBatch],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Write the rows of ``after < create_time <= upto``, for each shard its own.

        Returns:
            False where there are none of them now: too large, no space, or cancelled.
        """
        written = [
            self._path(after, upto, number).with_suffix(".new") for number in range(self._shards)
        ]
        try:
            # payloads are for nobody else
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # as they come, so that memory holds one batch of the page
            if self._write(written, rows, cancelled):
                # all or none, as far as a shard that comes now can tell
                for partial in written:
                    partial.rename(partial.with_suffix(".arrow"))
                return True
        except OSError:
            pass
        for partial in written:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        return False

    def _write(
        self, paths: list[Path], rows: Iterable[pa.RecordBatch], cancelled: Callable[[], bool]
    ) -> bool:
        size = 0
        with ExitStack() as opened:
            files = []
            for path in paths:
                sink = opened.enter_context(pa.OSFile(str(path), "wb"))
                files.append(opened.enter_context(pa.ipc.new_file(sink, EVENTS)))
            for batch in rows:
                size += batch.nbytes
                if size > MOST_BYTES or cancelled():
                    return False
                numbers = self._shard_numbers(batch)
                for number, file in enumerate(files):
                    file.write_batch(batch.filter(pa.array(numbers == number)))
        return True

    def take(self, after: int, upto: int, shard: int) -> tuple[int, pa.Table] | None:
        """A shard's rows of the page that begins behind `after` and ends at or before `upto`.

        Returns:
            The page's end and the rows, which are in the file that is taken away now; None where
            there is no such page.
        """
        for path in self._folder.glob(f"{after}-*-{shard}.arrow"):
            end = int(path.name.split("-")[1])
            if end > upto:
                continue
            try:
                file = pa.ipc.open_file(pa.memory_map(str(path)))
                path.unlink()
            except OSError:  # taken by an attempt of this task that is not over yet
                continue
            return end, file.read_all()
        return None

    def forget(self, upto: int) -> None:
        """Remove what nobody has taken of the pages that end there or before."""
        for path in self._folder.glob("*.arrow"):
            if int(path.name.split("-")[1]) <= upto:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _path(self, after: int, upto: int, shard: int) -> Path:
        return self._folder / f"{after}-{upto}-{shard}.arrow"

    def _shard_numbers(self, batch: pa.RecordBatch) -> Any:
        encoded: Any = batch.column("aggregate_id").dictionary_encode()
        of_each = topic_partitions(encoded.dictionary.to_pylist(), self._partitions) % self._shards
        return of_each[np.asarray(encoded.indices)]
