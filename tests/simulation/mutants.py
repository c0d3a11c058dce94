"""The real code with one invariant broken at a time: what the simulation must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from confluent_kafka import OFFSET_INVALID

from bench.window_only import pass_over
from eventpub.admission import decide
from eventpub.admission.bulk import Contiguous
from eventpub.admission.walk import Walker
from eventpub.coordinator.coordinator import Coordinator
from eventpub.coordinator.position import DurableState, Windows
from eventpub.coordinator.recount import Recount
from eventpub.errors import StateError
from eventpub.index import Index
from eventpub.index.values import BucketCounts
from eventpub.publisher import prepare, workers
from eventpub.shard import answering, folding, publishing, runner
from eventpub.shard.answering import Answering
from eventpub.shard.assignment import Assignment
from eventpub.shard.baseline import Baseline
from eventpub.shard.pace import Pace
from eventpub.shard.publishing import Publishing
from eventpub.sink import client, layout
from eventpub.sink import shard as sink
from eventpub.sink.batch import Batch, Reports
from eventpub.sink.fold import Fold
from eventpub.sink.folded import Decoder
from eventpub.sink.transaction import TransactionWriter
from eventpub.sources.mysql.open_transactions import OpenTransactions
from tests.simulation import broker


@contextmanager
def no_fold() -> Iterator[None]:
    """The topic is not read back: a fold says that it has reached every end and gives nothing."""

    def read(self: Any) -> Iterator[Any]:
        self.offsets = self._list("latest")
        yield from ()

    with patch.object(Fold, "__iter__", read):
        yield


@contextmanager
def no_dedupe() -> Iterator[None]:
    """What is published already is not dropped, and the last check of a batch does not look."""

    def keep(self: Any, order: np.ndarray, last: np.ndarray) -> np.ndarray:
        _, code, version, *_ = self.columns
        for row in order:
            last[code[row]] = min(last[code[row]], version[row] - 1)
        return order

    with (
        patch.object(Contiguous, "_drop_known", keep),
        patch.object(publishing, "_assert_order", lambda *_: None),
    ):
        yield


@contextmanager
def no_hold() -> Iterator[None]:
    """Nothing waits for a missing version: whatever lies above the last one goes out."""
    with patch.object(decide, "_holes", lambda *_: []), patch.object(Walker, "_meet", pass_over):
        yield


@contextmanager
def index_before_commit() -> Iterator[None]:
    """The index remembers a batch before its transaction is committed."""
    publish = Publishing._publish

    def publish_(self: Any, decision: Any, known: Any, position: int | None, now: int) -> None:
        parts = self._context.parts

        def early(name: str) -> None:
            if name == "before_commit":
                self._context.index.record(decision, {}, position)
            parts.failpoint(name)

        with patch.object(self._context, "parts", replace(parts, failpoint=early)):
            publish(self, decision, known, position, now)

    with patch.object(Publishing, "_publish", publish_):
        yield


@contextmanager
def no_replacement() -> Iterator[None]:
    """After an answer that leaves a doubt, the batch is redone without reading the topic back."""

    class NoFold:
        def __init__(self, context: Any, *, is_again: bool = False) -> None:
            self.run = context.sink.ready if is_again else folding.Fold(context).run

    with patch.object(runner, "Fold", NoFold):
        yield


@contextmanager
def no_restoring() -> Iterator[None]:
    """What was committed and left open by the broker counts as visible."""

    def settle(self: Any) -> Any:
        ends = self._list("latest")
        for place, end in ends.items():
            self.offsets[place] = min(end, self.offsets.get(place, 0))
        blocked = {p for p, at in self._list("latest", committed=True).items() if at < ends[p]}
        if blocked:
            self.end_open(blocked)
            ends = self._list("latest")
        return ends

    with (
        patch.object(Fold, "_settle", settle),
        patch.object(Fold, "_before_marker", lambda *_: None),
    ):
        yield


@contextmanager
def trusted_ends() -> Iterator[None]:
    """An end that is as the index has it proves that what was written before it is visible."""
    with patch.object(Fold, "_require_visible", lambda _: None):
        yield


@contextmanager
def no_fence() -> Iterator[None]:
    """Writers of a former number of shards are not fenced when the publisher starts.

    What they write behind an old end of a fold would be noticed, too: see `any_end`.
    """
    with patch.object(prepare, "fence_all", lambda *_: None), any_end():
        yield


@contextmanager
def no_count() -> Iterator[None]:
    """Delivery reports are not counted before a commit."""

    def wait(self: Any, _: Any) -> bool:
        client.call(self.client.flush, 0.1)
        return True

    with (
        patch.object(TransactionWriter, "wait_for_delivery", wait),
        patch.object(Batch, "is_delivered", True),
    ):
        yield


@contextmanager
def no_recount() -> Iterator[None]:
    """Nothing is counted again."""
    with patch.object(Coordinator, "_compare", lambda _: None):
        yield


@contextmanager
def no_dead_fold() -> Iterator[None]:
    """The topic of dead letters is not read back."""
    places = vars(Decoder)["places"].func

    def others(self: Any) -> Any:
        return [place for place in places(self) if self.kind(place) != "dead"]

    with patch.object(Decoder, "places", property(others)):
        yield


@contextmanager
def blame_all() -> Iterator[None]:
    """Whatever the broker refuses together with a record that is too large counts as refused."""
    take_over = TransactionWriter._take_over

    def taken(self: Any) -> Any:
        producer = take_over(self)
        self.sends_singly = True
        return producer

    with patch.object(TransactionWriter, "_take_over", taken):
        yield


@contextmanager
def skip_twice() -> Iterator[None]:
    """A request to skip a gap that is done again gives up the next one."""
    answer = Answering._act

    def twice(self: Any, request: Any) -> str:
        outcome = answer(self, request)
        hold = self._context.index.holds.get(request.aggregate_id)
        return (
            outcome if hold is None else answer(self, replace(request, version=hold.first_missing))
        )

    with patch.object(Answering, "_act", twice):
        yield


@contextmanager
def no_span() -> Iterator[None]:
    """Records between two whose delivery is reported count as delivered, whatever the offsets."""
    with patch.object(Reports, "is_whole", True):
        yield


@contextmanager
def any_offset() -> Iterator[None]:
    """What the client gives for an offset it has not got, -1001, counts as one."""

    class Given(int):
        def __ge__(self, other: int) -> bool:
            return True

    with patch.object(broker, "OFFSET_INVALID", Given(OFFSET_INVALID)):
        yield


@contextmanager
def no_ended() -> Iterator[None]:
    """Nobody learns of the end of a transaction that the boundary no longer waited for (A14)."""
    with patch.object(OpenTransactions, "take_ended", lambda _: []):
        yield


@contextmanager
def no_ever() -> Iterator[None]:
    """What is prepared when it is seen first is as old as the server says (A14)."""
    begins = OpenTransactions._begins

    def with_thread(self: Any, found: Any, *rest: Any, **options: Any) -> Any:
        return replace(
            begins(self, replace(found, thread=found.thread or 99), *rest, **options),
            thread=found.thread,
        )

    with patch.object(OpenTransactions, "_begins", with_thread):
        yield


@contextmanager
def no_liveness() -> Iterator[None]:
    """A gap is skipped although a transaction is open that may fill it."""
    with patch.object(OpenTransactions, "open_since", None):
        yield


@contextmanager
def no_truncated() -> Iterator[None]:
    """A new index of a topic that retention has cut has no baseline (A10)."""
    with patch.object(Fold, "truncated", property(lambda _: False, lambda *_: None), create=True):
        yield


@contextmanager
def any_end() -> Iterator[None]:
    """A fold is believed to have ended where the topic does, whoever has answered."""
    with patch.object(sink.ShardSink, "_has_missed", lambda *_: False):
        yield


@contextmanager
def any_record() -> Iterator[None]:
    """A record of which nothing can be read stops the fold (A16)."""
    decode = Decoder.decode

    def strict(self: Any, *arguments: Any) -> Any:
        folded = decode(self, *arguments)
        if self.not_ours:
            raise StateError("fold.garbage", "this is no record of eventpub")
        return folded

    with patch.object(Decoder, "decode", strict):
        yield


@contextmanager
def no_rewritten() -> Iterator[None]:
    """Nothing is kept of versions that were written anew but the newest time (A13)."""
    with patch.object(Index, "rewritten", lambda *_: {}):
        yield


@contextmanager
def from_now() -> Iterator[None]:
    """A start counts again what is younger than the horizon now, whatever was hidden (A21)."""
    whole = Recount._count_again

    def count_again(self: Any, now: int, position: int, hidden_since: int | None) -> None:
        del position, hidden_since
        whole(self, now, now, None)

    with patch.object(Recount, "_count_again", count_again):
        yield


@contextmanager
def no_day_below() -> Iterator[None]:
    """Without progress.json nothing counts as hidden (A14, A21)."""
    with patch.object(prepare, "hidden_at_most", lambda position: position):
        yield


@contextmanager
def any_source() -> Iterator[None]:
    """Whoever has written a record of the topics, it counts (A16)."""
    with patch.object(Decoder, "_counts", lambda *_: True):
        yield


@contextmanager
def any_topic() -> Iterator[None]:
    """Neither the ids of the topics nor their ends are compared with what was written (A6)."""

    def written(sink: Any, ids: Any, known: Any, ends: Any) -> Any:
        del known
        return layout.check_written(sink, ids, ids, ends)

    with (
        patch.object(prepare, "check_written", written),
        patch.object(workers, "check_written", written),
        patch.object(folding.Fold, "_check_topics", lambda _: None),
        patch.object(
            Fold, "_reached", lambda self, place, more=0: self.offsets.get(place, 0) + more
        ),
    ):
        yield


@contextmanager
def no_halving() -> Iterator[None]:
    """What was too much for one transaction is tried again as it is (A8)."""
    with patch.object(Pace, "failed", lambda *_: None):
        yield


@contextmanager
def no_older() -> Iterator[None]:
    """An index that is older than where the topic was cut has no baseline (A10)."""
    note = Index.note_truncated

    def of_new(self: Any, truncated: bool, newest: int) -> None:
        if self.undecided is not None:
            note(self, truncated, newest)

    with patch.object(Index, "note_truncated", of_new):
        yield


@contextmanager
def low_as_baseline() -> Iterator[None]:
    """Whatever commits late below the position counts as published where an index is lost (A4)."""
    with patch.object(
        Baseline, "_lost_baseline", lambda baseline, _: (baseline._context.beginning.low, {})
    ):
        yield


@contextmanager
def no_cut_before() -> Iterator[None]:
    """Only what waits tells where the baseline is, not what retention has left (A4)."""
    with patch.object(Baseline, "_count_as_published", lambda *_: None):
        yield


@contextmanager
def no_skip_missing() -> Iterator[None]:
    """What commits below an event that counts as published was published, too."""
    with patch.object(Baseline, "_skip_missing", lambda *_: None):
        yield


@contextmanager
def none_left() -> Iterator[None]:
    """What stands above the last event that the topic has may have been cut."""
    with patch.object(Baseline, "_is_left", lambda *_: False):
        yield


@contextmanager
def counted_twice() -> Iterator[None]:
    """What is read again is counted again."""
    with patch.object(BucketCounts, "delete_since", lambda *_: None):
        yield


@contextmanager
def any_time() -> Iterator[None]:
    """A time in the future tells what was published, like any other (A6)."""
    take = folding.Fold._take

    def of_any(self: Any, part: Any, now: int) -> None:
        take(self, part, now)
        self._context.index.note_truncated(
            self._context.sink.last_fold.truncated, int(part.create_times.max(initial=0))
        )

    with patch.object(folding.Fold, "_take", of_any):
        yield


@contextmanager
def some_reports() -> Iterator[None]:
    """The position is that of the shards that have reported, whether all of them have or not."""
    take = DurableState.take

    def taken(self: Any, shards: Any, report: Any, recounting: Any) -> None:
        take(self, [shard for shard in shards if shard.report is not None], report, recounting)

    def some(self: Any) -> Any:
        reported = [s.report.position for s in self._shards if s.report is not None]
        return (min(reported), max([*reported, self.planned])) if reported else None

    with patch.object(DurableState, "take", taken), patch.object(Windows, "read_upto", some):
        yield


@contextmanager
def no_contents() -> Iterator[None]:
    """Rows of one version are not told apart, though the table allows them."""
    whole = Assignment.rules

    def rules(assignment: Any) -> Any:
        return replace(whole(assignment), contents_of=None)

    with patch.object(Assignment, "rules", rules):
        yield


@contextmanager
def no_contents_folded() -> Iterator[None]:
    """What tells them apart is not read back from the topic."""
    with patch.object(Decoder, "_content", lambda *_: None):
        yield


@contextmanager
def no_search() -> Iterator[None]:
    """What users want published is not looked for where they have not searched."""
    with patch.object(answering, "has_event", lambda *_, **__: False):
        yield


MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    f.__name__: f
    for f in (
        no_fold,
        no_dedupe,
        no_hold,
        index_before_commit,
        no_recount,
        no_replacement,
        no_restoring,
        no_fence,
        no_count,
        no_dead_fold,
        blame_all,
        skip_twice,
        any_offset,
        no_span,
        no_ended,
        no_ever,
        no_liveness,
        no_truncated,
        any_end,
        any_record,
        no_rewritten,
        from_now,
        no_day_below,
        any_source,
        any_topic,
        no_halving,
        no_older,
        low_as_baseline,
        no_cut_before,
        no_skip_missing,
        none_left,
        counted_twice,
        any_time,
        some_reports,
        no_search,
        no_contents,
        no_contents_folded,
        trusted_ends,
    )
}
"""By name. What each breaks is its docstring."""

NOTICED_BY = {
    "no_fold": ("any", 14),
    "no_dedupe": ("any", 14),
    "no_hold": ("any", 2),
    "index_before_commit": ("any", 85),
    "no_recount": ("any", 5),
    "no_replacement": ("any", 1),
    "no_restoring": ("any", 52),
    "no_fence": ("overlap", 264),
    "no_count": ("any", 12),
    "no_dead_fold": ("any", 4),
    "blame_all": ("any", 12),
    "skip_twice": ("any", 201),
    "any_offset": ("any", 266),
    "no_span": ("any", 362),
    "no_ended": ("seen", 69),
    "no_ever": ("prepared", 6),
    "no_liveness": ("seen", 620),
    "no_truncated": ("forgotten", 0),
    "any_record": ("garbage", 0),
    "no_rewritten": ("restored", 40),
    "from_now": ("downtime", 2),
    "no_day_below": ("lost_progress", 10),
    "any_source": ("forged", 0),
    "any_topic": ("recreated", 2),
    "no_halving": ("large", 5),
    "no_older": ("older_and_cut", 17),
    "low_as_baseline": ("retention_any", 21),
    "no_cut_before": ("retention_any", 14),
    "no_skip_missing": ("retention_any", 168),
    "none_left": ("retention_any", 4844),
    "counted_twice": ("second_rows", 21269),
    "any_time": ("future_and_cut", 6),
    "no_search": ("retries", 4),
    "no_contents": ("second_rows", 0),
    "no_contents_folded": ("second_rows", 12),
    "trusted_ends": ("lost_commits", 1),
}
"""The kind of schedules and the first of their seeds that notices each, but for those that are
played through."""
