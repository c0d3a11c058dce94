"""`eventpub init`: a first configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eventpub.cli.options import Request, configured, reports
from eventpub.cli.output import Report
from eventpub.cli.parts import Line, Part

if TYPE_CHECKING:
    from eventpub.ops.init import Written

_NEXT = [
    "have the statements for the account run, and set EVENTPUB_STORE__PASSWORD",
    "eventpub doctor",
    "eventpub run",
]
_FIRST = "have the statement for the table run: "
_WAIT = "it may copy the table, and writers wait meanwhile", "writers go on meanwhile (InnoDB)"


@click.command()
@click.option(
    "--url",
    metavar="URL",
    help="The database to look into, as for --store-url: mysql+pymysql://user@host:3306/database.",
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
    texts={"store.table": "The event table; default: the likeliest of the database."},
)  # fmt: skip
def init(request: Request, url: str | None, output: Path, force: bool) -> Report:
    """Write a first eventpub.toml for your database.

    Finds the event table and its columns in it, knows those of frameworks, and prints the statement
    for what the table lacks. A column that it does not recognise is named by
    --set store.columns.event_type=NAME. The password comes from EVENTPUB_STORE__PASSWORD, and is
    not written. For root the file names an account eventpub instead, whose SQL is printed. Exit
    status 1 if no table is surely the event table, or it cannot be published.
    """
    from eventpub.ops import init as making

    if output.exists() and not force:
        raise making.exists(output)
    given = dict(request.overrides)
    if url is not None:
        given["store.url"] = url
    # a file that is there already is no base for what is to be written, unless it is named
    asked = replace(request, overrides=given, reads_file=request.file is not None)
    loaded = asked.load(defaults={"app.id": "events", "sink.topic": "events"})

    def stated(key: str, value: str) -> str | None:
        return None if loaded.origins[key] == "default" else value

    config = loaded.config
    written = making.init(
        config,
        output,
        table=stated("store.table", config.store.table),
        columns={
            ours: name
            for ours, name in config.store.columns.model_dump().items()
            if loaded.origins[f"store.columns.{ours}"] != "default"
        },
        app_id=stated("app.id", config.app.id),
        topic=stated("sink.topic", config.sink.topic),
        force=force,
    )
    chosen = written.chosen
    summary = f"{written.file} was written, for table {chosen.table}"
    if chosen.framework:
        summary += f" of {chosen.framework}"
    result: dict[str, Any] = {
        "file": str(written.file),
        "table": chosen.table,
        "columns": dict(chosen.columns),
        "framework": chosen.framework,
        "first_version": chosen.first_version,
        "without_identity": chosen.without_identity,
        "statements": chosen.statements,
        "others": [{"table": c.table, "columns": dict(c.columns)} for c in written.others],
        "account": written.account,
        "notes": _notes(written),
        "next": [_FIRST + _WAIT["ADD COLUMN" not in s] for s in chosen.statements] + _NEXT,
    }
    return Report("init", True, summary, result, _parts_of(result))


def _notes(written: Written) -> list[str]:
    notes, chosen = [], written.chosen
    if written.user != written.asked_as:
        notes.append(
            f"store.url in {written.file} has the user {written.user}, not {written.asked_as}: the"
            " statements below make that account, which may do what the publisher does and no more"
        )
    return notes + chosen.notes


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
