"""`eventpub run`: a live panel on a terminal's stderr; elsewhere log lines."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import structlog

from eventpub.cli.output import Report, can_redraw, end_if_asked, for_people
from eventpub.config import Config, format_time
from eventpub.coordinator.progress import Rate
from eventpub.errors import counted
from eventpub.state_files import raise_file_limit

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eventpub.coordinator.progress import Progress

LINE_SECONDS = 10.0
IDLE_LINE_SECONDS = 300.0
WARNING_LINE_SECONDS = 60.0
STOPPING = "stopping; finishing open transactions. A second signal ends the process at once"

COUNTERS = (
    "published", "backtracked", "gaps_opened", "gaps_filled", "gaps_skipped", "duplicates", "late",
    "dead", "conflicts", "recount_found", "without_identity",
)  # fmt: skip

_WARNINGS = {
    "late": "events arrived after their gap had been skipped",
    "passed": "transactions are open for longer than read.max_wait and no longer waited for",
}


def publish(config: Config, *, available_now: bool) -> Report:
    view: Panel | Lines = Lines()
    shown: AbstractContextManager[None] = nullcontext()
    if can_redraw() and config.ops.log != "json":
        from eventpub.cli.terminal import in_place

        view = Panel(f"{config.app.id}  {config.store.table} → {config.sink.topic}")
        shown = in_place(view)
    with shown:
        from eventpub.publisher import run

        raise_file_limit()
        end_if_asked()
        final = run(config, available_now=available_now, on_progress=view.see)
    result = {name: getattr(final, name) for name in (*COUNTERS, "rows_read", "holds_open")}
    position = format_time(final.position) if final.position > 0 else None
    result["position"] = position
    worth_saying = (
        (final.gaps_skipped, "gap skipped", "gaps skipped"),
        (final.late, "late", "late"),
        (final.dead, "dead letter", "dead letters"),
        (final.without_identity, "row without identity", "rows without identity"),
        (final.holds_open, "still held", "still held"),
    )
    summary = ", ".join(
        [f"published {counted(final.published, 'event')}"]
        + [counted(*entry) for entry in worth_saying if entry[0]]
    )
    if position:
        summary += f", everything up to {position}"
    if final.stopped_by is not None:
        return Report(
            not available_now,
            f"{summary}; stopped by signal {final.stopped_by}",
            result,
            status=128 + final.stopped_by,
        )
    return Report(True, summary, result)


class Lines:
    def __init__(self, clock: Any = time.monotonic) -> None:
        self._log = structlog.get_logger("eventpub.run")
        self._clock = clock
        self._rate = Rate()
        self._written = float("-inf")
        self._done: list[int] = [0] * (len(COUNTERS) + 1)
        self._said: dict[str, tuple[float, int]] = {}
        """By counter or error code: when it was last logged, and the total then."""
        self._errors: Counter[str] = Counter()
        self._last_error: str | None = None
        self._stops = False

    def see(self, progress: Progress) -> None:
        now = self._clock()
        if progress.stopped_by is not None and not self._stops:
            self._stops = True
            self._log.info(STOPPING)
        self._rate.add(now, progress.published)
        for name, message in _WARNINGS.items():
            total = getattr(progress, name)
            if count := self._since_said(name, total, now):
                self._log.warning(message, count=count, total=total)
        if (error := progress.last_error) and error != self._last_error:
            code = error.partition(":")[0]
            self._errors[code] += 1
            if times := self._since_said(code, self._errors[code], now):
                more = {"times_since_the_last_line": times - 1} if times > 1 else {}
                self._log.warning("waiting before a retry", error=error, **more)
        self._last_error = error
        done = [getattr(progress, name) for name in (*COUNTERS, "holds_open")]
        seconds = IDLE_LINE_SECONDS if done == self._done else LINE_SECONDS
        if progress.position and now - self._written >= seconds:
            self._log.info("progress", **_facts(progress), rate=round(self._rate.at(now), 1))
            self._written, self._done = now, done

    def _since_said(self, name: str, total: int, now: float) -> int:
        """By how much a total has grown since it was logged; 0: wait, or nothing is new."""
        at, before = self._said.get(name, (float("-inf"), 0))
        if total <= before or now - at < WARNING_LINE_SECONDS:
            return 0
        self._said[name] = now, total
        return total - before


def _facts(progress: Progress) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "published": progress.published,
        "holds_open": progress.holds_open,
        "position": format_time(progress.position),
        "lag_seconds": round(progress.lag_seconds, 3),
        "lag_events": progress.lag_events if progress.lag_events >= 0 else None,
    }
    if progress.ahead_seconds:
        facts["ahead_seconds"] = round(progress.ahead_seconds)
    return facts


class Panel:
    def __init__(self, title: str, clock: Any = time.monotonic) -> None:
        self._title = title
        self._clock = clock
        self._rate = Rate()
        self._started = clock()
        self.progress: Progress | None = None

    def see(self, progress: Progress) -> None:
        self.progress = progress
        self._rate.add(self._clock(), progress.published)

    @property
    def rate(self) -> float:
        return self._rate.at(self._clock())

    @property
    def waited(self) -> float:
        return float(self._clock() - self._started)

    def footer(self) -> str:
        return "Ctrl-C stops"

    def __rich__(self) -> RenderableType:
        from rich.panel import Panel as Frame
        from rich.text import Text

        title = Text(for_people(self._title))  # a string would be markup
        if self.progress is None:
            return Frame(Text(f"starting … {self.waited:.0f} s"), title=title)
        stops = self.progress.stopped_by is not None
        body = facts_shown(self.progress, self.rate)
        subtitle = Text(for_people("stopping" if stops else self.footer()))
        return Frame(body, title=title, subtitle=subtitle)


def facts_shown(p: Progress, rate: float) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    lag = (f"{p.lag_seconds:,.1f} s", "yellow" if p.lag_seconds > 10 else "green")
    backlog = "unknown" if p.lag_events < 0 else f"{p.lag_events:,}"
    counts = {
        "gaps found": (p.gaps_opened, ""),
        "filled": (p.gaps_filled, "green"),
        "skipped": (p.gaps_skipped, "bold red"),
        "holds open": (p.holds_open, "yellow"),
        "read again": (p.duplicates, ""),
        "found by key": (p.backtracked, "green"),
        "late": (p.late, "yellow"),
        "dead letters": (p.dead, "bold red"),
    }
    shown = [(f"{n:,} {name}", style if n else "dim") for name, (n, style) in counts.items()]
    numbers = [
        Text.assemble(
            f"{rate:,.0f}/s, published {p.published:,}, lag ", lag, ", backlog ", backlog
        ),
        Text(", ").join(Text(text, style) for text, style in shown),
    ]
    position = format_time(p.position) if p.position > 0 else "beginning"
    lines = [Text(f"position {position}", style="dim")]
    if p.ahead_seconds:
        ahead = f"the newest event lies {p.ahead_seconds:,.0f} s in the future"
        lines.append(Text(ahead, style="yellow"))
    if p.last_error:
        lines.append(Text(for_people(p.last_error), style="red"))
    if p.stopped_by is not None:
        lines.append(Text(STOPPING, style="yellow"))
    return Group(*numbers, *lines)
