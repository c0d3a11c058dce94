"""What the source does in Spark's driver: plans batches, and removes what no executor needs."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import structlog

from eventpub.errors import StateError, StoreError
from eventpub.sources.base import start_position
from eventpub.sources.mysql import EventStore, Layout
from eventpub.spark.journal import Journals, no_journals
from eventpub.spark.notes import Asked, Notes
from eventpub.spark.options import SourceOptions
from eventpub.spark.place import Place
from eventpub.spark.planner import Plan, Planner
from eventpub.spark.snapshots import prune
from eventpub.spark.task import Part
from eventpub.state import StateDir

_PRUNED_EVERY = 60.0

Offset = dict[str, Any]

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Driver:
    """The driver's part of one query.

    Args:
        options: of the source.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._until: int | None = None
        self._planner: Planner | None = None
        self._layout: Layout | None = None
        self._pruned_at = float("-inf")

    def close(self) -> None:
        """Close the connections."""
        if self._planner is not None:
            self._planner.close()

    def initial(self) -> Offset:
        """The offset before the first batch.

        Raises:
            StoreError: the table cannot be read.
        """
        config, publisher = self.options.config, self.options.publisher
        if publisher is not None:
            return publisher.initial.to_offset()
        with EventStore(config.store, self._discovered()) as store:
            start = start_position(config.read, store.now)
        return Plan(secrets.token_hex(8), start=start or None, upto=start).to_offset()

    def end_now(self) -> None:
        """Nothing that is created from now on is read."""
        with EventStore(self.options.config.store, self._discovered()) as store:
            self._until = store.now()

    def latest(self, start: Offset) -> Offset:
        """The next batch, or `start` where there is nothing to do.

        Raises:
            StoreError, StateError: as of `Planner.next`; a database that is away is waited for.
        """
        last = Plan.from_offset(start)
        if self._planner is None:
            self._planner = self._new_planner(last)
        try:
            plan = self._planner.next(last)
        except StoreError as error:
            if self._until is not None or not error.retriable:
                raise
            self._planner.failed(error)
            return start
        return start if plan is None else plan.to_offset()

    def reported(self) -> Offset | None:
        """The boundary as it was polled last."""
        if self._planner is None or not self._planner.upper:
            return None
        return Plan("", upto=self._planner.upper).to_offset()

    def parts(self, end: Offset) -> list[Part]:
        """The tasks of a batch, one for each shard.

        Raises:
            StateError: state.foreign: a batch that is repeated was planned with other options.
        """
        plan, planner = Plan.from_offset(end), self._planner
        if planner is None:
            _require_own(self.options, Place(self.options.state), plan)
        layout = self._discovered() if planner is None else planner.layout
        return [Part(plan, n, layout) for n in range(self.options.config.run.shards)]

    def committed(self, end: Offset) -> None:
        """A batch is committed: what no executor needs any more is removed now and then."""
        if time.monotonic() - self._pruned_at < _PRUNED_EVERY:
            return
        self._pruned_at = time.monotonic()
        plan = Plan.from_offset(end)
        try:
            place = Place(self.options.state)
            journals, shards = Journals(place, plan.query), self.options.config.run.shards
            prune(place, plan.query, journals, plan.batch, shards)
        except (StateError, ValueError) as error:  # or a file that is not ours
            log.warning(
                "old journals could not be removed; trying again in a minute", error=str(error)
            )

    def _new_planner(self, last: Plan) -> Planner:
        options, place = self.options, Place(self.options.state)
        _require_own(options, place, last)
        around: dict[str, Any] = {}
        if options.publisher is not None:
            state = StateDir(options.config.app.state_dir)
            asked = Asked(state)
            around = {"requests": lambda: state.kept() + asked.all(), "put": Notes(state).put}
        return Planner(
            options.config,
            self._discovered(),
            Journals(place, last.query),
            options.most_rows,
            until=self._until,
            **around,
        )

    def _discovered(self) -> Layout:
        if self._layout is None:
            self._layout = EventStore.discover(self.options.config.store)
        return self._layout


def parts_of_time(options: SourceOptions) -> list[Part]:
    """The tasks of a batch read, one for each shard, all with the same end.

    Raises:
        StoreError: the table cannot be read.
    """
    config = options.config
    layout = EventStore.discover(config.store)
    with EventStore(config.store, layout) as store:
        until = store.now() - config.read.delay if options.to is None else options.to
    plan = Plan("", begin=options.from_ - 1, upto=until)
    return [Part(plan, n, layout) for n in range(config.run.shards)]


def _require_own(options: SourceOptions, place: Place, plan: Plan) -> None:
    """Check that the state belongs to this table and these shards; a new query begins one.

    Raises:
        StateError: state.foreign, state.not_exclusive, state.unreachable, state.journal_missing
    """
    name, identity = f"{plan.query}/identity.json", options.identity
    found = place.read(name)
    if found is None:
        if plan.batch:
            raise no_journals(plan.query, plan.batch)
        place.require_exclusive(plan.query)
        if place.create(name, json.dumps(identity).encode()):
            return
        found = place.read(name)
    theirs: dict[str, Any] = json.loads(found or b"{}")
    different = [key for key in identity if theirs.get(key) != identity[key]]
    if different:
        key = different[0]
        raise StateError(
            "state.foreign",
            f"the checkpoint and its state belong to {key} {theirs.get(key)!r}, but the option is"
            f" {identity[key]!r}",
            where=f"{place.location}/{name}",
            suggestion=f"restore the former {key}; or use a new checkpoint, which reads the table"
            " from read.start",
        )
