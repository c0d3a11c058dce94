"""What librdkafka's log says of a transaction: it repeats a lost `EndTxn` and reports nothing.

librdkafka does not promise the words of its log. Each commit sends an `EndTxn`, so a log that shows
none is worded otherwise than when this was written, and what it does not say proves nothing.
"""

from __future__ import annotations

import re

from confluent_kafka import KafkaError

from eventpub.private_apis import SWITCHES

_LOST_ANSWER = frozenset({"REQTMOUT", "FAIL"})
_NAME_AT_END = re.compile(r"\((\w+)[^()]*\)\s*$")


class TransactionLog:
    """What was logged since `forget`.

    Attributes:
        transaction_error: why the transaction cannot be committed any more; nothing else says it
            before the commit is tried.
    """

    def __init__(self) -> None:
        self._lost_answer = False
        self._ends_sent = 0
        self._ends_answered = 0
        self.transaction_error: KafkaError | None = None

    def forget(self) -> None:
        self._lost_answer = False
        self._ends_sent = self._ends_answered = 0
        self.transaction_error = None

    def note(self, facility: str, text: str) -> None:
        if facility == "SEND":
            self._ends_sent += "Sent EndTxnRequest" in text
        elif facility == "RECV":
            self._ends_answered += "Received EndTxnResponse" in text
        elif facility in _LOST_ANSWER and ("TxnCoordinator" in text or "EndTxn" in text):
            self._lost_answer = True
        elif facility == "TXNERR" and (name_at_end := _NAME_AT_END.search(text)):
            code = getattr(KafkaError, name_at_end[1], KafkaError._FAIL)
            # the first is the cause; an abort that fails in turn tells less
            self.transaction_error = self.transaction_error or KafkaError(code, text)

    @property
    def is_strange(self) -> bool:
        """After a commit: whether the log does not show it, so that it proves nothing."""
        return SWITCHES.client_log and not self._ends_sent

    @property
    def in_doubt(self) -> bool:
        """Whether the coordinator's answer was lost, an `EndTxn` has none, or it is unknown."""
        return not SWITCHES.client_log or self._lost_answer or self._ends_sent > self._ends_answered
