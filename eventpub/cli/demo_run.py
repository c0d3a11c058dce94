"""`eventpub demo`: the publisher on its own servers, compared by `verify` at the end.

Writers commit late, in reverse order, and sometimes never. Everything is in one folder that is
removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventpub.cli import live
from eventpub.cli.events import compare, report
from eventpub.cli.output import Line, Report, Stopped, can_redraw
from eventpub.cli.terminal import in_place
from eventpub.config import Config

if TYPE_CHECKING:
    from eventpub.coordinator.progress import Progress
    from eventpub.local.servers import Database, Kafka

_LINE_SECONDS = 2.0


def run_demo(*, seconds: float | None, rate: int, engine: str, keep: str | None) -> Report:
    """Run the demo until the time is over or Ctrl-C, then publish the rest and compare.

    Args:
        seconds: how long the writers write; None: until Ctrl-C.
        keep: a folder for data and logs that stays; None: a temporary one.
    """
    from eventpub import log
    from eventpub.publisher import run

    log.configure("auto", level=40)
    with ExitStack() as stack:
        folder = _folder(stack, keep)
        database, broker = _servers(stack, folder)
        config = _config(folder, database, broker, engine)
        _say(f"database {database.url()}   broker {broker.bootstrap_servers}")
        _say("writers commit late and sometimes roll back; Ctrl-C stops and compares")
        view = DemoView(config.sink.topic, seconds, engine)
        shown = in_place(view) if can_redraw() else nullcontext()
        with _writers(database.url(), rate, view), shown:
            done = run(config, available_now=False, on_progress=view.see)
        _say("writers have stopped; the publisher publishes the rest, holds included")
        rest = run(config, available_now=True, on_progress=lambda _: None)
        if rest.stopped_by:
            raise Stopped(rest.stopped_by)
        _say("comparing store and topic")
        found = compare(config)
    if keep:
        _say(f"data and logs are in {folder}")
    verified = report(found)
    publisher = {name: getattr(done, name) + getattr(rest, name) for name in live.COUNTERS}
    text = (
        f"{found.records:,} events were published, {publisher['backtracked']:,} of them found"
        f" by key; gaps found {publisher['gaps_opened']:,},"
        f" filled {publisher['gaps_filled']:,}, skipped {publisher['gaps_skipped']:,}"
    )
    return Report(
        found.ok,
        verified.summary,
        {"writers": view.written, "publisher": publisher, "verify": verified.result},
        [Line(text), *verified.parts],
    )


def _say(text: str) -> None:
    sys.stderr.write(f"eventpub: {text}\n")
    sys.stderr.flush()


def _folder(stack: ExitStack, keep: str | None) -> Path:
    if keep:
        folder = Path(keep).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    made = tempfile.mkdtemp(prefix="eventpub-demo-")
    stack.callback(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _servers(stack: ExitStack, folder: Path) -> tuple[Database, Kafka]:
    from eventpub.local.downloads import find_java
    from eventpub.local.servers import kafka, mariadb

    java = find_java()
    os.environ.setdefault("JAVA_HOME", str(java.resolve().parent.parent))
    broker = stack.enter_context(kafka(folder / "kafka"))
    database = stack.enter_context(mariadb(folder / "mariadb"))
    with database.connect(None) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE IF NOT EXISTS eventpub")
    return database, broker


def _config(folder: Path, database: Database, broker: Kafka, engine: str) -> Config:
    from eventpub import settings
    from eventpub.sources.mysql.migrating import migrate

    file = folder / "eventpub.toml"
    file.write_text(
        f"""[app]
id = "demo"
state_dir = {json.dumps(str(folder / "state"))}
[store]
url = "{database.url()}"
[run]
engine = "{engine}"
[gaps]
backoff_base = "100ms"  # skip a gap after 6 s, so that the demo shows it
max_backoff = 6
[sink]
topic = "demo.events"
bootstrap_servers = "{broker.bootstrap_servers}"
[ops]
http = ""
""",
        encoding="utf-8",
    )
    config = settings.load(file, {}, {}).config
    migrate(config.store)
    return config


@contextmanager
def _writers(url: str, rate: int, view: DemoView) -> Iterator[None]:
    command = [sys.executable, "-m", "eventpub.local.writers", "--url", url, "--json"]
    command += ["--rate", str(rate)]
    # own session: Ctrl-C reaches only us, and we stop the publisher first
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    listener = threading.Thread(target=view.listen, args=(child.stdout,), daemon=True)
    listener.start()
    try:
        yield
        child.send_signal(signal.SIGTERM)
        child.wait(30)
        listener.join(5)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


class DemoView(live.Panel):
    def __init__(
        self, topic: str, seconds: float | None, engine: str, clock: Any = time.monotonic
    ) -> None:
        super().__init__(f"publisher → Kafka {topic}", clock)
        self._seconds = seconds
        self._of_engine = "Spark is starting" if engine == "spark" else "starting"
        self._began: float | None = None
        self._reported = 0.0
        self.written: dict[str, Any] = {}

    def listen(self, lines: Iterator[str]) -> None:
        for line in lines:
            try:
                self.written = json.loads(line)
            except ValueError:
                continue

    def see(self, progress: Progress) -> None:
        super().see(progress)
        now = self._clock()
        if self._began is None and progress.published:
            self._began = now
        lasted = now - (self._began or now)  # without the start
        if self._seconds is not None and lasted >= self._seconds:
            self._seconds = None
            os.kill(os.getpid(), signal.SIGTERM)
        if not can_redraw() and now - self._reported >= _LINE_SECONDS:
            self._reported = now
            _say(self.line(progress))

    def line(self, p: Progress) -> str:
        done = f"{self.waited:4.0f} s  written {self.written.get('events', 0):,}"
        if self._began is None:
            return f"{done}  {self._of_engine}"
        return (
            f"{done}  published {p.published:,} ({self.rate:,.0f}/s)  lag {p.lag_seconds:.1f} s"
            f"  found by key {p.backtracked:,}"
            f"  gaps found {p.gaps_opened:,} filled {p.gaps_filled:,} skipped {p.gaps_skipped:,}"
            f"{self._pages()}"
        )

    def _pages(self) -> str:
        ui = self.progress.spark_ui if self.progress else ""
        return f"  Spark's own pages: {ui}" if ui else ""

    def footer(self) -> str:
        done = [f"{count:,} {name.replace('_', ' ')}" for name, count in self.written.items()]
        ends = "Ctrl-C stops and compares"
        if self._began is None:
            ends = f"{self._of_engine}: {self.waited:.0f} s, {ends}"
        elif self._seconds is not None:
            left = max(0.0, self._seconds - (self._clock() - self._began))
            ends = f"{left:.0f} s left, {ends}"
        return f"writers: {', '.join(done)}. {ends}.{self._pages()}"
