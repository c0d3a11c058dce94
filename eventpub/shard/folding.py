"""Fold: the index is brought up to the topic, which is the truth, before anything is published.

Reads what the index does not know of the shard's partitions, whatever has written it: a former
owner, a transaction whose answer was lost, another machine. Normally there is nothing to read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eventpub import admission
from eventpub.admission import Known, Rewritten, Seen, values
from eventpub.channel import Folding
from eventpub.shard.assignment import index_folder
from eventpub.shard.context import PublishingContext
from eventpub.shard.jumps import Jumps
from eventpub.sink.faults import topic_remade
from eventpub.sink.folded import Folded
from eventpub.sink.missing_markers import MissingMarkerError
from eventpub.sink.reading import oldest_events
from eventpub.sink.topics import list_offsets, topic_ids

_SHOWN_EVERY = 1.0
"""Seconds between two reports of how far it is."""


_UNNOTICED = 300_000_000
"""µs of rows that are read again where a table is found to take second rows now: longer than the
time between two looks at it."""


class Fold:
    """One fold; afterwards no other producer writes this shard.

    Args:
        context: of the shard; its sink may have just been made.
        is_again: the topic was read to its end before; what the runner began with is older.
    """

    def __init__(self, context: PublishingContext, *, is_again: bool = False) -> None:
        self._context = context
        self._is_again = is_again
        self._reads_all = False
        self._shown = context.parts.clock.monotonic()

    def run(self) -> None:
        """Do it.

        Raises:
            StateError: run.stopping, index.…
            SinkError: as of `ShardSink.fold`.
        """
        context = self._context
        with context.timed("fold"):
            context.sink.ready()
            index = context.index
            if index.is_new:
                self._begin_index()
                self._reads_all = index.reads_everywhere and not index.offsets
            self._check_topics()
            context.look_at_clock()
            index.keep_times(context.assignment.layout.read_as, context.now)
            self._keep_contents()
            jumps = Jumps(index.known) if index.undecided is None else None
            self._read(jumps)
            self._note_truncated(0)  # also where nothing was left to be read
            if context.sink.offsets != index.offsets:
                index.moved_to(context.sink.offsets)
            if index.reads_everywhere:
                index.has_read_everywhere(context.own_places())
            if self._reads_all:
                context.report.is_placed = not context.sink.last_fold.misplaced
            context.report.not_ours += context.sink.last_fold.not_ours
            if jumps is not None:
                context.report.jumps += jumps.found()
            self._decide_baseline()

    def _read(self, jumps: Jumps | None) -> None:
        context = self._context
        for part in self._visible():
            self._take(part, context.now, jumps)
            context.parts.failpoint("during_fold")
            self._go_on(context.sink.last_fold.unread)

    def _keep_contents(self) -> None:
        """What tells rows of one version apart, where the table takes several: of all versions.

        An index from before, when the table refused a second row, lacks it.
        """
        context, index = self._context, self._context.index
        are_kept = context.rules.contents_of is not None
        if are_kept and index.offsets and not index.has_contents:
            for part in context.sink.fold(
                {},
                everywhere=True,
                with_contents=True,
                meanwhile=lambda: self._go_on(context.sink.last_fold.unread),
            ):
                index.add_contents(part.contents)
                self._go_on(context.sink.last_fold.unread)
            index.go_back(_UNNOTICED)
        index.note_contents(are_kept)

    def _go_on(self, left: int) -> None:
        """Leave where the runner is to; else say once a second that it is alive.

        Args:
            left: records to read, as far as that is known.
        """
        context = self._context
        context.require_going_on()
        if context.parts.clock.monotonic() - self._shown > _SHOWN_EVERY:
            self._shown = context.parts.clock.monotonic()
            context.post(Folding(context.shard.number, context.report.folded, left))

    def _visible(self) -> Iterator[Folded]:
        """What of the topic the index does not know; all that it knows is visible at the end."""
        context, index = self._context, self._context.index
        while True:
            if lost := self._missing_markers():
                context.report.restored += context.sink.restore(lost, lambda: self._go_on(0))
                index.restored()
            try:
                yield from context.sink.fold(
                    index.offsets,
                    index.written,
                    acknowledged=context.beginning.acknowledged,
                    everywhere=index.reads_everywhere,
                    with_contents=context.rules.contents_of is not None,
                    meanwhile=lambda: self._go_on(context.sink.last_fold.unread),
                )
            except MissingMarkerError as lost:
                self._reads_all = False  # the next one goes on where this one has come to
                index.note_missing_markers(lost.written)
            else:
                return

    def _missing_markers(self) -> dict[tuple[str, int], tuple[int, int]]:
        """What is to be restored: as the index knows it, and what others have published behind it.

        They may have been left open in turn, and ending one transaction ends all of these.
        """
        index, acknowledged = self._context.index, self._context.beginning.acknowledged
        noted = index.missing_markers
        lost = {
            place: (first, max(end, acknowledged.get(place, 0) - 1))
            for place, (first, end) in noted.items()
        }
        if lost != noted:
            index.note_missing_markers(lost)
        return lost

    def _note_truncated(self, newest: int) -> None:
        """Note a cut topic before the offsets move on, and drop the position of an index that has
        missed records which were cut."""
        context, index = self._context, self._context.index
        index.note_truncated(context.sink.last_fold.truncated, newest)
        offsets, known = index.offsets, context.beginning.acknowledged
        if context.sink.last_fold.truncated and any(
            known.get(place, 0) > offsets.get(place, 0)
            for place in context.own_places()
            if place[0] == context.assignment.config.sink.topic
        ):
            index.go_back(None)

    def _take(self, part: Folded, now: int, jumps: Jumps | None) -> None:
        context, index = self._context, self._context.index
        # one from the future, published since a later version was there, says nothing
        past = part.create_times[part.create_times <= now]
        self._note_truncated(int(past.max(initial=0)))
        if part.kind == "gaps":
            index.fold_gaps(part.gaps, part.offsets, now)
        else:
            context.report.folded += len(part.aggregate_ids)
            self._take_events(part, now, jumps)

    def _take_events(self, part: Folded, now: int, jumps: Jumps | None) -> None:
        context, index = self._context, self._context.index
        first_version = context.rules.first_version
        versions: dict[str, list[int]] = {}
        below: dict[str, list[int]] = {}
        for aggregate_id, version in zip(part.aggregate_ids, part.versions.tolist(), strict=True):
            of = versions if version >= first_version else below
            of.setdefault(aggregate_id, []).append(version)
        if jumps is not None:
            jumps.add(part.kind, versions)
        last = {a: max(v) for a, v in versions.items()}
        created = context.rules.steady(part.create_times)
        created = np.where(created > 0, created, now)  # a record that does not say
        times = _times(part, last, created)
        rewritten = self._rewritten(part, [*versions], created)
        index.fold_events(
            last,
            versions,
            part.offsets,
            now,
            refused=below,
            times=times,
            rewritten=rewritten,
            contents=part.contents,
        )

    def _rewritten(self, part: Folded, ids: list[str], created: np.ndarray) -> dict[str, Rewritten]:
        """What is known of rewritten versions, with the rows of a chunk."""
        found = self._context.index.rewritten(ids)
        if not (found or part.published):
            return {}
        rows = zip(part.aggregate_ids, part.versions.tolist(), created.tolist(), strict=True)
        for number, (aggregate_id, version, at) in enumerate(rows):
            if number in part.published:
                last, since = part.published[number]
                known = found.get(aggregate_id)
                if known is None or (known.since, known.last) < (since, last):
                    found[aggregate_id] = Rewritten(since, last)
            if aggregate_id in found:
                found[aggregate_id] = found[aggregate_id].plus(version, at)
        return found

    # -- what is decided about an index that is new, older, or of other topics ---------------------

    def _begin_index(self) -> None:
        """A new index, from those of another number of shards where there are any."""
        context = self._context
        assignment, beginning, shard = context.assignment, context.beginning, context.shard
        directories = [Path(folder) for folder in beginning.former_indexes]
        if beginning.former_shards is not None and not directories:
            former = beginning.former_shards
            directories = [index_folder(assignment.config, former, n) for n in range(former)]
        # Partitions were added, or it is unknown whether any were: what was written before may be
        # where another shard writes now.
        everywhere = bool(beginning.former_indexes) or not beginning.is_placed
        if not directories:
            context.index.begin(assignment.start, everywhere=everywhere)
            return
        own = shard.topic_partitions()
        partitions = assignment.partitions
        every = [(t, p) for t in assignment.config.sink.topics for p in range(partitions)]
        context.index.move_from(
            directories,
            lambda aggregate_id: admission.topic_partition(aggregate_id, partitions) in own,
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

    def _check_topics(self) -> None:
        """Whether the topics are those that the offsets of the index belong to.

        One beside the topic that was made again is empty, and that is all.
        """
        context = self._context
        sink, index = context.assignment.config.sink, context.index
        ids = topic_ids(context.parts.clients, sink.topics)
        known = index.topics
        made_again = {topic for topic, id_ in ids.items() if known.get(topic, id_) != id_}
        if sink.topic in made_again:
            if ids[sink.topic] != sink.accept_topic_id:
                raise topic_remade(sink, ids[sink.topic])
            made_again = set(sink.topics)
        if made_again or ids.items() - known.items():
            index.note_topics(ids, made_again)
        context.report.made_again += sorted(made_again)

    def _decide_baseline(self) -> None:
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
        oldest = oldest_events(context.parts.clients, own, app_ids, lambda: self._go_on(0))
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
                self._take_events(part, context.now, None)
            self._go_on(0)
        context.parts.failpoint("after_baseline")

    def _is_left(self, aggregate_id: str, known: Known, cut: Mapping[int, int]) -> bool:
        """Whether an aggregate's last event is still on the topic: then all that was published
        after it is, too."""
        seen = Seen.unpacked(known.times.get(aggregate_id, 0))
        partition = admission.topic_partition(aggregate_id, self._context.shard.partitions)
        return seen.is_of_last and seen.newest >= cut[partition]

    def _rows(self, keys: Any, cut: Mapping[int, int]) -> Iterator[tuple[str, int, int, bool]]:
        """Aggregate, version and time of rows, and whether their records may be cut."""
        columns = (values(keys, name) for name in ("aggregate_id", "version", "create_time"))
        for a, version, created in zip(*columns, strict=True):
            partition = admission.topic_partition(a, self._context.shard.partitions)
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


def _times(part: Folded, last: Mapping[str, int], created: np.ndarray) -> dict[str, Seen]:
    """When the rows of a chunk were created, by aggregate."""
    newest: dict[str, int] = {}
    of_last: dict[str, int] = {}
    rows: Any = zip(part.aggregate_ids, part.versions.tolist(), created.tolist(), strict=True)
    for aggregate_id, version, at in rows:
        if at > newest.get(aggregate_id, at - 1):
            newest[aggregate_id] = at
        if version == last.get(aggregate_id):
            of_last[aggregate_id] = at
    is_event = part.kind == "events"
    return {a: Seen(newest[a], is_event and of_last[a] == newest[a]) for a in last}
