"""What counts as published where neither a shard's index nor the topic can tell any more.

Decided for an index that is new, older than what was cut off the topic, or made from those of
another number of shards or partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eventpub.admission.model import Known, Seen, topic_partition, values
from eventpub.shard.assignment import index_folder
from eventpub.shard.context import PublishingContext
from eventpub.sink.folded import Folded
from eventpub.sink.reading import oldest_events
from eventpub.sink.topics import list_offsets


class Baseline:
    """Decides a baseline; `take` adds events that count as published, `meanwhile` may stop it."""

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
        """Start an index, from those of another number of shards or partitions if there are any."""
        context = self._context
        assignment, beginning, shard = context.assignment, context.beginning, context.shard
        directories = [Path(folder) for folder in beginning.former_indexes]
        if beginning.former_shards is not None and not directories:
            former = beginning.former_shards
            directories = [index_folder(assignment.config, former, n) for n in range(former)]
        # Partitions were added, or may have been: earlier records may be where another shard
        # writes now.
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
        """Up to when all former shards have published everything, µs: one shard's baseline says
        nothing of the others' backlog and holds."""
        context, start = self._context, self._context.assignment.start or 0
        low = context.beginning.low if context.beginning.low > start else position
        settled = max(start, 0 if low is None else self._settled(low))
        if settled < highest and context.beginning.former_indexes:
            context.report.repeats_after = settled
        return settled

    def decide(self) -> None:
        """Decide at the end of a first fold, or of one that found the topic truncated.

        A baseline is needed if the index is older than what the coordinator knows, or the whole
        state is older than the topic. Otherwise the truncated records were another producer's, or
        the last ones published, which were recorded nowhere else.
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
            index.note(times_since=context.now)
        elif truncated and known_to is not None:
            # held or recounted events are older than the position
            horizon = context.assignment.config.recount.horizon
            context.report.repeats_after = context.low(known_to) - horizon
        index.decide_baseline(baseline)

    def _count_forgotten(self, of_each: Sequence[int]) -> None:
        """Count as published what former baselines cover beyond the merged one, unless partitions
        changed: then it is unknown which shard had an aggregate."""
        if of_each and not self._context.beginning.former_indexes:
            own = self._context.shard.topic_partitions()
            cut = {partition: of_each[partition % len(of_each)] for partition in own}
            self._count_as_published(self._context.index.baseline or 0, cut)

    def _lost_baseline(self, newest: int) -> tuple[int, dict[int, int]]:
        """What counts as published when both index and topic have forgotten it.

        Everything up to the baseline: the earliest of `low`, hidden transactions and the oldest
        hold, less the recount's horizon and the longest wait. Whatever is unpublished was created
        later.

        Above it, rows whose records retention may have cut. An event is in the index if its record,
        or one of a later version, is left. Cut records were published before the oldest one left,
        so their rows are older than it (if none is left: up to `low`). Only rows in the table now
        count, as one that commits later was not published. So nothing is repeated, and only late
        commits since the publisher ended are lost. If the oldest record left was published late or
        held, or has a future time, the bound may be too low: the log says from where on events may
        repeat.

        If the coordinator knows less than the topic, the newest event read back replaces `low`.

        Returns:
            The baseline, µs; per partition, up to which `create_time` records may be cut.
        """
        context, low = self._context, self._context.beginning.low
        start = context.assignment.start or 0
        if low <= start or self._is_of_older_state(newest):
            low = max(low, newest)
        config, partitions = context.assignment.config, context.shard.topic_partitions()
        own = [(config.sink.topic, partition) for partition in partitions]
        oldest = oldest_events(context.parts.clients, own, config.app.id, self._meanwhile)
        cut = {p: low if at is None else min(low, at) for (_, p), at in oldest.items()}
        return max(start, min(low, self._settled(low))), cut

    def _settled(self, low: int) -> int:
        """Up to when everything is published or skipped, µs, if all read up to `low` is, except
        what is held or hidden."""
        hidden = self._context.beginning.hidden_since
        return self._kept(self._context.low(low if hidden is None else min(low, hidden)))

    def _count_as_published(self, after: int, cut: Mapping[int, int]) -> None:
        """Mark rows after the baseline, up to `cut` per partition, as published, and missing
        versions below them as skipped: one that commits later is a late event."""
        context, index = self._context, self._context.index
        before: dict[str, int] = {}
        left: dict[str, int] = {}  # last versions whose records are on the topic
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
        """Whether an aggregate's last event is still on the topic, and so all published later."""
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
            before: last version per aggregate before any was counted.
            left: aggregates whose rows up to the last version were all published.
        """
        index, lookup = self._context.index, self._context.lookup
        above = [(a, v) for a, v in events if v - 1 > before[a] and (a, v - 1) not in events]
        there, below = {a: [before[a]] for a, _ in above}, above
        while below:  # rows that do not count as published are missing as well
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
        """Rows created before this were published or skipped when `newest` was published."""
        context = self._context
        return newest - context.assignment.config.recount.horizon - context.rules.longest_hold

    def _is_of_older_state(self, newest: int) -> bool:
        """Whether the coordinator, too, does not know what was cut off the topic.

        Not reaching a partition's start is not enough: the records there may have been another
        producer's, and a baseline would lose late commits and holds. An older state shows by later
        publications.
        """
        context = self._context
        known_to = max(context.beginning.low, context.index.position or 0)
        if self._is_again or self._kept(newest) <= known_to:
            return False
        topic, known = context.assignment.config.sink.topic, context.beginning.acknowledged
        own = [(topic, p) for p in context.shard.topic_partitions()]
        lows = list_offsets(context.parts.clients, own, "earliest")
        return any(known.get(at, 0) < low for at, low in lows.items())
