"""Fold: brings the index up to the topic, which is the truth, before anything is published.

Reads what the index does not know of the shard's partitions: from a former owner, a transaction
whose answer was lost, or another machine. Normally there is nothing to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eventpub.admission.model import Rewritten, Seen
from eventpub.channel import Folding
from eventpub.shard.baseline import Baseline
from eventpub.shard.context import PublishingContext
from eventpub.sink.folded import Folded
from eventpub.sink.layout import recreated
from eventpub.sink.missing_markers import MissingMarkerError
from eventpub.sink.topics import topic_ids
from eventpub.times import ZONES_DIFFER

_SHOWN_EVERY = 1.0
"""Seconds between progress reports."""

_MOST_SHOWN = 20
"""Jumps named in a report."""

_UNNOTICED = 300_000_000
"""µs of rows read again if the table now takes second rows: more than between two checks of it."""


class Fold:
    """One fold, after which no other producer writes; `is_again`: not the runner's first."""

    def __init__(self, context: PublishingContext, *, is_again: bool = False) -> None:
        self._context = context
        self._baseline = Baseline(
            context,
            is_again=is_again,
            take=lambda part: self._take_events(part, context.now),
            meanwhile=lambda: self._go_on(0),
        )
        self._reads_all = False
        self._shown = context.parts.clock.monotonic()

    def run(self) -> None:
        """Fold.

        Raises:
            StateError: run.stopping, index.…
            SinkError: see `ShardSink.fold`.
        """
        context = self._context
        with context.timed("fold"):
            context.sink.ready()
            index = context.index
            if index.is_new:
                self._baseline.begin_index()
                self._reads_all = index.reads_everywhere and not index.offsets
            self._check_topics()
            context.look_at_clock()
            # what others have published since, as the other engine, is on the topic; an index that
            # has gone back to read rows again stays where it is
            horizon = context.assignment.config.recount.horizon
            index.skip_to(context.beginning.low - ZONES_DIFFER - horizon)
            layout = context.assignment.layout
            index.keep_times(layout.read_as, context.now)
            index.keep_ids(layout.ids_as, layout.columns, context.lookup.existing)
            self._keep_contents()
            self._read()
            self._note_truncated(0)  # also if nothing was left to read
            index.moved_to(context.sink.offsets)
            if index.reads_everywhere:
                index.has_read_everywhere(context.own_places())
            if self._reads_all:
                context.report.is_placed = not context.sink.last_fold.decoder.misplaced
            context.report.not_ours += context.sink.last_fold.decoder.not_ours
            self._baseline.decide()

    def _keep_contents(self) -> None:
        """If the table takes second rows, read back all contents that an older index lacks."""
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
        index.note(has_contents=are_kept)

    def _go_on(self, left: int) -> None:
        """Raise if stopping; report once a second, with the number of records `left`."""
        context = self._context
        context.require_going_on()
        if context.parts.clock.monotonic() - self._shown > _SHOWN_EVERY:
            self._shown = context.parts.clock.monotonic()
            context.post(Folding(context.shard.number, context.report.folded, left))

    def _read(self) -> None:
        """Read what the index does not know; at the end, all that it knows is visible."""
        context, index = self._context, self._context.index
        while True:
            if lost := self._missing_markers():
                context.report.restored += context.sink.restore(lost, lambda: self._go_on(0))
                index.restored()
            try:
                for part in context.sink.fold(
                    index.offsets,
                    index.written,
                    acknowledged=context.beginning.acknowledged,
                    everywhere=index.reads_everywhere,
                    with_contents=context.rules.contents_of is not None,
                    meanwhile=lambda: self._go_on(context.sink.last_fold.unread),
                ):
                    self._take(part, context.now)
                    context.parts.failpoint("during_fold")
                    self._go_on(context.sink.last_fold.unread)
            except MissingMarkerError as lost:
                self._reads_all = False  # the next fold continues where this one ends
                index.note_missing_markers(lost.written)
            else:
                return

    def _missing_markers(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Ranges to restore, extended by what others published after them: it may be open as well,
        and ending one transaction ends all."""
        index, acknowledged = self._context.index, self._context.beginning.acknowledged
        lost = {
            place: (first, max(end, acknowledged.get(place, 0) - 1))
            for place, (first, end) in index.missing_markers.items()
        }
        index.note_missing_markers(lost)
        return lost

    def _note_truncated(self, newest: int) -> None:
        """Record a truncated topic before offsets move; without all records, drop the position."""
        context, index = self._context, self._context.index
        index.note_truncated(context.sink.last_fold.truncated, newest)
        offsets, known = index.offsets, context.beginning.acknowledged
        if context.sink.last_fold.truncated and any(
            known.get(place, 0) > offsets.get(place, 0)
            for place in context.own_places()
            if place[0] == context.assignment.config.sink.topic
        ):
            index.go_back(None)

    def _take(self, part: Folded, now: int) -> None:
        context, index = self._context, self._context.index
        # an event from the future, published for a later version, says nothing
        past = part.create_times[part.create_times <= now]
        self._note_truncated(int(past.max(initial=0)))
        if part.kind == "gaps":
            index.fold_gaps(part.gaps, part.offsets, now)
        else:
            context.report.folded += len(part.aggregate_ids)
            self._take_events(part, now)

    def _take_events(self, part: Folded, now: int) -> None:
        """Add events, late events or dead letters to the index."""
        context, index = self._context, self._context.index
        created = context.rules.steady(part.create_times)
        created = np.where(created > 0, created, now)  # a record without a time
        rows = list(zip(part.aggregate_ids, part.versions.tolist(), created.tolist(), strict=True))
        of_each: dict[str, list[tuple[int, int]]] = {}
        below: dict[str, list[int]] = {}
        for aggregate_id, version, at in rows:
            if version >= context.rules.first_version:
                of_each.setdefault(aggregate_id, []).append((version, at))
            else:
                below.setdefault(aggregate_id, []).append(version)
        versions = {a: [version for version, _ in of] for a, of in of_each.items()}
        shown = context.report.jumps
        if part.kind == "events" and index.undecided is None and len(shown) < _MOST_SHOWN:
            shown += jumps(index.known([*versions]).last, versions)[: _MOST_SHOWN - len(shown)]
        last = {a: max(of) for a, of in versions.items()}
        newest = {a: max(at for _, at in of) for a, of in of_each.items()}
        is_event = part.kind == "events"
        index.fold_events(
            last,
            versions,
            part.offsets,
            now,
            refused=below,
            times={
                a: Seen(newest[a], is_event and (last[a], newest[a]) in of_each[a]) for a in last
            },
            rewritten=self._rewritten(part, rows),
            contents=part.contents,
        )

    def _rewritten(
        self, part: Folded, rows: Sequence[tuple[str, int, int]]
    ) -> dict[str, Rewritten]:
        """Rewritten versions, with the rows of a chunk."""
        found = self._context.index.rewritten(list(dict.fromkeys(part.aggregate_ids)))
        if not (found or part.published):
            return {}
        for number, (aggregate_id, version, at) in enumerate(rows):
            if number in part.published:
                last, since = part.published[number]
                known = found.get(aggregate_id)
                if known is None or (known.since, known.last) < (since, last):
                    found[aggregate_id] = Rewritten(since, last)
            if aggregate_id in found:
                found[aggregate_id] = found[aggregate_id].plus(version, at)
        return found

    def _check_topics(self) -> None:
        """Raise if the main topic was recreated, unless accepted; others are then just empty."""
        context = self._context
        sink, index = context.assignment.config.sink, context.index
        ids = topic_ids(context.parts.clients, sink.topics)
        made_again = recreated(sink, ids, index.topics)
        index.note_topics(ids, made_again)
        context.report.made_again += sorted(made_again)


def jumps(known: Mapping[str, int], versions: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Events above the next version of their aggregates, after skips and dead letters were read.

    A publisher skips no version, except by a recorded skip or a dead letter. So they are another
    program's under this application's id, or the store was restored to an earlier time.
    """
    found = []
    for aggregate_id, above in versions.items():
        if (last := known.get(aggregate_id)) is None:
            continue
        for version in sorted(above):
            if version > last + 1:
                found.append({"aggregate_id": aggregate_id, "known": last, "found": version})
                break
            last = max(last, version)
    return found
