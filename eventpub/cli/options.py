"""Options that several commands share: flags for configuration keys, `--json`, `--limit` …"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from eventpub.cli.output import for_people
from eventpub.times import parse_time

if TYPE_CHECKING:
    from eventpub.settings import Loaded


def time(value: str) -> int:
    try:
        return parse_time(value)
    except ValueError as error:
        raise click.BadParameter(f"{value}: it must be {error}") from None


FLAGS: dict[str, tuple[str, str]] = {
    "app.id": ("--app-id", "Name of this publisher."),
    "app.state_dir": ("--state-dir", "Folder of the index and the position; kept between runs."),
    "store.url": ("--store-url", "The database: mysql+pymysql://user@host:3306/database."),
    "store.table": ("--table", "The event table."),
    "read.start": (
        "--start",
        "Where the first start begins: 'beginning', 'now' or a time.",
    ),
    "sink.bootstrap_servers": ("--bootstrap-servers", "Brokers: host:port, comma-separated."),
    "sink.topic": ("--topic", "The topic."),
    "run.engine": ("--engine", "What publishes: spark or threads."),
    "run.shards": (
        "--shards",
        "Number of shards, published in parallel; at most the topic's partitions.",
    ),
    "ops.log": ("--log", "Log format on stderr: auto, text or json."),
}
"""Configuration key → flag and its help; `--set` takes any key."""


@dataclass(frozen=True)
class Request:
    file: Path | None
    overrides: dict[str, Any]
    flags: dict[str, str]

    def load(self, level: int = logging.INFO, **options: Any) -> Loaded:
        """The effective configuration (`settings.load`); configures logging accordingly."""
        from eventpub import log, settings

        style = self.overrides.get("ops.log") or os.environ.get("EVENTPUB_OPS__LOG", "auto")
        try:
            loaded = settings.load(
                self.file, self.overrides, os.environ, flags=self.flags, **options
            )
            style = loaded.config.ops.log
        finally:
            log.configure(style, level)
        return loaded


Command: TypeAlias = Callable[..., Any]


def configured(*keys: str, loads: bool = True) -> Callable[[Command], Command]:
    """Add `--json`, `--config`, `--set` and the flags of these keys.

    Args:
        loads: pass the command a `config`; False: a `request`, which loads it.
    """
    parameters = {FLAGS[key][0].lstrip("-").replace("-", "_"): key for key in keys}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def wrapped(config: Path | None, sets: tuple[str, ...], **rest: Any) -> Any:
            overrides, flags = {}, {}
            for item in sets:
                key, equals, value = item.partition("=")
                if not equals:
                    raise click.UsageError(f"--set {item}: write it as --set section.key=value")
                overrides[key.strip()] = value
            for parameter, key in parameters.items():
                if (value := rest.pop(parameter)) is not None:
                    overrides[key], flags[key] = value, FLAGS[key][0]
            request = Request(config, overrides, flags)
            return command(request.load().config if loads else request, **rest)

        for key in reversed(keys):
            flag, text = FLAGS[key]
            variable = "EVENTPUB_" + key.upper().replace(".", "__")
            text = f"{text}  [{key}, {variable}]"
            wrapped = click.option(flag, metavar="VALUE", help=text)(wrapped)
        wrapped = click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Set any configuration key; repeatable.",
        )(wrapped)
        wrapped = click.option(
            "--config",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Configuration file; default: EVENTPUB_CONFIG, or ./eventpub.toml.",
        )(wrapped)
        return reports(wrapped)

    return decorate


def limited(text: str, *, default: int, most: int) -> Callable[[Command], Command]:
    kind = click.IntRange(1, most)
    return click.option("--limit", type=kind, default=default, show_default=True, help=text)


def reports(command: Command) -> Command:
    """Add `--json`; `eventpub.cli.main` handles it, also for errors in other flags."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        expose_value=False,
        help="Print the result as one JSON object.",
    )(command)


def reads_topics(command: Command) -> Command:
    """Add `--timeout`; shows on a terminal that the command is reading."""

    @click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=60.0,
        show_default=True,
        metavar="SECONDS",
        help="Time limit for reading the topics.",
    )
    @wraps(command)
    def wrapped(timeout: float, **rest: Any) -> Any:
        from eventpub.cli.terminal import progress

        with progress(logging.getLogger("eventpub.cli")) as show:
            show(f"reading the topics, for at most {timeout:.0f} s", None)
            return command(timeout=timeout, **rest)

    return wrapped


def agrees(question: str) -> bool:
    return is_somebody_there() and click.confirm(for_people(question), err=True)


def is_somebody_there() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
