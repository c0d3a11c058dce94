"""What users ask for: look for what an aggregate misses, give its gap up, show what waits."""

from __future__ import annotations

import json
from dataclasses import asdict

from eventpub import admission
from eventpub.admission import VersionRange, values
from eventpub.channel import Request
from eventpub.shard import pace
from eventpub.shard.context import ShardContext
from eventpub.shard.publishing import NO_EVENTS, Publishing


class Answering:
    """Answers requests about one shard's aggregates."""

    def __init__(self, context: ShardContext, publishing: Publishing) -> None:
        self._context = context
        self._publishing = publishing

    def answer(self, request: Request) -> None:
        """The answer is in the next report."""
        if request.action == "list":
            holds, skipped = self._context.index.pending()
            found = {"holds": [asdict(hold) for hold in holds], "skipped": skipped}
            self._context.report.answers[request.id] = json.dumps(found)
        else:
            self._context.report.answers[request.id] = self._act(request)

    def _act(self, request: Request) -> str:
        context, step = self._context, self._publishing.step
        index, a, version = context.index, request.aggregate_id, request.version
        hold = index.holds.get(a)
        if request.action == "skip" and version is None:
            return "nothing is held"  # as far as who asked could see
        if hold is not None and version in {None, hold.first_missing}:
            version = hold.first_missing
            if request.to_version is not None and self._is_larger(hold, request.to_version):
                return "changed"
            if request.action == "skip":
                step(NO_EVENTS, None, skip_now=[a])
            else:
                step(NO_EVENTS, None, retry_now=[a])
            hold = index.holds.get(a)
            if hold is not None and hold.first_missing <= version:
                return "still missing"
        known = index.known([a])
        skipped = known.skipped.get(a, ())
        if version is not None and version <= known.last.get(a, version - 1):
            # now, or before a crash that nobody saw: no other gap is given up for it
            return "skipped" if admission.in_ranges(version, skipped) else "found"
        if request.action == "retry" and skipped:
            ranges = [VersionRange(a, first, last) for first, last in skipped]
            found = False
            while ranges:
                rows, ranges = context.lookup.fetch(ranges, pace.CHUNK_ROWS, pace.CHUNK_BYTES)
                found = found or rows.num_rows > 0
                step(rows, None)
            return "found" if found else "still missing"
        return "nothing is held" if request.action == "skip" else "nothing is missing"

    def _is_larger(self, hold: admission.Hold, last: int) -> bool:
        """Whether more is missing than up to a version: what was above it was deleted since."""
        above = VersionRange(hold.aggregate_id, hold.first_missing + 1, hold.seen)
        there = values(self._context.lookup.backtrack([above], 1), "version")
        return bool(there) and min(there) - 1 > last
