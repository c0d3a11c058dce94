"""Which failures are waited out, and which end the publisher."""

from __future__ import annotations

from eventpub.config import Config
from eventpub.coordinator.events import CheckOpen, CheckTable, CheckTopic, Command
from eventpub.errors import EventpubError, SinkError

_MOST_FAILURES = 5
"""Failures of a shard in a row, for a reason that eventpub does not know, before it gives up."""

_TAKEOVER = 20.0
"""Seconds after its first report in which a publisher leaves it to an older one to notice both."""

_SIGHTINGS = {"sink.fenced": 10, "sink.own_request_late": 1}
_MOST_SIGHTINGS = 30
_SIGHTINGS_WITHIN = 3600.0
"""The publisher stops when a shard was fenced three times within so many seconds, or thirty times
where a late request of its own may have done it. A process of a former run that was frozen does
that once, and a shard that has little to publish notices late. With little to publish, two
publishers of one id meet once in minutes."""

_ROTATED_WITHIN = 120.0
"""Seconds in which a new password or certificate reaches its file: Kubernetes takes up to a minute
and a half, and others remove a file before they write it."""

_PASSES_WITHIN = {
    "config.password_file": _ROTATED_WITHIN,
    "config.sink_property": _ROTATED_WITHIN,
    "store.auth_failed": _ROTATED_WITHIN,
    "store.tls_failed": _ROTATED_WITHIN,
    "store.privilege_missing": _ROTATED_WITHIN,
    "store.database_missing": 60.0,
    "sink.auth_failed": _ROTATED_WITHIN,
    "sink.topic_missing": 30.0,
    "store.table_missing": 60.0,
    "store.column_missing": 60.0,
    "store.index_missing": 60.0,
    "store.query_failed": 60.0,
}
"""Seconds for which something may be wrong while running before it counts as wrong: brokers that
start know of no topic, a migration takes a table or an index away and gives it back, a server or a
proxy in between has no disk, memory or threads for a moment and words it in its own way."""

_FATAL_CHECKS = {"sink.other_publisher", "sink.topic_recreated"}


class Failures:
    """Judges what shards and commands have met. Pure: times are arguments, s."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._well_since: float | None = None
        self._wrong_since: dict[str, float] = {}
        self._sightings: dict[int, list[float]] = {}

    def is_well(self, shard: int, now: float, *, has_progressed: bool) -> None:
        """A shard has reported: that it has done something, or only that it begins."""
        if self._well_since is None:
            self._well_since = now
        if has_progressed:
            self._wrong_since.pop(f"shard {shard}", None)

    def is_done(self, command: type[Command]) -> None:
        """A command of this kind was carried out: what one before has met was over."""
        self._wrong_since.pop(command.__name__, None)

    def of_shard(
        self, shard: int, error: EventpubError, in_a_row: int, now: float
    ) -> EventpubError | None:
        """The error to end with, if a runner's failure is one.

        Args:
            in_a_row: how often that shard has failed without having done anything.
        """
        if error.code in _SIGHTINGS:
            return self._another_publisher(shard, error, now)
        if error.code == "shard.failed":
            return error if in_a_row > _MOST_FAILURES else None
        return (
            None if error.retriable or self._may_pass(f"shard {shard}", error.code, now) else error
        )

    def of_command(
        self, command: Command, error: EventpubError, now: float
    ) -> EventpubError | None:
        """The error to end with, if the failure of a command is one."""
        if isinstance(command, CheckTopic):
            return error if error.code in _FATAL_CHECKS else None
        if isinstance(command, (CheckTable, CheckOpen)):
            return None  # who reads or publishes meets it, too
        who = type(command).__name__
        return None if error.retriable or self._may_pass(who, error.code, now) else error

    def _may_pass(self, who: str, code: str, now: float) -> bool:
        """Whether what was met has not lasted for long, as far as who has met it can tell."""
        if code not in _PASSES_WITHIN:
            return False
        return now - self._wrong_since.setdefault(who, now) < _PASSES_WITHIN[code]

    def _another_publisher(
        self, shard: int, error: EventpubError, now: float
    ) -> EventpubError | None:
        """Note it; the error to end with where it was seen so often that this one gives way."""
        if self._well_since is None or now - self._well_since < _TAKEOVER:
            return None
        before = self._sightings.get(shard, [])
        recent = [seen for seen in before if now - seen < _SIGHTINGS_WITHIN]
        recent += [now] * _SIGHTINGS[error.code]
        self._sightings[shard] = recent
        if len(recent) < _MOST_SIGHTINGS:
            return None
        return SinkError(
            "sink.fenced",
            "another publisher with the same app.id is publishing to this topic; nothing "
            "was lost or repeated, and this one, the older, stops",
            where=f"app.id = {self._config.app.id}, topic {self._config.sink.topic}",
            suggestion="let only one publisher run for an app.id",
        )
