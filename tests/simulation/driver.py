"""The publisher's process, again and again: the coordinator's loop, and what carries out commands.

Start, coordinator, boundary, counts and runners are the real ones. In the place of queues and
threads there is this loop, which does one thing after the other: an event, a runner that is to be
started, a runner that has something to do. The machine's time goes on where nothing else is left.

A step of a schedule starts runners of all shards, plans some windows, and ends the runners again:
so each step is one of many fresh starts. Where a runner stalls, its process is frozen with it, and
at the next step another publisher begins in its place.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from eventpub.channel import Ended, Report, Request
from eventpub.config import App, Config, Gaps, Read, Recount, Sink, Store
from eventpub.config import Run as RunSection
from eventpub.coordinator import events as e
from eventpub.coordinator.coordinator import Coordinator
from eventpub.errors import EventpubError, StateError
from eventpub.publisher.prepare import Prepared, prepare
from eventpub.publisher.workers import BROKER_CHECKS, BoundaryWork, BrokerWork, ChecksWork
from eventpub.shard.runner import serve
from eventpub.sink.records import parse_times
from tests.simulation.channel import Link
from tests.simulation.disk import StateDir
from tests.simulation.parts import parts_of
from tests.simulation.world import Crash, Process, Setup, Worker, World

TOPIC = "events"

_MOST_EVENTS = 20_000
"""What may happen without time passing."""

_PAUSES = 4
"""How often a step lets time pass to have its windows."""


_KILLED = StateError("run.killed", "what is waited out", retriable=True)

_STORE = Store.model_validate({"url": "mysql+pymysql://u@h:1/d"})


class Stopped(Exception):  # noqa: N818 (what a schedule meets, not what went wrong in the test)
    """The publisher has given up for good."""


@lru_cache(maxsize=16)
def config_of(setup: Setup, shards: int) -> Config:
    """The publisher's configuration in this world."""
    return Config(
        app=App(id="sim"),
        store=_STORE,
        read=Read.model_validate(
            {
                "start": setup.start,
                "delay": f"{setup.delay}us",
                "page_rows": setup.page_rows,
                "watermark": "off" if setup.watermark == "off" else "auto",
                "max_wait": f"{setup.max_wait}us",
            }
        ),
        gaps=Gaps.model_validate(
            {
                "max_backoff": setup.max_backoff,
                "backoff_base": f"{setup.backoff_base}us",
                "late": setup.late,
                "policy": setup.policy,
            }
        ),
        recount=Recount.model_validate({"horizon": f"{setup.horizon}us"}),
        sink=Sink(topic=TOPIC),
        run=RunSection(shards=shards),
    )


class Run:
    """One life of the publisher's process, from its start to its end."""

    def __init__(self, config: Config, prepared: Prepared, requests: Any) -> None:
        begin = prepared.start_state
        self.process = Process()
        self.assignment = prepared.assignment
        self.coordinator = Coordinator(
            config, type(begin)(**{**vars(begin), "requests": tuple(requests)})
        )
        self.boundary = BoundaryWork(self.assignment, begin.until)
        self.watch = ChecksWork(self.assignment)
        self.broker = BrokerWork(self.assignment, prepared.topics)
        self.events: deque[e.Event] = deque()
        self.to_start: list[e.StartRunner] = []
        self.poll: e.Poll | None = None
        """One that waits for the next step."""
        self.asked: set[str] = set()
        self.is_over = False


class Driver:
    """The publisher, whether it runs or not. What survives it is on the disk."""

    def __init__(self, this: World) -> None:
        self.world = this
        self.shards = this.setup.shards
        self.shift = 0
        self.turn = 0
        self._is_settled = False
        self.keeps = this.setup.keeps
        self._more_polls = 1
        self._run: Run | None = None
        self._runners: list[Worker] = []
        self._windows = self._vain_polls = 0
        self._begins = False
        self._has_failed = False
        self._reported: set[int] = set()
        self._did_something = False

    # -- steps ------------------------------------------------------------------------------------

    def batch(self) -> bool:
        """Start what does not run, then runners of all shards and some windows.

        Returns:
            False where nothing was due, here or since the step before.

        Raises:
            Stopped: an error that the publisher does not wait out.
        """
        this = self.world
        this.process = Process()
        self._windows, self._vain_polls, self._has_failed = 0, 0, False
        self._reported.clear()
        try:
            if self._is_frozen:
                self._leave(self._has_something_to_do)
            if self._run is None:
                this.started()
                self._start()
                if self._is_settled:
                    self.pause(False)
            assert self._run is not None
            this.process = self._run.process
            self._begin_runners(self._run)
            if not self._has_failed and len(self._reported) == len(self._run.coordinator.shards):
                this.lost.clear()  # a first fold that is interrupted leaves an index as lost
            this.point("tasks done")
            if not self.keeps:
                self._end_runners(self._run)
            this.counts["batches"] += 1
        except Crash:
            this.counts["crashes"] += 1
            self.crash()
        except EventpubError as error:  # of the start
            this.counts[f"error {error.code}"] += 1
            self.stop()
            if not error.retriable:
                raise Stopped(f"{error.code}: {error}") from error
        finally:
            self._begins = False
            this.process = Process()
        did, self._did_something = self._did_something, False
        return did

    def look(self) -> None:
        """Time passes for the publisher alone: it counts again.

        Raises:
            Stopped: as `batch`.
        """
        run = self._run
        if run is None:
            return
        process, self.world.process = self.world.process, run.process
        self.world.monotonic += 11.0  # it looks for some things less often than for rows
        try:
            self.world.counts["looks"] += 1
            run.events.append(e.Tick())
            self._go_on(run)
        except Crash:
            self.world.counts["crashes"] += 1
            self.crash()
        finally:
            self.world.process = process

    def pause(self, is_paused: bool) -> None:
        """A user wants nothing to be published, or that to end."""
        state: Any = StateDir(None)
        self.world.counts["pauses"] += is_paused and not state.pause()[0]
        self.world.files["pause.json"] = json.dumps({"is_paused": is_paused})
        self.world.lasting.add("pause.json")
        if self._run is not None:
            self._run.events.append(e.PauseAsked(is_paused, ""))

    def restart(self, shards: int) -> None:
        """It is stopped, and started by the next step, perhaps with another number of shards.

        Raises:
            Stopped: as `batch`.
        """
        run = self._run
        if run is not None and not self._is_frozen:
            self.world.process = run.process
            run.events.append(e.StopAsked())
            self._go_on(run)
            while not run.is_over:
                self._pass_time(run)
                self._go_on(run)
            self.world.process = Process()
        self.stop()
        self.shards = shards or self.shards

    def settles(self) -> None:
        """From now on runners are kept, and nothing fails any more."""
        self.keeps = self._is_settled = True
        self.pause(False)
        self._more_polls = 0

    @property
    def next_due(self) -> int | None:
        """When a hold is due next, as shards have reported."""
        if self._run is None:
            return None
        reports = [s.report for s in self._run.coordinator.shards if s.report is not None]
        return min((r.next_due for r in reports if r.next_due is not None), default=None)

    @property
    def is_idle(self) -> bool:
        """Whether all shards have runners that have done what they were sent."""
        return self._run is not None and all(s.is_idle() for s in self._run.coordinator.shards)

    @property
    def low(self) -> int:
        """Up to where all is published, as the coordinator knows; 0: it does not run."""
        return 0 if self._run is None else self._run.coordinator.durable.low

    @property
    def run(self) -> Run | None:
        """The publisher that runs."""
        return self._run

    # -- the end of a process ---------------------------------------------------------------------

    def stop(self) -> None:
        """It ends, one way or the other, and its runners with it; where one stalls it is frozen."""
        self._leave(lambda worker: self._is_frozen and self._has_something_to_do(worker))

    def crash(self) -> None:
        """It is gone; or it is only out of reach, and its runners go on later."""
        self._leave(lambda w: self.world.setup.orphans and self._has_something_to_do(w))

    @property
    def _is_frozen(self) -> bool:
        """Whether one of its runners stalls."""
        return any(worker.link.is_of_now for worker in self.world.stalled)

    def _has_something_to_do(self, worker: Worker) -> bool:
        return worker.link.has_work or not worker.waits

    def _leave(self, goes_on_later: Callable[[Worker], bool]) -> None:
        self.world.stopped()
        orphans = [worker for worker in self._runners if goes_on_later(worker)]
        self._run = None
        for worker in self._runners:
            if worker not in orphans:
                worker.end()
        for worker in orphans:
            self.world.counts["orphans"] += 1
            worker.stale = True
            self.world.stalled.append(worker)
        self._runners.clear()

    # -- the runners' and the schedule's side -----------------------------------------------------

    def post(self, event: e.Event) -> None:
        """Something has happened."""
        if self._run is None:
            return
        if isinstance(event, Ended) and event.error and event.error.code == "shard.failed":
            event = replace(event, error=_KILLED)
        self._run.events.append(event)

    def goes_on(self, worker: Worker) -> None:
        """A runner that had stalled is over, or waits for work: like any other, or in vain."""
        if not worker.done:
            if worker.link.is_of_now:
                self._runners.append(worker)
            else:
                worker.end()
        elif worker.error is not None and not isinstance(worker.error, Crash):
            raise worker.error

    # -- a step -----------------------------------------------------------------------------------

    def _start(self) -> None:
        config = config_of(self.world.setup, self.shards)
        state: Any = StateDir(None)
        prepared = prepare(config, state, parts_of(config), available_now=False)
        kept = [*self.world.requests]
        self._run = Run(config, prepared, [(r, self._reply(r)) for r in kept])
        self._run.asked = {r.id for r in kept}

    def _begin_runners(self, run: Run) -> None:
        """Until its windows are done, or nothing happens any more."""
        this, coordinator = self.world, run.coordinator
        self._begins = True
        idle = [s for s in coordinator.shards if s.lane is None]
        waits = [coordinator.windows.polling.at, *(s.start_at for s in idle)]
        this.monotonic = max(this.monotonic, *waits)
        for request in this.requests:
            if request.id not in run.asked:
                run.asked.add(request.id)
                run.events.append(e.RequestReceived(request, self._reply(request)))
        if run.poll is not None:
            poll, run.poll = run.poll, None
            self._do(run, poll)
        run.events.append(e.Tick())
        self._go_on(run)
        for _ in range(_PAUSES):
            if self._windows >= this.setup.windows or self._vain_polls > self._more_polls:
                break
            self._pass_time(run)
            self._go_on(run)
        self._begins = False

    def _end_runners(self, run: Run) -> None:
        run.events.append(e.Done(e.CheckOpen({}), True))
        self._go_on(run)

    def _pass_time(self, run: Run) -> None:
        this, coordinator = self.world, run.coordinator
        at = this.monotonic + coordinator.next_tick(this.monotonic)
        this.monotonic = at + 0.001
        run.events.append(e.Tick())

    def _reply(self, request: Request) -> e.Reply:
        def reply(outcome: dict[int, str] | EventpubError) -> None:
            self.world.point("answer")
            asked = request.aggregate_id, request.version
            answers = [outcome.code] if isinstance(outcome, EventpubError) else outcome.values()
            for answer in answers:
                self.world.counts[f"answered {answer}"] += 1
                if request.action == "publish" and answer in {"published", "published before"}:
                    self.world.promised.add(asked)
                if answer == "run.paused":  # and so it must not be done
                    self.world.not_done[request.action, *asked] += 1
            self.world.requests = [r for r in self.world.requests if r.id != request.id]

        return reply

    # -- the loop ---------------------------------------------------------------------------------

    def _go_on(self, run: Run) -> None:
        """Until everybody waits for time to pass.

        Raises:
            Crash: the process has died.
            Stopped: it has given up.
        """
        is_late = self.world.setup.order == "late"
        for _ in range(_MOST_EVENTS):
            if run.is_over:
                return
            worker = self._ready()
            if run.events and not (is_late and worker):
                self._on(run, run.events.popleft())
            elif run.to_start and self._begins:
                turn = self.turn % len(run.to_start)
                self._launch(run, run.to_start.pop(turn))
            elif worker is not None:
                self._continue(run, worker)
            else:
                return
        raise RuntimeError("the publisher does not come to rest")

    def _ready(self) -> Worker | None:
        for worker in self._runners:
            if not worker.waits or worker.link.is_ready:
                return worker
        return None

    def _launch(self, run: Run, command: e.StartRunner) -> None:
        this, shard = self.world, command.shard
        this.point("task")
        this.forget()
        process = Process((shard + self.shift) % this.setup.executors)
        assignment = run.assignment
        lane: Any = None  # the link, which is made with the worker

        def work() -> None:
            serve(assignment, shard, command.beginning, lane, worker.link.post)

        worker = Worker(this, process, work)
        lane = worker.link = Link(self, run, worker, command.lane)
        self._runners.append(worker)

    def _continue(self, run: Run, worker: Worker) -> None:
        worker.go_on()
        if self.world.unexpected is not None:
            raise self.world.unexpected
        if not worker.done:
            if worker.stale:
                self._runners.remove(worker)
                self.world.stalled.append(worker)
            return
        self._runners.remove(worker)
        if worker.error is not None:
            if not isinstance(worker.error, Crash):
                raise worker.error
            if worker.error.whole:
                run.process.dead = True
                raise worker.error

    def _on(self, run: Run, event: e.Event) -> None:
        this = self.world
        if isinstance(event, (Report, Ended)):
            self._hear(event)
        elif (
            isinstance(event, e.Done)
            and isinstance(event.command, e.Poll)
            and event.result.end is None
        ):
            self._vain_polls += 1
        windows = run.coordinator.windows
        before = windows.last and windows.last.upto
        commands = run.coordinator.on(event, this.monotonic)
        if windows.last is not None and windows.last.upto != before:
            self._windows += 1
            self._did_something = True
            this.reached = max(this.reached, windows.last.upto)
            this.point("planned")
        for command in commands:
            self._do(run, command)

    def _hear(self, message: Report | Ended) -> None:
        if isinstance(message, Report):
            self._reported.add(message.shard)
            if message.published or message.dead or message.answers or message.counts.rows:
                self._did_something = True
        elif message.error is not None:
            self._has_failed = True
            self.world.counts[f"error {message.error.code}"] += 1

    def _do(self, run: Run, command: e.Command) -> None:
        if isinstance(command, e.Poll):
            if self._begins and self._windows < self.world.setup.windows:
                self._ask(run, run.boundary.do, command)
            else:
                run.poll = command
        elif isinstance(command, e.StartRunner):
            run.to_start.append(command)
        elif isinstance(command, e.Reassign):
            run.assignment = replace(run.assignment, layout=command.layout)
        elif isinstance(command, e.Remember):
            StateDir(None).write(StateDir.progress_file, dict(command.what), lasting=True)
            self.world.clock_known = self.world.polled_at
            self.world.point("remembered")
            if command.then is not None and command.then.shards is not None:
                StateDir(None).forget_shards(command.then.shards)
        elif isinstance(command, e.Log):
            self._said(command)
        elif isinstance(command, e.Finish):
            run.is_over = True
            if command.error is not None:
                self.stop()
                raise Stopped(f"{command.error.code}: {command.error}")
        elif isinstance(command, e.Sample):
            run.events.append(e.Done(command, e.Sampled((), 0)))
        elif isinstance(command, e.MeasureLag):
            run.events.append(e.Done(command, e.LagMeasured(command.position, 0, 0.0, 0)))
        elif isinstance(command, BROKER_CHECKS):
            self._ask(run, run.broker.do, command)
        elif not isinstance(command, e.Show):
            self._ask(run, run.watch.do, command)

    def _ask(self, run: Run, do: Callable[[e.Command], Any], command: e.Command) -> None:
        outcome: e.Event
        try:
            outcome = e.Done(command, do(command))
        except EventpubError as error:
            self.world.counts[f"error {error.code}"] += 1
            outcome = e.Failed(command, error)
        run.events.append(outcome)

    def _said(self, command: e.Log) -> None:
        if "may be published again" in command.text and "after" in command.facts:
            after = parse_times([command.facts["after"]]).tolist()[0]
            before = self.world.repeats_after
            self.world.repeats_after = after if before is None else min(after, before)
