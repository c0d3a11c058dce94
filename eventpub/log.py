"""Log lines on stderr: text for people, JSON for machines; secrets are masked."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from eventpub.masking import mask_all, mask_url

_QUIET = ("pyspark", "alembic", "urllib3")


MOST_WAITING = 1 << 20
"""Characters; further waiting lines are dropped and counted."""

_WRITTEN_WITHIN = 1.0
"""Seconds for which shutdown waits for the reader of stderr."""

MOST_OF_TRACEBACK = 4_000


class Lines(logging.Handler):
    """Writes lines in a thread, so that logging never blocks on stderr; counts `dropped` ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = self._dropped_before = 0
        self._waiting = 0
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._count = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="eventpub-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # must neither end nor block the caller
            line = json.dumps({"event": f"a line cannot be formatted: {error}", "level": "error"})
        self.write(line + "\n")

    def write(self, text: str) -> None:
        """Queue a text; in a forked child and after `close`, write it directly."""
        if not self._thread.is_alive():
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        with self._count:
            if self._waiting + len(text) > MOST_WAITING:
                self.dropped += 1
                return
            self._waiting += len(text)
        self._queue.put(text)

    def _run(self) -> None:
        while (text := self._queue.get()) is not None:
            with suppress(Exception):  # there is no reader left
                sys.stderr.write(text)  # looked up each time: a live view replaces it
                sys.stderr.flush()
            with self._count:
                self._waiting -= len(text)
            if not self._waiting and (new := self.dropped - self._dropped_before):
                self._dropped_before += new
                text = f"{new} log lines were dropped: stderr was not drained for too long"
                facts = {"name": "eventpub.log", "levelno": logging.WARNING, "levelname": "WARNING"}
                record = logging.makeLogRecord({**facts, "msg": text})
                self.write(self.format(record) + "\n")  # `close` may hold a logger's lock

    def flush(self) -> None:
        deadline = time.monotonic() + _WRITTEN_WITHIN
        while not self.is_written and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        self.flush()
        self._queue.put(None)
        if self.is_written:
            self._thread.join(_WRITTEN_WITHIN)
        super().close()

    @property
    def is_written(self) -> bool:
        return not self._waiting


_lines: Lines | None = None
_is_json = False


def dropped() -> int:
    return 0 if _lines is None else _lines.dropped


def is_json() -> bool:
    return _is_json


def end() -> bool:
    """Flush for up to a second. If it returns False, do not touch stderr: writing would block."""
    if _lines is not None:
        _lines.close()
    return _lines is None or _lines.is_written


def write(text: str) -> None:
    if _lines is not None:
        _lines.write(text)
        _lines.flush()
    else:
        sys.stderr.write(text)
        sys.stderr.flush()


def _without_py4j(record: logging.LogRecord) -> bool:
    return f"{os.sep}py4j{os.sep}" not in record.pathname


def _bounded(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    trace = event.get("exception")
    if isinstance(trace, str):
        cut = "… " if len(trace) > MOST_OF_TRACEBACK else ""
        event["exception"] = cut + mask_url(trace)[-MOST_OF_TRACEBACK:]
    return event


def _report_unraisable(found: sys.UnraisableHookArgs) -> None:
    logging.getLogger("eventpub").warning(
        "%s", found.err_msg or "an exception was ignored", exc_info=found.exc_value
    )


def _masked(_: Any, __: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    return {name: v if name == "_record" else mask_all(v) for name, v in event.items()}


def configure(style: str, level: int = logging.INFO) -> None:
    """Send all log lines of this process to stderr.

    Args:
        style: "text", "json", or "auto": text on a terminal, one JSON object per line otherwise.
    """
    import structlog  # slow to import, and --help does not need it

    terminal = sys.stderr.isatty()
    text = style == "text" or (style == "auto" and terminal)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _bounded,
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=terminal)
        if text
        else structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    global _lines, _is_json
    _lines, _is_json = _lines or Lines(), not text
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    _lines.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[_masked, remove_meta, renderer]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [_lines]
    logging.captureWarnings(True)
    sys.unraisablehook = _report_unraisable
    root.setLevel(level)
    root.filters[:] = [_without_py4j]
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    # it logs the traceback of errors that we get as exceptions anyway
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
