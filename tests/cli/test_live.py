"""What `run` and `demo` say while they work."""

from __future__ import annotations

import io
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
from rich.console import Console
from structlog.testing import capture_logs

from eventpub.cli import live, output
from eventpub.cli.demo_run import DemoView
from eventpub.cli.live import STOPPING, Lines, Panel, facts_shown
from eventpub.config import App, Config, Sink, Store
from eventpub.coordinator.progress import Progress, Rate


@pytest.fixture(autouse=True)
def _plain_structlog() -> Any:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_is_of_the_last_seconds_and_falls_when_nothing_comes() -> None:
    rate = Rate()
    for second in range(20):
        rate.add(second, 100 * second)
    assert rate.at(19) == pytest.approx(100)
    assert rate.at(24) == pytest.approx(50)
    assert Rate().at(1) == 0


def test_what_a_failed_batch_had_told_of_is_no_rate_below_zero() -> None:
    rate = Rate()
    rate.add(0, 500)
    rate.add(1, 480)
    assert rate.at(1) == 0


def test_a_busy_publisher_writes_a_line_every_few_seconds() -> None:
    clock = Clock()
    lines = Lines(clock)
    with capture_logs() as logs:
        for n in range(250):
            lines.see(Progress(published=n * 100, position=1_760_000_000_000_000))
            clock.now += 0.1
    assert [entry["event"] for entry in logs] == ["progress", "progress", "progress"]
    assert logs[1]["published"] == pytest.approx(10_000, abs=200)
    assert logs[1]["rate"] == pytest.approx(1000, rel=0.05)
    assert logs[1]["position"] == "2025-10-09T08:53:20.000000Z"


def test_an_idle_publisher_writes_a_line_every_five_minutes() -> None:
    clock = Clock()
    lines = Lines(clock)
    with capture_logs() as logs:
        for _ in range(650):
            lines.see(Progress(published=5, position=1_760_000_000_000_000))
            clock.now += 1
    assert [entry["published"] for entry in logs] == [5, 5, 5]


def test_nothing_is_said_of_progress_while_none_is_known() -> None:
    clock = Clock()
    lines = Lines(clock)
    with capture_logs() as logs:
        for _ in range(60):
            lines.see(Progress())
            clock.now += 1
    assert logs == []


def test_that_it_stops_is_said_once() -> None:
    clock = Clock()
    lines = Lines(clock)
    panel = Panel("orders")
    with capture_logs() as logs:
        for stopped_by in (None, 2, 2):
            progress = Progress(published=5, stopped_by=stopped_by)
            lines.see(progress)
            panel.see(progress)
            clock.now += 1
    assert [e["event"] for e in logs if "stopping" in e["event"]] == [STOPPING]
    assert "Ctrl-C" not in str(vars(panel.__rich__())["subtitle"])


def test_what_is_lost_is_said_at_once_and_only_once() -> None:
    clock = Clock()
    lines = Lines(clock)
    with capture_logs() as logs:
        for skipped in (0, 0, 1, 0, 1):  # a batch that fails takes its own back
            lines.see(Progress(late=skipped))
            clock.now += 0.5
    warnings = [e for e in logs if e["log_level"] == "warning"]
    assert len(warnings) == 1
    assert "skipped" in warnings[0]["event"]
    assert (warnings[0]["count"], warnings[0]["total"]) == (1, 1)


def test_transactions_that_are_not_waited_for_are_counted_once_a_minute() -> None:
    clock = Clock()
    lines = Lines(clock)
    with capture_logs() as logs:
        for second in range(125):
            lines.see(Progress(passed=3 * second, late=second > 60))
            clock.now += 1
    said = [(e["count"], e["total"]) for e in logs if "read.max_wait" in e["event"]]
    assert said == [(3, 3), (180, 183), (180, 363)]
    assert [e["total"] for e in logs if "skipped" in e["event"]] == [1], "each has its own minute"


def test_an_error_that_is_waited_out_is_said_once() -> None:
    lines = Lines(Clock())
    with capture_logs() as logs:
        for error in (None, "store.unreachable: …", "store.unreachable: …", None):
            lines.see(Progress(last_error=error))
    assert sum("error" in e for e in logs) == 1


def test_one_condition_that_is_met_in_many_words_is_a_line_a_minute() -> None:
    clock = Clock()
    lines = Lines(clock)
    with capture_logs() as logs:
        for second in range(125):
            clock.now = float(second)
            what = ("describing topics", "taking over the shard", "producing")[second % 3]
            lines.see(Progress(last_error=f"sink.unreachable: no answer while {what}"))
    said = [entry for entry in logs if "error" in entry]
    assert [entry.get("times_since_the_last_line") for entry in said] == [None, 59, 59]


def test_the_panel_shows_what_a_person_looks_for() -> None:
    progress = Progress(
        published=12_345,
        lag_seconds=2.5,
        holds_open=3,
        gaps_opened=9,
        gaps_skipped=1,
        last_error="sink.unreachable: no broker [bold]answers[/bold]",
    )
    out = io.StringIO()
    Console(file=out, width=120).print(facts_shown(progress, 678.9))
    shown = out.getvalue()
    for text in ("12,345", "679/s", "2.5 s", "beginning", "[bold]answers[/bold]"):
        assert text in shown


def test_a_signal_that_a_callback_has_swallowed_ends_it_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An import that is interrupted in a callback of the import system goes on, without a word."""
    monkeypatch.setattr(output, "_asked", [])
    config = Config(
        app=App(id="orders", state_dir=tmp_path),
        store=Store.model_validate({"url": "mysql+pymysql://u@127.0.0.1:1/d"}),
        sink=Sink(topic="events"),
    )
    with suppress(output.Stopped):
        output.stop(signal.SIGTERM, None)
    with pytest.raises(output.Stopped) as stopped:
        live.publish(config, available_now=False)
    assert stopped.value.exit_status == 143


def test_the_demo_counts_on_while_spark_starts() -> None:
    clock = Clock()
    view = DemoView("t", 30.0, "spark", clock)
    view.see(Progress())
    clock.now += 12
    assert "Spark is starting: 12 s" in view.footer()
    assert "12 s" in view.line(Progress())
    assert "Spark is starting" in view.line(Progress())
    view.see(Progress(published=1))
    clock.now += 5
    assert "25 s left" in view.footer()
    assert view.line(Progress(published=1)).startswith("  17 s  written 0  published 1 ")
