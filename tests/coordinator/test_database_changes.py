"""Another server, its clock, an altered table.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

import pytest

from eventpub.coordinator import events as e
from eventpub.errors import StoreError
from tests.coordinator.life import (
    at,
    layout,
    streaming,
)

GONE = StoreError("store.denied", "the account may not read the table")
MOVED = StoreError("store.moved", "another server answers", retriable=True)


class TestADatabaseThatChanges:
    def test_a_poll_that_fails_is_tried_again_after_growing_waits_over_new_connections(
        self,
    ) -> None:
        away = StoreError("store.unreachable", "no server answers", retriable=True)
        life, _ = streaming()
        life.polled()
        waits = []
        for _ in range(9):
            while life.poll() is None:
                life.waits(0.01)
            failed_at, polls = life.now, len(life.all(e.Poll))
            life.on(e.Failed(life.last(e.Poll), away))
            while len(life.all(e.Poll)) == polls:
                life.waits(0.05)
            assert life.all(e.Poll)[-1].reconnect
            waits.append(life.now - failed_at)
        assert waits == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 16, 30, 30], abs=0.1)
        assert "no server answers" in str(life.coordinator.progress.last_error)
        life.polled()
        life.polled()
        assert not life.all(e.Poll)[-1].reconnect

    @pytest.mark.parametrize("code", ["store.index_missing", "store.column_missing"])
    def test_a_statement_that_met_another_table_has_it_looked_at_soon_and_not_all_the_time(
        self, code: str
    ) -> None:
        life, _ = streaming()
        life.polled()
        life.waits(5.0)
        looked = len(life.all(e.CheckTable))
        life.on(e.Failed(life.last(e.CheckTable), StoreError(code, "it is renamed")))
        life.waits(1.0)
        assert len(life.all(e.CheckTable)) == looked + 1
        for _ in range(5):  # while it stays so
            life.on(e.Failed(life.last(e.CheckTable), StoreError(code, "…", retriable=True)))
            life.waits(0.3)
        assert looked + 2 <= len(life.all(e.CheckTable)) <= looked + 3

    def test_what_was_hidden_stays_so_while_nobody_may_look(self) -> None:
        life, _ = streaming()
        life.polled(hidden_since=at(500))
        life.polled(state="denied", hidden_since=None)
        life.waits(2.0)
        assert life.written["hidden_since"] == at(500)
        life.polled(hidden_since=None)
        life.waits(2.0)
        assert life.written["hidden_since"] != at(500)

    def test_one_that_waiting_does_not_fix_ends_the_run(self) -> None:
        life, _ = streaming()
        life.polled()
        life.waits(0.3)
        assert life.poll() is not None
        life.on(e.Failed(life.last(e.Poll), GONE))
        assert life.outcome() is GONE

    def test_f3_where_the_address_has_moved_everything_connects_anew(self) -> None:
        """A name, HAProxy: the former primary lives on, and who is connected notices nothing."""
        life, lanes = streaming()
        life.polled()
        life.on(e.Done(e.CheckTable(), e.TableChecked(layout())))
        life.waits(0.3)
        assert life.poll() is not None
        life.on(e.Failed(life.last(e.Poll), MOVED))
        assert not life.is_ending()
        assert all(lane.is_told_to_stop for lane in lanes)
        for lane in lanes:
            life.ends(lane)
        assert life.starts == [0, 1, 0, 1]
        looked = len(life.all(e.CheckTable))
        life.waits(0.5)
        assert life.all(e.Poll)[-1].reconnect
        assert life.all(e.Poll)[-1].after == at(2_000)
        assert life.all(e.Poll)[-1].hidden_since is not None
        life.polled(server="promoted")
        life.waits(1.0)
        assert len(life.all(e.CheckTable)) == looked + 1, "its time zone may be another"

    def test_nobody_reads_an_altered_table_as_it_was(self) -> None:
        """One that was started with the former layout has to leave, before it has begun, too."""
        life, lanes = streaming()
        life.ends(lanes[0])
        late = life.runner(0)
        life.on(e.Done(e.CheckTable(), e.TableChecked(layout(unit=1000))))
        assert late.is_told_to_stop
        assert lanes[1].is_told_to_stop
        life.ends(late)
        life.ends(lanes[1])
        altered = life.said.index(life.last(e.Reassign))
        for number in range(2):
            assert not life.next_runner(number).is_told_to_stop
        after = [c.shard for c in life.said[altered:] if isinstance(c, e.StartRunner)]
        assert sorted(after) == [0, 1]

    def test_an_altered_table_is_read_anew_by_everybody(self) -> None:
        life, lanes = streaming()
        life.on(e.Done(e.CheckTable(), e.TableChecked(layout())))
        assert not lanes[0].is_told_to_stop
        altered = layout(unit=1_000_000, create_time="`created`")
        life.on(e.Done(e.CheckTable(), e.TableChecked(altered)))
        assert all(lane.is_told_to_stop for lane in lanes)
        assert life.all(e.Reassign) == [e.Reassign(altered)]
        [line] = life.lines("the event table was altered")
        assert line.facts["changed"] == ["create_time", "unit"]
        assert "store.table_altered" in str(life.coordinator.progress.last_error)
        life.waits(1.0)
        assert life.last(e.Poll).reconnect
        life.on(e.Done(e.CheckTable(), e.TableChecked(altered)))
        assert len(life.lines("the event table was altered")) == 1
