"""The watermark: what open transactions hide, and what an answer that is not fresh is worth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from eventpub.store import Watermark
from eventpub.store.watermark import OpenTransactions, Transaction
from tests.conftest import FreshDatabase
from tests.store.tables import create

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
SECOND = 1_000_000
PSEUDO = (1 << 48) + 7


def seen(*looks: tuple[int, list[Transaction]], max_wait: int = 100) -> OpenTransactions:
    """After these looks, at times in seconds."""
    transactions = OpenTransactions(max_wait * SECOND)
    for at, found in looks:
        transactions.seen(at * SECOND, found)
    return transactions


def tx(number: int, thread: int = 1, started: int = 0) -> Transaction:
    """A transaction that has written."""
    return Transaction(number, thread, started * SECOND)


def test_without_open_transactions_everything_up_to_the_look_is_visible() -> None:
    assert seen((10, [])).upto == 10 * SECOND


def test_the_look_before_a_transaction_showed_is_as_far_as_anybody_can_see() -> None:
    assert seen((10, []), (11, [tx(1, started=10)]), (12, [tx(1, started=10)])).upto == 10 * SECOND


def test_once_it_is_gone_the_watermark_moves_on() -> None:
    assert seen((10, []), (11, [tx(1, started=10)]), (12, [])).upto == 12 * SECOND


def test_the_next_transaction_of_the_same_connection_is_another_one() -> None:
    found = seen((10, []), (11, [tx(1, started=10)]), (12, [tx(2, started=11)]))
    assert found.upto == 11 * SECOND


def test_a_transaction_that_gets_its_id_when_it_writes_stays_the_same() -> None:
    found = seen((10, []), (11, [tx(PSEUDO, started=10)]), (12, [tx(2, started=10)]))
    assert found.upto == 10 * SECOND
    assert seen((10, []), (11, [tx(0, started=10)]), (12, [tx(2, started=10)])).upto == 10 * SECOND


def test_at_the_first_look_a_transaction_may_hide_what_came_since_it_began() -> None:
    assert seen((10, [tx(1, started=3)])).upto == 3 * SECOND


def test_a_long_transaction_is_passed_by_and_counted_once() -> None:
    looks = [(second, [tx(1, started=10)]) for second in range(11, 20)]
    found = seen((10, []), *looks, max_wait=5)
    assert found.upto == 19 * SECOND
    assert found.passed == 1
    assert found.open_since == 10 * SECOND


def wrote(modified: int, *, runs: bool = False) -> list[Transaction]:
    """One that has, so far, and one that goes on."""
    return [Transaction(1, 1, 10 * SECOND, modified, runs), tx(9, thread=2, started=10)]


def test_what_was_passed_by_tells_when_it_may_have_written_once_it_is_gone() -> None:
    looks = [(11, wrote(1)), (12, wrote(1)), (13, wrote(3)), (14, wrote(3)), (19, wrote(3))]
    found = seen((10, []), *looks, max_wait=5)
    assert found.take_ended() == []
    found.seen(20 * SECOND, [tx(9, thread=2, started=10)])
    assert found.take_ended() == [(10 * SECOND, 13 * SECOND)]
    assert found.take_ended() == []


def test_what_a_statement_writes_while_it_runs_may_be_as_new_as_the_look_that_shows_it() -> None:
    looks = [(11, wrote(0, runs=True)), (17, wrote(0, runs=True)), (18, wrote(0))]
    found = seen((10, []), *looks, (19, []), max_wait=5)
    assert (10 * SECOND, 17 * SECOND) in found.take_ended()


def test_what_was_waited_for_has_nothing_to_tell() -> None:
    found = seen((10, []), (11, wrote(1)), (12, []), max_wait=5)
    assert found.take_ended() == []


def test_what_was_open_at_the_first_look_may_have_been_passed_by_before() -> None:
    found = seen((10, [tx(1, started=3)]), (11, [tx(2, thread=2, started=10)]), (12, []))
    assert found.take_ended() == [(3 * SECOND, 10 * SECOND)]


def test_the_next_transaction_of_a_connection_ends_what_was_passed_by() -> None:
    looks = [(second, [tx(1, started=10)]) for second in (11, 17)]
    found = seen((10, []), *looks, (18, [tx(2, started=17)]), max_wait=5)
    assert found.take_ended() == [(10 * SECOND, 11 * SECOND)]


def looking(mark: Watermark, until: Callable[[], bool], seconds: float = 10.0) -> None:
    """Look until something holds."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, (mark.state, mark.upto)
        mark.look()
        time.sleep(0.02)


@both
def test_an_open_transaction_holds_it_and_its_end_lets_it_go(database: FreshDatabase) -> None:
    mark = Watermark(create(database), 60 * SECOND)
    looking(mark, lambda: mark.state == "open")
    with database.connect(autocommit=False) as writer, writer.cursor() as cursor:
        cursor.execute(
            "INSERT INTO events (aggregate_id, version, event_type) VALUES ('a', 1, 't')"
        )
        cursor.execute("SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', create_time) FROM events")
        looking(mark, lambda: mark.state == "held")
        held_at = mark.upto
        time.sleep(0.5)
        mark.look()
        assert mark.upto == held_at
        assert mark.open_since is not None
        writer.commit()
    looking(mark, lambda: mark.state == "open")
    assert (mark.upto or 0) > (held_at or 0)
    assert not mark.has_open
    mark.close()


@both
def test_a_transaction_that_has_only_read_holds_nothing(database: FreshDatabase) -> None:
    mark = Watermark(create(database), 2 * SECOND)
    with database.connect(autocommit=False) as reader, reader.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM events")
        looking(mark, lambda: mark.state == "open")
    mark.close()


@contextmanager
def monitoring(database: FreshDatabase) -> Iterator[None]:
    """Another client that reads `innodb_trx` every 30 ms, so that it is never refreshed."""
    ended = threading.Event()

    def read() -> None:
        with database.connect() as connection, connection.cursor() as cursor:
            while not ended.wait(0.03):
                cursor.execute("SELECT COUNT(*) FROM information_schema.innodb_trx")

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@both
def test_an_answer_that_is_not_fresh_moves_nothing_and_then_counts_as_none(
    database: FreshDatabase,
) -> None:
    mark = Watermark(create(database), SECOND)
    looking(mark, lambda: mark.state == "open")
    with monitoring(database):
        time.sleep(0.2)
        before = mark.upto
        mark.look()
        assert mark.upto == before
        looking(mark, lambda: mark.state == "stale")
        assert mark.upto is None
        assert mark.open_since is None
    looking(mark, lambda: mark.state == "open")
    mark.close()


@both
def test_without_the_privilege_it_says_so_and_looks_no_more(database: FreshDatabase) -> None:
    config = create(database)
    database.execute("CREATE USER IF NOT EXISTS watermark_reader IDENTIFIED BY 'r'")
    database.execute(f"GRANT SELECT ON {database.name}.* TO watermark_reader")
    config = config.model_copy(
        update={"url": type(config.url)(database.url_of("watermark_reader", "r"))}
    )
    mark = Watermark(config, SECOND)
    mark.look()
    assert mark.state == "denied"
    assert mark.upto is None
    mark.look()
