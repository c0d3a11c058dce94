"""The command `eventpub`: thin; each command is one function of a package below.

Packages are imported inside the commands that need them: `eventpub --help` loads none.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import IO

import click

from eventpub import __version__
from eventpub.cli.bench import bench
from eventpub.cli.commands import config, demo, doctor, gaps, migrate, run, verify
from eventpub.cli.dead import dead
from eventpub.cli.init import init
from eventpub.cli.output import (
    DONE,
    WRONG_USE,
    ReaderGoneError,
    Report,
    Stopped,
    as_error,
    only_stderr,
    take_signals,
    take_streams,
    why_ended,
    write_error,
    write_json,
    write_text,
)
from eventpub.cli.replay import replay
from eventpub.cli.status import pause, resume, status
from eventpub.cli.trace import trace
from eventpub.errors import EventpubError
from eventpub.masking import mask


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="eventpub %(version)s")
def eventpub() -> None:
    """Publish the event table of MySQL or MariaDB to Kafka: complete, exactly once, in order per
    aggregate.
    """


for _command in (
    init,
    migrate,
    doctor,
    run,
    status,
    pause,
    resume,
    gaps,
    dead,
    verify,
    replay,
    trace,
    config,
    demo,
    bench,
):
    eventpub.add_command(_command)


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: those of the command line; None means this process's own.

    Returns:
        The exit status: 0 done; 1 the answer is no; 2 wrong use or configuration; 3 a service
        cannot be reached or refused us; 70 a defect; 130 or 143 stopped by a signal.
    """
    is_whole_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    if is_whole_process:
        take_streams()
        # should a library written in C crash, stderr says what each thread was doing
        with suppress(RuntimeError, ValueError, OSError):
            faulthandler.enable()
    threading.excepthook = _report_thread
    if threading.current_thread() is threading.main_thread():
        take_signals()
    try:
        if "--json" not in arguments:
            status = _run(arguments, None)
        else:
            with only_stderr() as out:
                status = _run(arguments, out)
        if is_whole_process and any(t.daemon for t in threading.enumerate()):
            _leave(status)
        return status
    except ReaderGoneError:
        return 128 + signal.SIGPIPE
    except EventpubError as failed:  # the answer is known, and cannot be written
        write_error(failed, failed)
        return failed.exit_status


def _leave(status: int) -> None:
    """End the process without Python's own end, which threads of C++ libraries do not survive.

    One that waits for a broker or a database that is away cannot be joined.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _run(arguments: list[str], out: IO[str] | None) -> int:
    try:
        answer = eventpub.main(arguments, prog_name="eventpub", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as helped:
        helped.show()
        return WRONG_USE
    except (Exception, KeyboardInterrupt, Stopped) as raised:
        cause = why_ended(raised)
        error, status = as_error(cause)
        if out:
            name = _command_name(arguments)
            write_json(out, Report(name, False, mask(error.message), status=status, error=error))
        else:
            write_error(error, cause)
        return status
    if not isinstance(answer, Report):
        return answer if isinstance(answer, int) else DONE
    if out:
        write_json(out, answer)
    else:
        write_text(answer)
    return answer.exit_status


def _command_name(arguments: list[str]) -> str:
    """The command that was meant, for an answer that it could not give itself."""
    words = []
    group: click.Command | None = eventpub
    for argument in arguments:
        if isinstance(group, click.Group) and (found := group.commands.get(argument)):
            words.append(argument)
            group = found
    return " ".join(words)


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        error, _ = as_error(failed.exc_value)
        write_error(error, failed.exc_value)
