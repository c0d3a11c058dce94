"""`eventpub init`: a first configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from eventpub.cli.options import Request, configured, reports
from eventpub.cli.output import Line, Part, Report


@click.command()
@click.option(
    "--url",
    metavar="URL",
    help="The database, as for --store-url: mysql+pymysql://user@host:3306/database.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("eventpub.toml"),
    show_default=True,
    metavar="FILE",
    help="The file to write.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@reports
@configured(
    "store.url", "store.table", "app.id", "sink.topic", "sink.bootstrap_servers", "ops.log",
    texts={"store.table": "The event table; default: the likeliest one."},
)  # fmt: skip
def init(request: Request, url: str | None, output: Path, force: bool) -> Report:
    """Write a first eventpub.toml for your database.

    Finds the event table and its columns, recognises those of frameworks, and prints the statement
    that adds what the table lacks. Map other columns by --set store.columns.event_type=NAME. The
    password comes from EVENTPUB_STORE__PASSWORD and is not written. In place of root the file names
    a user eventpub, whose SQL is printed. Exit status 1 if no table is clearly the event table, or
    it cannot be published.
    """
    from eventpub.ops import init as making

    if not force:
        making.require_absent(output)
    given = dict(request.overrides)
    if url is not None:
        given["store.url"] = url
    # a file that is there already is no base for what is to be written, unless it is named
    asked = replace(request, overrides=given, reads_file=request.file is not None)
    loaded = asked.load(defaults={"app.id": "events", "sink.topic": "events"})
    result = making.init(loaded, output, force=force)
    summary = f"{result['file']} was written, for table {result['table']}"
    if result["framework"]:
        summary += f" of {result['framework']}"
    return Report("init", True, summary, result, _parts_of(result))


def _named(name: str | tuple[str, ...]) -> str:
    return name if isinstance(name, str) else " and ".join(name)


def _parts_of(result: dict[str, Any]) -> list[Part]:
    parts: list[Part] = [
        Line(f"{ours:>14} = {_named(name)}") for ours, name in result["columns"].items()
    ]
    parts += [Line((f"note: {note}", "yellow")) for note in result["notes"]]
    for other in result["others"]:
        columns = ", ".join(f"{ours} = {_named(name)}" for ours, name in other["columns"].items())
        question = f"or is it table {other['table']} ({columns})? then:"
        parts.append(Line(f"{question} --table {other['table']} --force"))
    steps = [f"{number}. {step}" for number, step in enumerate(result["next"], 1)]
    for heading, lines, style in (
        ("for the table:", result["statements"], "cyan"),
        ("an account for it:", result["account"], "cyan"),
        ("next:", steps, ""),
    ):
        parts += [Line((heading, "bold"))] if lines else []
        parts += [Line((f"  {line}", style)) for line in lines]
    return parts
