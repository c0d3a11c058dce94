"""The facts of one shard: offsets, position, baseline, and what a fold or a restart must know.

By name, as JSON; read once when the index is opened. They are written together with what they are
about, in one write batch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from eventpub.index.database import Database, Overlay
from eventpub.index.values import MISSING_MARKERS, Offsets, Partition, flat_of, nested_of

_TIMES_SETTLE = 86_400_000_000
"""µs: by so much at most do times differ that are read in two zones."""
NO_TIMES = {"read_as": None, "since": None}
"""Where nothing was published yet."""

Range = tuple[int, int]
"""The first offset of records that belong together, and the next after their last."""


class Facts:
    """They, of an open database.

    Args:
        database: of the index.
    """

    def __init__(self, database: Database | Overlay) -> None:
        self._db = database
        self._facts: dict[str, Any] = {
            key[1:].decode(): json.loads(value) for key, value in database.items(b"m")
        }

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever written: lost, or the shard's first start."""
        return "offsets" not in self._facts

    @property
    def offsets(self) -> Offsets:
        """Up to where the topics are folded into this index."""
        return dict(flat_of(self._facts.get("offsets", {})))

    @property
    def written(self) -> dict[Partition, Range]:
        """Of the offsets that came from a publication: first and next offset of its records."""
        return self._ranges("written")

    @property
    def missing_markers(self) -> dict[Partition, Range]:
        """Published ranges that may be lost, to be restored before anything else is done."""
        return self._ranges(MISSING_MARKERS)

    @property
    def topics(self) -> dict[str, str]:
        """Kafka's ids of the topics that the offsets belong to, as far as they are known."""
        return dict(self._facts.get("topics", {}))

    @property
    def reads_everywhere(self) -> bool:
        """Whether the next fold has to read all partitions for this shard's aggregates."""
        return bool(self._facts.get("everywhere"))

    @property
    def position(self) -> int | None:
        """Everything created at or before is published, held here, or skipped; µs."""
        return self._facts.get("position")

    @property
    def baseline(self) -> int | None:
        """Events created at or before count as published; µs."""
        return self._facts.get("baseline")

    @property
    def forgotten(self) -> list[int]:
        """Where they differed, the baselines of the indexes that this one has taken over, in their
        order, until `decide_baseline`."""
        return list(self._facts.get("forgotten", ()))

    @property
    def dead_run(self) -> int:
        """How many dead letters were written since the last event that was published."""
        return int(self._facts.get("dead_run", 0))

    @property
    def undecided(self) -> tuple[bool, int, bool] | None:
        """While it is not known yet whether an index needs a baseline, since it is new, or older
        than what was cut off the topic: whether the topic was found truncated, `create_time` of the
        newest event read back, µs, and whether all that it knows was read back. None: decided.
        """
        found = self._facts.get("undecided")
        return None if found is None else (bool(found[0]), int(found[1]), bool(found[2]))

    @property
    def chunk_bytes(self) -> int | None:
        """The size of a transaction to begin with, since larger ones took too long."""
        return self._facts.get("chunk_bytes")

    @property
    def has_contents(self) -> bool:
        """Whether it knows the contents of all versions that are on the topic."""
        return bool(self._facts.get("contents"))

    # -- writes ----------------------------------------------------------------------------------

    def note_contents(self, are_kept: bool) -> None:
        if are_kept != self.has_contents:
            self._write(self._db.new_batch(), {"contents": are_kept})

    def begin(self, baseline: int | None, *, everywhere: bool = False) -> None:
        """Write the first facts of a new index; `baseline` as in `Known`, `everywhere` as there.

        Whether it stays is decided when the topic was read back once, to its end: see `undecided`.
        """
        facts: dict[str, Any] = {"baseline": baseline, "offsets": {}, "times": NO_TIMES}
        facts["everywhere"] = everywhere
        self._write(self._db.new_batch(), facts | {"undecided": [False, 0, True]})

    def keep_times(self, read_as: str, now: int) -> None:
        """What is known of times before this was not kept by this way of reading them.

        Args:
            read_as: how the store's `create_time` is read: its zone and precision.
            now: the database's time.
        """
        times = self._facts["times"]
        if times["read_as"] == read_as:
            return
        since = times["since"]
        if times["read_as"] is not None:  # what was read before may be read at another time now
            since = now + _TIMES_SETTLE
        self._write(self._db.new_batch(), {"times": {"read_as": read_as, "since": since}})

    def forget_times(self, now: int) -> None:
        """Rows may have been published of which nothing is known any more."""
        times = {**self._facts["times"], "since": now}
        self._write(self._db.new_batch(), {"times": times})

    def note_truncated(self, truncated: bool, newest: int) -> None:
        """What a fold has met so far, before its offsets move on; see `undecided`."""
        before = self.undecided
        if before is None and truncated:
            before = (False, 0, False)
        if before is not None:
            now = (truncated or before[0], max(newest, before[1]), before[2])
            if now != before:
                self._write(self._db.new_batch(), {"undecided": [*now]})

    def decide_baseline(self, baseline: int | None) -> None:
        """That fold has ended. `baseline`: see the property; None: it stays as it is."""
        facts: dict[str, Any] = {"undecided": None, "forgotten": []}
        if baseline is not None:
            facts["baseline"] = baseline
        self._write(self._db.new_batch(), facts)

    def note_chunk_bytes(self, size: int | None) -> None:
        """Remember it for whoever has the shard next; None: there is no need to any more."""
        if size != self.chunk_bytes:
            self._write(self._db.new_batch(), {"chunk_bytes": size})

    def moved_to(self, offsets: Mapping[Partition, int]) -> None:
        """Note how far a fold has read where it found nothing to take over."""
        self._write(self._db.new_batch(), self._moved(offsets))

    def note_topics(self, ids: Mapping[str, str], made_again: Collection[str]) -> None:
        """Remember the topics' ids; of those that were made again no offset means anything."""
        facts: dict[str, Any] = {"topics": {**self.topics, **ids}}
        for name in ("offsets", "written", MISSING_MARKERS):
            kept = {t: p for t, p in self._facts.get(name, {}).items() if t not in made_again}
            facts[name] = kept
        self._write(self._db.new_batch(), facts)

    def has_read_everywhere(self, own: Collection[Partition]) -> None:
        """From now on its own partitions are enough."""
        facts: dict[str, Any] = {"everywhere": False}
        for name, ranges in (("written", self.written), (MISSING_MARKERS, self.missing_markers)):
            facts[name] = nested_of({p: r for p, r in ranges.items() if p in own})
        facts["offsets"] = nested_of({p: at for p, at in self.offsets.items() if p in own})
        self._write(self._db.new_batch(), facts)

    def note_missing_markers(self, written: Mapping[Partition, Range]) -> None:
        """These ranges, published and known here, have turned out to be not visible."""
        missing_markers = nested_of({**self.missing_markers, **written})
        self._write(self._db.new_batch(), {MISSING_MARKERS: missing_markers})

    def restored(self) -> None:
        """What missed a marker is visible now: there or behind, from where it is folded again."""
        before = self.offsets
        starts = {
            p: first for p, (first, _) in self.missing_markers.items() if before.get(p, 0) > first
        }
        facts = self._moved(starts)
        self._write(self._db.new_batch(), facts | {MISSING_MARKERS: {}})

    def _moved(
        self,
        offsets: Mapping[Partition, int],
        written: Mapping[Partition, Range] | None = None,
    ) -> dict[str, Any]:
        """The facts after the offsets of some partitions have moved, by a publication or not."""
        before = self.offsets
        moved = {place for place, offset in offsets.items() if before.get(place) != offset}
        ranges = self.written
        kept = {place: w for place, w in ranges.items() if place not in moved}
        for place, (first, end) in (written or {}).items():
            # written where a marker was to be: one transaction with what is before, to the broker
            joined = place in ranges and ranges[place][1] == first
            kept[place] = (ranges[place][0] if joined else first, end)
        return {"offsets": nested_of({**before, **offsets}), "written": nested_of(kept)}

    def _ranges(self, fact: str) -> dict[Partition, Range]:
        found = flat_of(self._facts.get(fact, {}))
        return {partition: (first, end) for partition, (first, end) in found}

    def _write(self, batch: Any, facts: Mapping[str, Any]) -> None:
        if self.is_new:
            facts = {"identity": self._facts["identity"], **facts}
        for name, value in facts.items():
            batch.put(b"m" + name.encode(), json.dumps(value).encode())
        self._db.write(batch)
        self._facts.update(facts)
