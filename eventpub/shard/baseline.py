"""What counts as published where neither a shard's index nor the topic can say it any more.

Decided for an index that is new, older than what was cut off the topic, or made from those of
another number of shards or partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eventpub.admission import Known, Seen, topic_partition, values
from eventpub.shard.assignment import index_folder
from eventpub.shard.context import PublishingContext
from eventpub.sink.folded import Folded
from eventpub.sink.reading import oldest_events
from eventpub.sink.topics import list_offsets


class Baseline:
    """See the module.

    Args:
        context: of the shard.
        is_again: as of `Fold`.
        take: has the index take over events that count as published.
        meanwhile: called again and again.
    """

    def __init__(
        self,
        context: PublishingContext,
        *,
        is_again: bool,
        take: Callable[[Folded], None],
        meanwhile: Callable[[], None],
    ) -> None:
        self._context = context
        self._is_again = is_again
        self._take = take
        self._meanwhile = meanwhile

    def begin_index(self) -> None:
        """A new index, from those of another number of shards or partitions where there are any."""
        context = self._context
        assignment, beginning, shard = context.assignment, context.beginning, context.shard
        directories = [Path(folder) for folder in beginning.former_indexes]
        if beginning.former_shards is not None and not directories:
            former = beginning.former_shards
            directories = [index_folder(assignment.config, former, n) for n in range(former)]
        # Partitions were added, or it is unknown whether any were: what was written before may be
        # where another shard writes now.
        everywhere = bool(beginning.former_indexes) or not beginning.is_placed
        own = shard.topic_partitions()
        partitions = assignment.partitions
        every = [(t, p) for t in assignment.config.sink.topics for p in range(partitions)]
        context.index.move_from(
            directories,
            lambda aggregate_id: topic_partition(aggregate_id, partitions) in own,
            every if everywhere else context.own_places(),
            assignment.start,
            settled=self._settled_by_all,
            adopts=assignment.adopts,
            everywhere=everywhere,
        )

    def _settled_by_all(self, position: int | None, highest: int) -> int:
        """Up to when all former shards have published everything, µs: as of `Index.move_from`.

        One shard's baseline says nothing of the backlog and the holds of the others.
        """
        context, start = self._context, self._context.assignment.start or 0
        low = context.beginning.low if context.beginning.low > start else position
        settled = max(start, 0 if low is None else self._settled(low))
        if settled < highest and context.beginning.former_indexes:
            context.report.repeats_after = settled
        return settled

    def decide(self) -> None:
        """At the end of a first fold, or of one that was cut, whatever tries of it came before.

        Cut above what the index knows: the index is older than what the coordinator knows, or the
        whole state is older than the topic. Else only others' records were cut, where they write to
        the topic, too, or what was published last, which was noted nowhere before.
        """
        context, index = self._context, self._context.index
        if index.undecided is None:
            return
        truncated, newest, _ = index.undecided
        self._count_forgotten(index.forgotten)
        baseline, known_to, low = None, index.position, context.beginning.low
        is_older = known_to is None or known_to < low
        if truncated and (is_older or self._is_of_older_state(newest)):
            baseline, cut = self._lost_baseline(newest)
            baseline = max(baseline, index.baseline or 0)
            self._count_as_published(baseline, cut)
            context.report.baseline = baseline
            context.report.repeats_after = max(baseline, min(cut.values(), default=0))
            index.forget_times(context.now)
        elif truncated and known_to is not None:
            # what it held, or the recount had found, is older than the position
            horizon = context.assignment.config.recount.horizon
            context.report.repeats_after = context.low(known_to) - horizon
        index.decide_baseline(baseline)

    def _count_forgotten(self, of_each: Sequence[int]) -> None:
        """Count as published what each former shard's baseline covers and the merged one does not.

        With another number of partitions it is not known which shard had which aggregate.
        """
        if of_each and not self._context.beginning.former_indexes:
            own = self._context.shard.topic_partitions()
            cut = {partition: of_each[partition % len(of_each)] for partition in own}
            self._count_as_published(self._context.index.baseline or 0, cut)

    def _lost_baseline(self, newest: int) -> tuple[int, dict[int, int]]:
        """What counts as published when both index and topic have forgotten it.

        Whatever was created up to a baseline: what is not published yet was created after what open
        transactions hide, what is to be counted again, and the oldest hold, or within the horizon
        or the longest wait before.

        Of what was created later, what retention has cut off a partition: an event is in the index
        if its record is left, or a record of a later version; and what is gone was published before
        the oldest record left, so it was created before that; where none is left, at or before
        `low`. Of these rows those count that stand in the table now: one that commits from now on
        was not published. So nothing is repeated, and only what has committed late since the
        publisher ended is given up. A bound may be too low where the oldest record left was itself
        published late, a version was held, or a row had a time in the future: the log says from
        where on events may be repeated.

        Where the coordinator knows nothing, or less than the topic, the newest event read back
        stands for `low`; see `_kept`.

        Args:
            newest: `create_time` of the newest event that was read back from the topic, µs.

        Returns:
            The baseline, µs; and by partition up to when what was created may be cut.
        """
        context, low = self._context, self._context.beginning.low
        start = context.assignment.start or 0
        if low <= start or self._is_of_older_state(newest):
            low = max(low, newest)
        config, partitions = context.assignment.config, context.shard.topic_partitions()
        own = [(config.sink.topic, partition) for partition in partitions]
        app_ids = config.app.id, *config.app.former_ids
        oldest = oldest_events(context.parts.clients, own, app_ids, self._meanwhile)
        cut = {p: low if at is None else min(low, at) for (_, p), at in oldest.items()}
        return max(start, min(low, self._settled(low))), cut

    def _settled(self, low: int) -> int:
        """Up to when all that was created is published or skipped, if all that was read up to `low`
        is, but for what waits and what is hidden."""
        hidden = self._context.beginning.hidden_since
        return self._kept(self._context.low(low if hidden is None else min(low, hidden)))

    def _count_as_published(self, after: int, cut: Mapping[int, int]) -> None:
        """Mark rows of the table as published; see `_lost_baseline`. Versions that are missing
        below them are marked as skipped: one that commits later is published as a late event.

        Args:
            after: the baseline, µs.
            cut: by partition, up to when.
        """
        context, index = self._context, self._context.index
        before: dict[str, int] = {}
        left: dict[str, int] = {}  # the last version of those whose last record is on the topic
        none = context.rules.first_version - 1
        for keys in context.lookup.keys(after, max(cut.values(), default=after), context.shard):
            old = [row[:3] for row in self._rows(keys, cut) if row[3]]
            known = index.known([*(ids := {a for a, *_ in old})])
            for a in ids - before.keys():
                before[a] = known.last.get(a, none)
                if index.undecided and index.undecided[2] and self._is_left(a, known, cut):
                    left[a], before[a] = before[a], none
            old = [(a, v, at) for a, v, at in old if v <= left.get(a, v)]
            self._skip_missing({(a, v) for a, v, _ in old}, before, cut, left)
            if old := [row for row in old if row[1] != left.get(row[0])]:
                ids, versions, times = zip(*old, strict=True)
                part = Folded("late", {}, [*ids], np.array(versions), np.array(times))
                self._take(part)
            self._meanwhile()
        context.parts.failpoint("after_baseline")

    def _is_left(self, aggregate_id: str, known: Known, cut: Mapping[int, int]) -> bool:
        """Whether an aggregate's last event is still on the topic: then all that was published
        after it is, too."""
        seen = Seen.unpacked(known.times.get(aggregate_id, 0))
        partition = topic_partition(aggregate_id, self._context.shard.partitions)
        return seen.is_of_last and seen.newest >= cut[partition]

    def _rows(self, keys: Any, cut: Mapping[int, int]) -> Iterator[tuple[str, int, int, bool]]:
        """Aggregate, version and time of rows, and whether their records may be cut."""
        columns = (values(keys, name) for name in ("aggregate_id", "version", "create_time"))
        for a, version, created in zip(*columns, strict=True):
            partition = topic_partition(a, self._context.shard.partitions)
            yield a, version, created, created <= cut.get(partition, 0)

    def _skip_missing(
        self,
        events: Collection[tuple[str, int]],
        before: Mapping[str, int],
        cut: Mapping[int, int],
        left: Collection[str],
    ) -> None:
        """Mark versions as skipped that the table lacks directly below these events.

        Args:
            before: the last version of each aggregate before any was counted.
            left: those of which all rows up to the last version were published.
        """
        index, lookup = self._context.index, self._context.lookup
        above = [(a, v) for a, v in events if v - 1 > before[a] and (a, v - 1) not in events]
        there, below = {a: [before[a]] for a, _ in above}, above
        while below:  # what is there and does not count is missing as well
            found = [row for keys in lookup.below(below, 1) for row in self._rows(keys, cut)]
            below = [(a, v) for a, v, _, is_old in found if not (is_old or a in left)]
            for a, version in {(a, v) for a, v, *_ in found} - {*below}:
                there[a].append(version)
        for a, version in sorted(above):
            missing = 1 + max(v for v in there[a] if v < version), version - 1
            ranges = index.known([a]).skipped.get(a, ())
            if missing[0] < version and missing not in ranges:
                index.note_skipped(a, [*ranges, missing])

    def _kept(self, newest: int) -> int:
        """Everything created before that was published or skipped when an event of then was."""
        context = self._context
        return newest - context.assignment.config.recount.horizon - context.rules.longest_hold

    def _is_of_older_state(self, newest: int) -> bool:
        """Whether the coordinator does not know either what was cut off the topic.

        That it does not reach to where a partition begins is not enough: what stood there may have
        been another producer's, and with a baseline all that commits late, or that a hold waits
        for, would be lost. A state that is older shows by what was published since.
        """
        context = self._context
        known_to = max(context.beginning.low, context.index.position or 0)
        if self._is_again or self._kept(newest) <= known_to:
            return False
        topic, known = context.assignment.config.sink.topic, context.beginning.acknowledged
        own = [(topic, p) for p in context.shard.topic_partitions()]
        lows = list_offsets(context.parts.clients, own, "earliest")
        return any(known.get(at, 0) < low for at, low in lows.items())
