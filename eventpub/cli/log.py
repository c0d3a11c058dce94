"""Log lines on stderr: text for people, JSON for machines.

Packages log by `logging` or `structlog`. Every line passes the masking of secrets.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import MutableMapping
from typing import Any, Literal

import structlog

from eventpub.masking import mask_all

_QUIET = ("pyspark", "alembic", "urllib3", "uvicorn.error")


class _Stderr(logging.Handler):
    """Looks stderr up at each line, so that a live view can put the line above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except BrokenPipeError:
            pass
        except Exception:
            self.handleError(record)


class _Seldom(logging.Filter):
    """Lets a few lines a minute through; the first of the next minute says how many it left out.

    A broker that is away has each of some ten clients say so several times a second.
    """

    def __init__(self, most: int = 5, seconds: float = 60.0, clock: Any = time.monotonic) -> None:
        super().__init__()
        self._most, self._seconds, self._clock = most, seconds, clock
        self._began = -seconds
        self._shown = self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.INFO:
            return True
        now = self._clock()
        if now - self._began >= self._seconds:
            self._began, self._shown = now, 0
        if self._shown == self._most:
            self._left_out += 1
            return False
        self._shown += 1
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            record.msg = f"{record.getMessage()} ({left_out} lines before it were left out)"
            record.args = ()
        return True


def _without_py4j(record: logging.LogRecord) -> bool:
    """It logs by the root's logger, too, whatever else is said of the error."""
    return f"{os.sep}py4j{os.sep}" not in record.pathname


_NO_COORDINATOR_YET = (
    "Coordinator load in progress",
    "Not coordinator",
    "Coordinator not available",
)


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Not that a broker, at the first transaction of its life, makes the topic that keeps them."""
    text = record.getMessage()
    return not ("Failed to acquire" in text and any(why in text for why in _NO_COORDINATOR_YET))


def _masked(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record = event.pop("_record", None)
    hidden: dict[str, Any] = mask_all(event)
    return hidden if record is None else hidden | {"_record": record}


def configure(style: Literal["auto", "text", "json"], level: int = logging.INFO) -> None:
    """Send all log lines of this process to stderr.

    Args:
        style: "auto" means text on a terminal, one JSON object a line otherwise.
        level: the least severe that is written, of `logging`.
    """
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
    handler = _Stderr()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                _masked,
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.filters[:] = [_without_py4j]
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    clients = logging.getLogger("eventpub.sink")
    clients.filters[:] = [_is_unexpected, _Seldom()]
    # it prints the trace of an error that reaches us as an exception anyway
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
