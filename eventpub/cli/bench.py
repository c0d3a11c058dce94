"""`eventpub bench`, which lies beside the package in a clone and is in no wheel."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

import eventpub
from eventpub.errors import ConfigError


def bench_command() -> click.Command:
    """The bench's own, or in its place one that says where it is."""
    clone = Path(eventpub.__file__).parents[1]
    if (clone / "bench" / "command.py").is_file():
        from bench.command import bench

        return bench

    @click.command("bench", context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1)
    def missing(arguments: tuple[str, ...]) -> NoReturn:
        """Measure on this machine; in a clone of eventpub only."""
        del arguments
        raise ConfigError(
            "bench.not_installed",
            "the bench is not installed with eventpub",
            where=str(clone),
            suggestion="run it in a clone of eventpub: pip install -e '.[bench]'",
        )

    return missing
