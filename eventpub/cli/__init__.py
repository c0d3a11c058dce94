"""The command `eventpub`. Commands import what they need when they run: `--help` is fast."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from contextlib import nullcontext, suppress
from typing import IO

import click

from eventpub import __version__, log
from eventpub.cli import output
from eventpub.cli.commands import bench_command, config, demo, doctor, init, migrate, run
from eventpub.cli.events import dead, publish, replay, trace, verify
from eventpub.cli.output import ReaderGoneError, Report, Stopped, as_error, write_error
from eventpub.cli.status import gaps, pause, resume, status
from eventpub.errors import EventpubError
from eventpub.masking import mask


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="eventpub %(version)s")
def eventpub() -> None:
    """Publish the event table of MySQL or MariaDB to Kafka: complete, exactly once, in order per
    aggregate.
    """


for _command in (
    init, migrate, doctor, run, status, pause, resume, gaps, dead, publish, verify, replay, trace,
    config, demo, bench_command(),
):  # fmt: skip
    eventpub.add_command(_command)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; `arguments` default to the process's own.

    Returns:
        The exit status: 0 done; 1 the answer is no; 2 wrong use or configuration; 3 a service
        cannot be reached or refused us; 70 a bug; 130 or 143 stopped by a signal; 141 the reader of
        stdout is gone.
    """
    is_whole_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    if is_whole_process:
        output.take_streams()
        # if a C library crashes, stderr shows what each thread was doing
        with suppress(RuntimeError, ValueError, OSError):
            faulthandler.enable()
    threading.excepthook = _report_thread
    if threading.current_thread() is threading.main_thread():
        output.take_signals()
    try:
        status = _answered(arguments)
    finally:
        output.release_signals(to_default=is_whole_process)
    return _leave(status) if is_whole_process else status


def _answered(arguments: list[str]) -> int:
    try:
        with output.only_stderr() if "--json" in arguments else nullcontext() as out:
            status = _run(arguments, out)
        sys.stdout.flush()  # Python would complain at exit, with its own exit status
        return status
    except ReaderGoneError:
        return output.READER_GONE
    except EventpubError as failed:  # the answer is known, but cannot be written
        write_error(failed, failed)
        return failed.exit_status
    except (KeyboardInterrupt, Stopped) as stopped:  # a second signal
        return as_error(stopped)[1]


def _leave(status: int) -> int:
    """Exit at once if daemon threads are left; otherwise return the status.

    Threads of C++ libraries that wait for a broker or a database crash in Python's own exit.
    """
    if not log.end():
        os._exit(status)
    sys.stderr.flush()
    if any(thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(status)
    return status


def _run(arguments: list[str], out: IO[bytes] | None) -> int:
    try:
        answer = eventpub.main(arguments, prog_name="eventpub", standalone_mode=False)
        if isinstance(answer, Report):
            output.hold_signals()
            if out is None:
                output.write_text(answer)
    except click.exceptions.NoArgsIsHelpError as helped:
        helped.show()
        return output.WRONG_USE
    except (Exception, KeyboardInterrupt, Stopped) as raised:
        output.hold_signals()
        cause = output.why_ended(raised)
        error, status = as_error(cause)
        if out is None:
            write_error(error, cause, as_line=_command_name(arguments) == "run")
            return status
        answer = Report(False, mask(error.message), status=status, error=error)
    if not isinstance(answer, Report):
        return answer if isinstance(answer, int) else output.DONE
    if out is not None:
        output.write_json(_command_name(arguments), answer, out)
    return answer.exit_status


def _command_name(arguments: list[str]) -> str:
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
        write_error(error, failed.exc_value, as_line=True)
