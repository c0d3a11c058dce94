"""What a load is to do, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """What a load has done.

    `events` and `transactions` are committed ones, without the `closing_events`; `rate` is events
    per second. `skipped_versions` were rolled back although a later one was committed. `failed`
    transactions were refused by the database (deadlock); `unsure` ones lost their connection, and
    what became of them was read from the table.
    """

    events: int = 0
    transactions: int = 0
    rolled_back: int = 0
    held_open: int = 0
    reversed: int = 0
    skipped_versions: int = 0
    closing_events: int = 0
    failed: int = 0
    unsure: int = 0
    seconds: float = 0.0
    rate: float = 0.0


@dataclass
class Load:
    """Appends events at a rate.

    Attributes:
        url: SQLAlchemy's URL of the database.
        rate: committed events per second that are aimed at.
        seconds: how long; None = until `stop` says so.
        bursts: (every, length, factor): every so many seconds the rate is `factor` times as high
            for `length` seconds, at the end of each period.
        aggregates: how many there are; several times those in open transactions are needed.
        zipf: the n-th most popular aggregate is chosen with a weight of 1 / n ** zipf; one that is
            busy in an open transaction is passed over, as by an application that would conflict.
        open_fraction: of the transactions: kept open for `open_seconds` after the first insert.
        rollback_fraction: of the transactions; the next one uses their versions again.
        gap_fraction: of the transactions: rolled back after later versions were committed.
        reversed_fraction: of the transactions: committed after later versions were.
        events_per_transaction: on average.
        payload_bytes: about how long a payload is.
        close_all: at the end append one more event to each aggregate that was touched, so that a
            last version that was committed late has a successor.
        connections: the most that are opened.
        note_held: remember each transaction that was held open, in `held`.
        note_all: remember the others there, too.
    """

    url: str
    rate: float
    seconds: float | None = None
    bursts: tuple[float, float, float] | None = None
    aggregates: int = 10_000
    zipf: float = 0.0
    open_fraction: float = 0.0
    open_seconds: tuple[float, float] = (0.0, 3.0)
    rollback_fraction: float = 0.0
    gap_fraction: float = 0.0
    reversed_fraction: float = 0.0
    events_per_transaction: int = 20
    payload_bytes: int = 300
    seed: int = 0
    close_all: bool = True
    table: str = "events"
    prefix: str = "order"
    connections: int = 400
    note_held: bool = False
    note_all: bool = False

    versions: dict[str, int] = field(default_factory=dict, init=False)
    """After `run`: the last version of each aggregate that was touched."""
    skipped: dict[str, list[int]] = field(default_factory=dict, init=False)
    """After `run`: the versions that will never come, by aggregate."""
    held: list[tuple[float, dict[int, range]]] = field(default_factory=list, init=False)
    """With `note_held`, after `run`: when the commit of each transaction that was held open was
    answered (Unix, s), and its versions by the aggregate's number."""

    def planned(self, elapsed: float) -> float:
        """How many events are to be committed so many seconds after the beginning."""
        events = self.rate * elapsed
        if self.bursts is not None:
            every, length, factor = self.bursts
            periods, rest = divmod(elapsed, every)
            bursting = periods * length + max(0.0, rest - (every - length))
            events += self.rate * (factor - 1) * bursting
        return events
