"""What a command leaves behind: its answer on stdout, everything else on stderr, an exit status.

With ``--json`` stdout gets exactly one object, ``{"command", "ok", "summary", "result", "error"}``,
whatever happens; part of it if a signal comes while it is not read. Every text passes the
masking of secrets here, and for people the escaping of control characters.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any, TypeAlias

import click

from eventpub import log
from eventpub.errors import ConfigError, EventpubError, find_marked, words_of
from eventpub.masking import mask_all
from eventpub.terminal import for_people

DONE = 0
NO = 1
WRONG_USE = 2
UNEXPECTED = 70
"""sysexits.h's EX_SOFTWARE: 1 would say that the answer is no."""
READER_GONE = 128 + signal.SIGPIPE
"""As of a process that SIGPIPE ends."""


Span: TypeAlias = str | tuple[str, str]
"""Text, or text and its style."""


class Line:
    """A line of an answer for people."""

    def __init__(self, *spans: Span) -> None:
        self.spans = spans


@dataclass
class Table:
    """A table of an answer for people.

    Args:
        names: of the columns; "" for a column that needs none.
    """

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
"""By state of a check or verdict on an event."""


def table(entries: Sequence[Mapping[str, Any]], names: str, title: str = "") -> list[Table]:
    """Objects of an answer as rows; no table of none.

    Args:
        names: of the fields to show, in their order; of a field that ends with "_", no heading.
    """

    def cell(name: str, value: object) -> Span:
        text = _word(value)
        return (text, STYLES.get(text, "")) if name in {"state", "verdict"} else text

    columns = names.split()
    rows = [[cell(name, entry.get(name, "")) for name in columns] for entry in entries]
    headings = ["" if name[-1] == "_" else name.replace("_", " ") for name in columns]
    return [Table(headings, rows, title)] if rows else []


def facts(of: Mapping[str, Any]) -> Table:
    """The fields of one object, each on a row."""
    return Table(("", ""), [[name.replace("_", " "), _word(value)] for name, value in of.items()])


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def notes(texts: Iterable[str]) -> list[Line]:
    return [Line(f"note: {text}") for text in texts]


@dataclass
class Report:
    """A command's answer.

    Args:
        parts: what people see above the summary.
        status: the exit status; None: 0 or 1, by `ok`.
        error: why there is no yes, where one error says it.
    """

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
    """A signal asks the process to end; whatever is open is closed on the way out."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_status = 128 + signal_number


_asked: list[int] = []
"""The signals that asked this command to end."""

_log = logging.getLogger("eventpub.cli")


_is_answering = False
"""Whether the answer is being given; `stop` then raises nothing."""
_TAKEN_WITHIN = 0.2
"""Seconds after a signal in which a reader must take the answer."""


def take_signals() -> None:
    """Have SIGTERM and Ctrl-C end the command that begins now; those of one before are forgotten.

    A process that was started with SIGINT ignored goes on ignoring it.
    """
    _asked.clear()
    stop_at_signals()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, _end_at_once)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)


def hold_signals() -> None:
    """From now on a signal interrupts nothing: the answer is being given.

    If its reader does not take it soon after a signal, the process ends.
    """
    global _is_answering  # noqa: PLW0603 (as are signals: one of a process)
    _is_answering = True


def stop_at_signals() -> None:
    """The end of `hold_signals`."""
    global _is_answering  # noqa: PLW0603
    _is_answering = False
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0)


def leave_signals() -> None:
    """Restore the default handlers: the answer is given, and a signal may end the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is stop:
            signal.signal(number, signal.SIG_DFL)


def stop(number: int, _: FrameType | None) -> None:
    """The handler of a signal that asks to end."""
    _asked.append(number)
    if not _is_answering:
        raise _stop_by(number)
    signal.setitimer(signal.ITIMER_REAL, _TAKEN_WITHIN)


def _end_at_once(_: int, __: FrameType | None) -> None:
    os._exit(128 + _asked[-1])


def _stop_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)


def end_if_asked() -> None:
    """Once more what `stop` raised: where it interrupts a callback of the import system, say, it
    is swallowed.

    Raises:
        Stopped, KeyboardInterrupt: there was a signal.
    """
    if _asked:
        raise _stop_by(_asked[-1])


def why_ended(cause: BaseException) -> BaseException:
    """Why a command has ended with an exception: the signal, if there was one before it.

    What `stop` raises inside a library written in C may come out as another exception: a client of
    Kafka makes a TypeError of it while it takes a record's headers.
    """
    if not _asked or isinstance(cause, Stopped | KeyboardInterrupt | click.Abort):
        return cause
    _log.debug("what came out of the command that a signal has stopped", exc_info=cause)
    return _stop_by(_asked[-1])


class ReaderGoneError(BaseException):
    """Who has read our stdout has left. No OSError: click and rich make exit status 1 of that."""


class _Output(io.FileIO):
    """A stream of ours. What cannot be written is dropped: Python, which flushes at its end, would
    complain once more and change the exit status; and a log goes on when its disk has space again.

    Args:
        is_needed: whether it is an error that something cannot be written; the rest is dropped.
    """

    def __init__(self, descriptor: int, *, is_needed: bool, closes: bool = False) -> None:
        super().__init__(descriptor, "w", closefd=closes)
        self._is_needed = is_needed
        self._is_over = False

    def write(self, data: Any, /) -> Any:
        """As of its base.

        Raises:
            EventpubError: cli.output_failed
            ReaderGoneError: there is no reader any more.
        """
        if self._is_over:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            if not self._is_needed:
                return len(data)
            self._is_over = True
            if isinstance(error, BrokenPipeError):
                raise ReaderGoneError from error
            raise EventpubError(
                "cli.output_failed",
                f"the output cannot be written: {error.strerror}",
                where="stdout",
                suggestion="free space where stdout goes, or redirect it; then run the command"
                " again",
            ) from error


def _text_stream(output: _Output, encoding: str = "utf-8", *, by_line: bool = False) -> IO[str]:
    # an argument that is no text is repeated as it is escaped
    buffer = io.BufferedWriter(output)
    return io.TextIOWrapper(
        buffer, encoding, errors="backslashreplace", line_buffering=by_line or output.isatty()
    )


def take_streams() -> None:
    """Make this process's stdout and stderr ones that say what cannot be written.

    A closed one becomes /dev/null: it has no reader. What is opened later, a connection say,
    would have its number, and get what is written to it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (as long as the process)
    encodings = [getattr(stream, "encoding", "utf-8") for stream in (sys.stdout, sys.stderr)]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.flush()
    sys.stdout = _text_stream(_Output(1, is_needed=True), encodings[0])
    sys.stderr = _text_stream(_Output(2, is_needed=False), encodings[1], by_line=True)


def write_json(command: str, report: Report, output: IO[bytes]) -> None:
    """The one object of an answer; signals must be held.

    Args:
        command: as the user typed it ("config show").

    Raises:
        EventpubError: cli.output_failed
        ReaderGoneError: there is no reader any more.
    """
    envelope = {
        "command": command,
        "ok": report.ok,
        "summary": report.summary,
        "result": report.result,
        "error": report.error.to_dict() if report.error else None,
    }
    text = json.dumps(mask_all(envelope), ensure_ascii=False, default=str) + "\n"
    # an argument that is no text is repeated as it is escaped
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        left = left[output.write(left) :]


@contextmanager
def only_stderr() -> Iterator[IO[bytes]]:
    """Give the caller stdout for itself: meanwhile all others, child processes too, write stderr.

    Spark's and Ivy's output would otherwise mix with the one object that scripts read.
    """
    sys.stdout.flush()
    own = os.dup(1)
    before = sys.stdout
    with _Output(own, is_needed=True, closes=True) as output:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        try:
            yield output
        finally:
            sys.stdout = before
            os.dup2(own, 1)


def write_text(report: Report) -> None:
    """The answer for people, on stdout; signals must be held."""
    if report.exit_status > 128:  # a signal has ended the command
        stop(report.exit_status - 128, None)
    if report.parts:
        from eventpub.cli.terminal import console, drawn

        console().print(*map(drawn, report.parts), sep="\n")
    sys.stdout.write(for_people(report.summary) + "\n")
    sys.stdout.flush()


def write_error(error: EventpubError, cause: BaseException, *, as_line: bool = False) -> None:
    """An error, on stderr; with a traceback where it is unexpected.

    Args:
        as_line: write it as a line of the log, where those are JSON.
    """
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
    """Any exception as an error with a code, and the exit status that belongs to it."""
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
