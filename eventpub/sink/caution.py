"""What the sinks of a shard have learned from a failure, until a batch was published.

A sink that has failed is replaced, so it is kept here, by owner; and of the process as a whole,
when the broker left a request without an answer. It may still carry that out later: a late
`InitProducerId` fences the producer that was made meanwhile, as another publisher would.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Caution:
    """How the next sinks of one owner produce.

    Attributes:
        sends_singly: each record is sent by itself, to find the ones that the broker refuses.
        reports_each: a report of each record is asked for, to find what went wrong with the batch.
        reduces_dead: dead letters have key, version and reason alone, since one was refused.
    """

    sends_singly: bool = False
    reports_each: bool = False
    reduces_dead: bool = False

    def forget(self) -> None:
        """A batch was published."""
        self.sends_singly = self.reports_each = self.reduces_dead = False


_LATE_WITHIN = 60.0
"""Seconds after which the broker has carried out, or lost, what it did not answer."""

_unanswered_at = float("-inf")


def is_unanswered() -> None:
    """The broker has not answered a request, or its connection broke off."""
    global _unanswered_at  # noqa: PLW0603 (a process has one cluster)
    _unanswered_at = time.monotonic()


def may_be_own_request() -> bool:
    """Whether what has fenced a producer may be a request of this process that came late."""
    return time.monotonic() - _unanswered_at < _LATE_WITHIN


_by_owner: dict[tuple[str, str], Caution] = {}


def caution_of(owner: tuple[str, str]) -> Caution:
    """Of an owner: bootstrap servers and transactional id."""
    return _by_owner.setdefault(owner, Caution())
