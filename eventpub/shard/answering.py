"""Answers users' requests: retry or skip a gap, list what is held, publish a missing row."""

from __future__ import annotations

import json
from dataclasses import asdict

from eventpub.admission.model import Hold, VersionRange, in_ranges, topic_partition, without
from eventpub.channel import Request
from eventpub.errors import EventpubError, SinkError, StoreError, from_dict
from eventpub.shard.context import ShardContext
from eventpub.shard.publishing import NO_EVENTS, Publishing
from eventpub.sink.reading import has_event

_OF_THE_ROW = {"sink.too_many_refused", "store.other_history", "store.row_invalid"}
"""Errors caused by the requested row alone."""

_OF_THE_SHARD = {"sink.fenced", "sink.own_request_late", "index.corrupt"}
"""Errors independent of the request, which need more than a restart."""


class Answering:
    def __init__(self, context: ShardContext, publishing: Publishing) -> None:
        self._context = context
        self._publishing = publishing

    def answer(self, request: Request, *, gives_up: bool = False) -> None:
        """Put the answer into the next report.

        Args:
            gives_up: answer with an error that waiting does not fix, instead of raising it.

        Raises:
            StoreError, SinkError, StateError: retriable even if waiting does not fix it, as the
                coordinator limits how often a request may fail.
        """
        try:
            answer = self._answer(request)
        except EventpubError as error:
            if error.retriable or error.code in _OF_THE_SHARD:
                raise
            if not gives_up:
                raise from_dict(error.to_dict() | {"retriable": True}) from error
            answer = f"failed: {error.code}: {error.message}"
        self._context.report.answers[request.id] = answer

    def _answer(self, request: Request) -> str:
        if request.action == "list":
            pending = self._context.index.pending(request.most, request.about)
            return json.dumps(asdict(pending))
        if request.action == "publish":
            return self._try_to_publish(request)
        return self._act(request)

    def _act(self, request: Request) -> str:
        index, step = self._context.index, self._publishing.step
        a, version = request.aggregate_id, request.version
        hold = index.holds.get(a)
        if request.action == "retry":
            return self._retry(a, hold)
        if version is None:
            return "nothing is held"  # as far as the requester could see
        if hold is not None and version == hold.first_missing:
            if request.to_version is not None and self._is_larger(hold, request.to_version):
                return "changed"
            step(NO_EVENTS, None, skip_now=[a])
            hold = index.holds.get(a)
            if hold is not None and hold.first_missing <= version:
                return "still missing"
        known = index.known([a])
        if version <= known.last.get(a, version - 1):
            # now, or before an unreported crash: do not skip another gap for it
            return "skipped" if in_ranges(version, known.skipped.get(a, ())) else "found"
        return "nothing is held"

    def _retry(self, a: str, hold: Hold | None) -> str:
        """Look up all that an aggregate lacks, held or skipped."""
        index, step = self._context.index, self._publishing.step
        known = index.known([a])
        if hold is not None:
            step(NO_EVENTS, None, retry_now=[a])
        skipped = index.known([a]).skipped.get(a, ())
        ranges = [VersionRange(a, first, last) for first, last in skipped]
        while ranges:
            rows, ranges = self._context.fetch(ranges)
            step(rows, None)
        if index.holds.get(a) is not None or index.known([a]).skipped.get(a):
            return "still missing"
        if hold is not None or skipped:
            return "found"
        return "nothing is missing" if a in known.last else "nothing is held"

    def _is_larger(self, hold: Hold, last: int) -> bool:
        """Whether a skip would give up more than up to `last`: rows were deleted since."""
        above = VersionRange(hold.aggregate_id, hold.first_missing + 1, hold.seen)
        there = self._context.lookup.versions(above, 1)
        return min(there, default=last) - 1 > last

    # -- a row that is not on the topic ------------------------------------------------------------

    def _try_to_publish(self, request: Request) -> str:
        """Like `_publish`, but an error of this row alone does not end the runner."""
        index, a = self._context.index, request.aggregate_id
        before = index.known([a]).skipped.get(a, ())
        try:
            return self._publish(request)
        except (StoreError, SinkError) as error:
            if error.code not in _OF_THE_ROW:
                raise
            index.note_skipped(a, before)
            return f"failed: {error.code}: {error.message}"

    def _publish(self, request: Request) -> str:  # noqa: PLR0911 (one case after the other)
        """Publish a row that is not on the topic, whenever it was created.

        Above the last version it goes out in order. Below, it is a late event, which the index
        first marks as skipped: if the answer is lost, a fold removes the mark, so it is not
        published twice.
        """
        context, a, version = self._context, request.aggregate_id, request.version
        index, rules, lookup = context.index, context.rules, context.lookup
        if version is None or version < rules.first_version:
            return "below the first version"
        known = index.known([a])
        last = known.last.get(a, rules.first_version - 1)
        is_late = version <= last
        if is_late and rules.late != "publish":
            return "late events are not published"
        is_there = self._was_published(request, version)
        if is_there is None:
            return "not known"
        if is_there:
            return "published before"
        one = VersionRange(a, version, version)
        rows, _ = self._context.fetch([one])
        if not rows.num_rows:
            return "not in the store"
        if is_late:
            rows = rows.slice(0, 1)
            others = without(version, known.skipped.get(a, ()))
            index.note_skipped(a, [*others, (version, version)])
        elif a in known.last or known.baseline is None:
            below = lookup.versions(VersionRange(a, last + 1, version - 1), version - last)
            if len({*below}) < version - last - 1:
                return "versions below it are missing"
        before, run, replaced = len(context.report.dead), index.dead_run, context.report.replaced
        late = context.report.counts.late
        since = rows.column("create_time")[0].as_py()
        try:
            self._publishing.step(rows, None, retry_now=[a] * (a in index.holds), since=since)
        finally:
            # a manual retry says nothing about the health of store, broker or writers
            index.note(dead_run=run)
            context.report.counts.late = late
        dead = context.report.dead[before:]
        if any((d["aggregate_id"], d["version"]) == (a, version) for d in dead):
            return "refused again"
        if version > index.known([a]).last.get(a, version - 1):
            return "held"
        if context.report.replaced > replaced and self._was_published(request, version) is False:
            return "refused again"  # the fold read back its dead letter
        return "published"

    def _was_published(self, request: Request, version: int) -> bool | None:
        """Whether it was, since the client searched the topic; None: unknown."""
        context, a = self._context, request.aggregate_id
        config = context.assignment.config
        partition = topic_partition(a, context.shard.partitions)
        if partition >= len(request.searched):
            return None
        place = (config.sink.topic, partition)
        return has_event(
            context.parts.clients,
            place,
            (request.searched[partition], context.known_upto(place)),
            a,
            version,
            app_id=config.app.id,
            meanwhile=context.require_going_on,
        )
