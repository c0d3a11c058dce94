"""What a fold decides about an index whose topic was cut above what it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventpub import config
from eventpub.admission.model import EVENTS, Decision, Shard
from eventpub.channel import Beginning, Report
from eventpub.index import Index
from eventpub.shard import baseline
from eventpub.times import SYSTEM_CLOCK

SECOND = 1_000_000
NOW = 1_700_000_000 * SECOND
READ_TO = NOW - 10 * SECOND
HORIZON, LONGEST_HOLD = 300 * SECOND, 64 * SECOND
KNOWN = {("t", 0): 101, ("t", 1): 50}
Decide = Callable[..., tuple[Index, Report, int]]


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decide]:
    """Has a fold decide that met a topic which begins behind what index and coordinator know."""
    index = Index(tmp_path / "index", {"app": "a"})
    index.begin(None)
    index.decide_baseline(None)
    index.moved_to(KNOWN)
    index.record(Decision(EVENTS.empty_table()), {}, READ_TO)
    monkeypatch.setattr(baseline, "list_offsets", lambda *_: {("t", 0): 5_000, ("t", 1): 0})

    def decided(
        newest: int,
        low: int = READ_TO,
        hidden_since: int | None = None,
        left: tuple[int | None, ...] = (),
        is_again: bool = False,
        forgotten: int | None = None,
        former_indexes: tuple[str, ...] = (),
    ) -> tuple[Index, Report, int]:
        oldest = {("t", partition): at for partition, at in enumerate(left)}
        monkeypatch.setattr(baseline, "oldest_events", lambda *_: oldest)
        counted: list[int] = [0]

        def keys(after: int, upto: int, _: Shard) -> tuple[()]:
            counted.append(upto if upto > after else 0)
            return ()

        settings = SimpleNamespace(
            sink=config.Sink(topic="t"),
            recount=SimpleNamespace(horizon=HORIZON),
            gaps=SimpleNamespace(policy="hold_aggregate"),
            app=SimpleNamespace(id="a"),
        )
        context: Any = SimpleNamespace(
            index=index,
            beginning=Beginning(
                low=low,
                position=low,
                acknowledged=KNOWN,
                hidden_since=hidden_since,
                former_indexes=former_indexes,
            ),
            assignment=SimpleNamespace(config=settings, start=None),
            rules=SimpleNamespace(longest_hold=LONGEST_HOLD, first_version=1),
            shard=Shard(0, 1, 2),
            report=Report(0),
            now=NOW,
            parts=SimpleNamespace(clients=None, clock=SYSTEM_CLOCK, failpoint=lambda _: None),
            low=lambda position: position,
            lookup=SimpleNamespace(keys=keys),
        )
        decision = baseline.Baseline(
            context, is_again=is_again, take=lambda _: None, meanwhile=lambda: None
        )
        if forgotten is not None:
            index.decide_baseline(decision._settled_by_all(index.position, forgotten))
        else:
            index.note_truncated(True, newest)
            decision.decide()
        return index, context.report, counted[-1]

    yield decided
    index.close()


@pytest.mark.parametrize("newest", [0, READ_TO + SECOND])
def test_what_others_wrote_may_be_cut_and_nothing_of_ours_is_given_up(
    decide: Decide, newest: int
) -> None:
    """A partition in which nothing of ours was written for longer than the retention.

    With a baseline, what commits late and what holds wait for would be lost. `newest`: nothing was
    read back, or what was published just before a crash.
    """
    index, report, _ = decide(newest)
    assert (index.baseline, report.baseline) == (None, None)
    assert report.repeats_after == READ_TO - HORIZON, (
        "it may have been ours, of just before a crash"
    )


def test_what_was_published_long_after_shows_that_the_whole_state_is_older(decide: Decide) -> None:
    newest = READ_TO + HORIZON + LONGEST_HOLD + SECOND
    index, report, _ = decide(newest)
    assert index.baseline == report.baseline == READ_TO + SECOND


def test_who_has_read_to_the_end_before_is_not_of_an_older_state(decide: Decide) -> None:
    """What it was told when it began is old; rows that commit late would count as published."""
    index, report, _ = decide(NOW + HORIZON + LONGEST_HOLD, is_again=True)
    assert (index.baseline, report.baseline) == (None, None)


OLDER = READ_TO + SECOND
"""The coordinator's `low`, of an index that has read to `READ_TO`."""
UNSEEN = OLDER - HORIZON - LONGEST_HOLD


@pytest.mark.parametrize(
    ("hidden", "left", "baseline", "counted"),
    [
        (None, (None,), UNSEEN, OLDER),  # nothing is left: whatever was published may be cut
        (None, (OLDER - 5 * SECOND, None), UNSEEN, OLDER),
        (None, (OLDER - 5 * SECOND, OLDER - 9 * SECOND), UNSEEN, OLDER - 5 * SECOND),
        (None, (OLDER + 5 * SECOND,), UNSEEN, OLDER),
        (None, (SECOND,), UNSEEN, 0),  # what may still commit is younger than all that was cut
        (OLDER - 7 * SECOND, (SECOND,), UNSEEN - 7 * SECOND, 0),
        (OLDER + 7 * SECOND, (SECOND,), UNSEEN, 0),
        (None, (), UNSEEN, 0),  # nothing was cut of the topic itself
    ],
)
def test_an_index_that_is_older_than_what_the_coordinator_knows(
    decide: Decide, hidden: int | None, left: tuple[int | None, ...], baseline: int, counted: int
) -> None:
    """Up to the baseline all counts as published, up to `counted` what the table has now."""
    index, report, upto = decide(0, OLDER, hidden, left)
    assert (index.baseline, report.baseline, upto) == (baseline, baseline, counted)
    cut = (OLDER if at is None else min(at, OLDER) for at in left)
    assert report.repeats_after == max(baseline, min(cut, default=0))


@pytest.mark.parametrize(
    ("low", "hidden", "kept"),
    [
        (READ_TO, None, READ_TO - HORIZON - LONGEST_HOLD),
        (READ_TO - SECOND, None, READ_TO - SECOND - HORIZON - LONGEST_HOLD),
        (READ_TO, READ_TO - 7 * SECOND, READ_TO - 7 * SECOND - HORIZON - LONGEST_HOLD),
        (0, None, READ_TO - HORIZON - LONGEST_HOLD),  # the coordinator knows nothing
    ],
)
def test_what_a_former_index_has_forgotten_is_not_what_others_have_published(
    decide: Decide, low: int, hidden: int | None, kept: int
) -> None:
    """With other shards, aggregates of several indexes come together."""
    index, report, _ = decide(0, low, hidden, forgotten=kept + SECOND)
    assert (index.baseline, report.repeats_after) == (kept, None)
    # with other partitions, too: nobody knows whose was what one of them has forgotten
    index, report, _ = decide(0, low, hidden, forgotten=kept + SECOND, former_indexes=("0", "1"))
    assert (index.baseline, report.repeats_after) == (kept, kept)
    index, report, _ = decide(0, low, hidden, forgotten=kept - SECOND)
    assert (index.baseline, report.repeats_after) == (kept, None), "nothing is repeated"
