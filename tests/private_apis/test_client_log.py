"""What is concluded from the client's log, and what is not."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from eventpub.private_apis.bulk import TransactionLog

SENT = ("SEND", "[thrd:TxnCoordinator]: Sent EndTxnRequest (v1, 60 bytes @ 0, CorrId 9)")
ANSWERED = ("RECV", "[thrd:TxnCoordinator]: Received EndTxnResponse (v1, 6 bytes, CorrId 9)")


def after(*lines: tuple[str, str]) -> TransactionLog:
    log = TransactionLog()
    for line in lines:
        log.note(*line)
    return log


def test_a_commit_that_was_answered_is_in_no_doubt() -> None:
    log = after(SENT, ANSWERED)
    assert (log.in_doubt, log.is_strange) == (False, False)


@pytest.mark.parametrize(
    "lines",
    [
        (SENT,),
        (SENT, SENT, ANSWERED),
        (SENT, ANSWERED, ("REQTMOUT", "TxnCoordinator/1: Timed out EndTxnRequest in flight")),
    ],
)
def test_a_commit_whose_answer_was_lost_is_in_doubt(lines: tuple[tuple[str, str], ...]) -> None:
    assert after(*lines).in_doubt


def test_a_log_that_does_not_show_a_commit_proves_nothing() -> None:
    assert after(("SEND", "Sent EndTxn")).is_strange


def test_why_a_transaction_cannot_be_committed_is_the_first_reason() -> None:
    log = after(
        ("TXNERR", "Current transaction failed (_TIMED_OUT)"),
        ("TXNERR", "Abort failed (PRODUCER_FENCED)"),
    )
    assert log.transaction_error is not None
    assert log.transaction_error.code() == KafkaError._TIMED_OUT
    log.forget()
    assert log.transaction_error is None
