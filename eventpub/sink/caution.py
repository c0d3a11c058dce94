"""What the sinks of a shard have learned from a failure, until a batch was published.

A sink that has failed is replaced, so it is kept here, by owner.
"""

from __future__ import annotations

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


_by_owner: dict[tuple[str, str], Caution] = {}


def caution_of(owner: tuple[str, str]) -> Caution:
    """Of an owner: bootstrap servers and transactional id."""
    return _by_owner.setdefault(owner, Caution())


def forget_all() -> None:
    """As a process that begins."""
    _by_owner.clear()
