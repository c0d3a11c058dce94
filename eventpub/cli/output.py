"""A command's answer on stdout, everything else on stderr, and the exit status.

With ``--json`` stdout gets exactly one object, ``{"command", "ok", "summary", "result", "error"}``.
Secrets are masked here, and for people control characters are escaped.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any, TypeAlias

import click

from eventpub import log
from eventpub.errors import ConfigError, EventpubError, find_marked, words_of
from eventpub.masking import mask, mask_all
from eventpub.times import format_time

DONE = 0
NO = 1
WRONG_USE = 2
UNEXPECTED = 70
"""sysexits.h's EX_SOFTWARE; 1 would mean that the answer is no."""
READER_GONE = 128 + signal.SIGPIPE
"""Like a process killed by SIGPIPE."""

CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]"
)
"""Characters that move the cursor, colour, ring or reorder text; not newlines and tabs."""


def can_redraw() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


def printable(text: str) -> str:
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_people(text: str) -> str:
    return printable(mask(text))


Span: TypeAlias = str | tuple[str, str]


class Line:
    def __init__(self, *spans: Span) -> None:
        self.spans = spans


@dataclass
class Table:
    names: Sequence[str]
    rows: Sequence[Sequence[Span]]
    title: str = ""


Part: TypeAlias = Line | Table

STYLES = {
    **dict.fromkeys(("ok", "published", "late"), "green"),
    **dict.fromkeys(("warn", "unknown", "held"), "yellow"),
    **dict.fromkeys(("error", "wrong", "invalid", "missing", "dead"), "bold red"),
    **dict.fromkeys(("skipped", "baseline"), "dim"),
    "waiting": "cyan",
}


def table(entries: Sequence[Mapping[str, Any]], names: str, title: str = "") -> list[Table]:
    def cell(name: str, value: object) -> Span:
        text = _word(name, value)
        return (text, STYLES.get(text, "")) if name in {"state", "verdict"} else text

    columns = names.split()
    rows = [[cell(name, entry.get(name, "")) for name in columns] for entry in entries]
    return [Table([name.replace("_", " ") for name in columns], rows, title)] if rows else []


def facts(of: Mapping[str, Any], title: str = "") -> Table:
    return Table(("", ""), [[n.replace("_", " "), _word(n, v)] for n, v in of.items()], title)


def _word(name: str, value: Any) -> str:  # noqa: PLR0911 (one case a type)
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float() if name in {"since", "last_ok", "started", "as_of"}:
            return age(value)
        case float():
            return f"{value:,.1f}"
        case int() if name == "position":
            return format_time(value) if value else "beginning"
        case {"code": code, "message": message, "at": at}:
            return f"{code} {age(at)}: {message}"
    return str(value)


def age(since: float) -> str:
    seconds = max(time.time() - since, 0.0)
    for unit, most, size in (("s", 120, 1), ("min", 7_200, 60), ("h", 172_800, 3_600)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} d ago"


def notes(texts: Iterable[str]) -> list[Line]:
    return [Line(f"note: {text}") for text in texts]


@dataclass
class Report:
    """A command's answer; its exit status is by default 0 or 1, by `ok`."""

    ok: bool
    summary: str
    result: dict[str, Any] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    status: int | None = None
    error: EventpubError | None = None

    @property
    def exit_status(self) -> int:
        return self.status if self.status is not None else (DONE if self.ok else NO)


class Stopped(BaseException):
    """A signal asks the process to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_status = 128 + signal_number


_log = logging.getLogger("eventpub.cli")

_asked: list[int] = []
_is_answering = False
"""The answer is being written; `stop` then raises nothing."""
_TAKEN_WITHIN = 0.2
"""Seconds after a signal in which a reader must take the answer."""


def take_signals() -> None:
    """Let SIGTERM and Ctrl-C end the command; an ignored SIGINT stays ignored."""
    _asked.clear()
    release_signals()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + _asked[-1]))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)


def hold_signals() -> None:
    """Signals interrupt nothing from now on, and end the process only if nobody reads stdout."""
    global _is_answering  # noqa: PLW0603 (as are signals: one of a process)
    _is_answering = True


def release_signals(*, to_default: bool = False) -> None:
    """Undo `hold_signals`; with `to_default` a signal then ends the process at once."""
    global _is_answering  # noqa: PLW0603
    for number in (signal.SIGTERM, signal.SIGINT) if to_default else ():
        if signal.getsignal(number) is stop:
            signal.signal(number, signal.SIG_DFL)
    _is_answering = False
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0)


def stop(number: int, _: FrameType | None) -> None:
    _asked.append(number)
    if not _is_answering:
        end_if_asked()
    signal.setitimer(signal.ITIMER_REAL, _TAKEN_WITHIN)


def end_if_asked() -> None:
    """Raise Stopped or KeyboardInterrupt if a signal came: a callback may have swallowed it."""
    if _asked:
        raise KeyboardInterrupt if _asked[-1] == signal.SIGINT else Stopped(_asked[-1])


def why_ended(cause: BaseException) -> BaseException:
    """The reason of an exception: an earlier signal, whose exception a C library may replace."""
    if isinstance(cause, Stopped | KeyboardInterrupt | click.Abort):
        return cause
    try:
        end_if_asked()
    except (Stopped, KeyboardInterrupt) as signalled:
        _log.debug("what came out of the command that a signal has stopped", exc_info=cause)
        return signalled
    return cause


class ReaderGoneError(BaseException):
    """The reader of stdout is gone. No OSError: click and rich turn that into exit status 1."""


class _Output(io.FileIO):
    """stdout or stderr. Failed writes are dropped: Python would otherwise complain at exit and
    change the exit status. With `is_needed` the first failure raises.
    """

    def __init__(self, descriptor: int, *, is_needed: bool, closes: bool = False) -> None:
        super().__init__(descriptor, "w", closefd=closes)
        self._is_needed = is_needed

    def write(self, data: Any, /) -> Any:
        """Like `FileIO.write`; raises cli.output_failed or ReaderGoneError."""
        try:
            return super().write(data)
        except OSError as error:
            if not self._is_needed:
                return len(data)
            self._is_needed = False
            if isinstance(error, BrokenPipeError):
                raise ReaderGoneError from error
            raise EventpubError(
                "cli.output_failed",
                f"the output cannot be written: {error.strerror}",
                where="stdout",
                suggestion="free space where stdout goes, or redirect it; then run the command"
                " again",
            ) from error


def take_streams() -> None:
    """Replace stdout and stderr by `_Output`; closed ones are opened on /dev/null."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (as long as the process)

    def taken(stream: IO[str] | None, descriptor: int) -> IO[str]:
        if stream is not None:
            with suppress(OSError):
                stream.flush()
        output, is_out = _Output(descriptor, is_needed=descriptor == 1), descriptor == 1
        return io.TextIOWrapper(
            io.BufferedWriter(output),
            getattr(stream, "encoding", "utf-8"),
            errors="backslashreplace",  # for arguments that are not valid text
            line_buffering=not is_out or output.isatty(),
        )

    sys.stdout, sys.stderr = taken(sys.stdout, 1), taken(sys.stderr, 2)


def write_json(command: str, report: Report, output: IO[bytes]) -> None:
    """Write the one object of an answer; signals must be held."""
    envelope = {
        "command": command,
        "ok": report.ok,
        "summary": report.summary,
        "result": report.result,
        "error": report.error.to_dict() if report.error else None,
    }
    text = json.dumps(mask_all(envelope), ensure_ascii=False, default=str) + "\n"
    # an argument that is not valid text is repeated in escaped form
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        left = left[output.write(left) :]


@contextmanager
def only_stderr() -> Iterator[IO[bytes]]:
    """Reserve stdout for the caller; other output to it goes to stderr."""
    sys.stdout.flush()
    own, before = os.dup(1), sys.stdout
    with _Output(own, is_needed=True, closes=True) as output:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        try:
            yield output
        finally:
            sys.stdout = before
            os.dup2(own, 1)


def write_text(report: Report) -> None:
    """Write the answer for people; signals must be held."""
    if report.exit_status > 128:  # a signal has ended the command
        stop(report.exit_status - 128, None)
    if report.parts:
        from eventpub.cli.terminal import console, drawn

        console().print(*map(drawn, report.parts), sep="\n")
    sys.stdout.write(for_people(report.summary) + "\n")
    sys.stdout.flush()


def write_error(error: EventpubError, cause: BaseException, *, as_line: bool = False) -> None:
    is_unexpected = error.code == "internal.unexpected"
    problems: tuple[EventpubError, ...] = getattr(error, "problems", (error,))
    if as_line and log.is_json():
        for problem in problems:
            _log.error(
                "ended by an error",
                extra={"code": problem.code, "error": str(problem)},
                exc_info=cause if is_unexpected else None,
            )
        return
    lines = "".join(traceback.format_exception(cause)) if is_unexpected else ""
    log.write(for_people(lines) + "".join(for_people(f"error: {p}") + "\n" for p in problems))


def as_error(cause: BaseException) -> tuple[EventpubError, int]:  # noqa: PLR0911 (one case an exception)
    """Any exception as an error with a code, and its exit status."""
    match cause:
        case EventpubError():
            return cause, cause.exit_status
        case Stopped():
            error = EventpubError("cli.stopped", "stopped by a signal before it was done")
            return error, cause.exit_status
        case KeyboardInterrupt() | click.Abort():
            return EventpubError("cli.stopped", "interrupted before it was done"), 130
        case click.UsageError():
            where = cause.ctx.command_path if cause.ctx else "eventpub"
            message = cause.format_message()
            usage = ConfigError("cli.usage", message, where=where, suggestion=f"{where} --help")
            return usage, WRONG_USE
        case click.ClickException():
            return ConfigError("cli.usage", cause.format_message()), WRONG_USE
    words = words_of(cause)
    if marked := find_marked(words):
        return marked, marked.exit_status
    error = EventpubError(
        "internal.unexpected",
        f"{type(cause).__name__}: {words}",
        suggestion="this is a bug in eventpub; please report it with the traceback",
    )
    return error, UNEXPECTED
