"""`eventpub config`: the configuration in effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from eventpub.cli.options import Request, configured, reports
from eventpub.cli.output import Report
from eventpub.cli.parts import Span, Table
from eventpub.terminal import counted


@click.group()
def config() -> None:
    """Check the configuration, or show what is in effect."""


@config.command("check")
@reports
@configured()
def config_check(request: Request) -> Report:
    """Validate the configuration.

    It does not connect to the database or the brokers; with OIDC it requests a token.
    """
    loaded = request.load()
    from eventpub import settings, sink
    from eventpub.sources.mysql.connection import connect_arguments

    url = connect_arguments(loaded.config.store)
    for name in ("ssl_ca", "ssl_cert", "ssl_key"):
        if (file := url.get(name)) is not None:
            settings.read_file(Path(file), "store.url")
    sink.check_properties(loaded.config.sink, loaded.config.app.id)
    where = str(loaded.file) if loaded.file else "environment and flags"
    return Report("config check", True, f"the configuration ({where}) is valid")


@config.command("show")
@reports
@configured()
def config_show(request: Request) -> Report:
    """Show each value and where it came from. Secrets are masked."""
    loaded = request.load()
    from eventpub import settings

    values = settings.shown(loaded)
    result: dict[str, Any] = {
        key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()
    }
    return Report(
        "config show",
        True,
        counted(len(values), "key"),
        {"file": str(loaded.file) if loaded.file else None, "keys": result},
        parts=[Table(("key", "value", "from"), [_key(n, **shown) for n, shown in result.items()])],
    )


def _key(name: str, value: object, origin: str) -> list[Span]:
    text = "" if value is None else json.dumps(value, ensure_ascii=False)
    is_default = origin == "default"
    return [name if is_default else (name, "bold"), text, (origin, "dim" if is_default else "")]
