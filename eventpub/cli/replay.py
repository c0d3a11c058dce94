"""`eventpub replay`: a range once more, to another topic."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import click

from eventpub.cli.options import Request, Time, configured, reports
from eventpub.cli.output import Report, end_if_asked
from eventpub.terminal import counted

if TYPE_CHECKING:
    from eventpub.config import Config
    from eventpub.ops.replay import Range, Replayed


@click.command()
@click.option(
    "--from",
    "first",
    type=Time(),
    required=True,
    help="Events created at or after this (RFC 3339).",
)
@click.option(
    "--to", "last", type=Time(), required=True, help="Events created at or before this (RFC 3339)."
)
@click.option("--topic", metavar="NAME", required=True, help="Target topic; created if missing.")
@click.option("--aggregate", metavar="ID", help="Only this aggregate's events.")
@click.option(
    "--id",
    "id_",
    metavar="NAME",
    default="",
    help="Name of this replay, for the header eventpub_replay; by default derived from app.id,"
    " range, topic and aggregate, so the same command continues an interrupted replay. Another name"
    " publishes the same range a second time.",
)
@reports
@configured("app.id", "store.url", "store.table", "sink.bootstrap_servers", "ops.log")
def replay(  # noqa: PLR0913 (flags, by keyword)
    request: Request, *, first: int, last: int, topic: str, aggregate: str | None, id_: str
) -> Report:
    """Publish a range once more, to another topic.

    Records have the header eventpub_replay. Each aggregate's events are published in version order,
    each once, even if the command is interrupted and repeated. Exit status 1 if the broker refused
    any.
    """
    loaded = request.load()
    from eventpub.ops.replay import Range

    done = _run(loaded.config, Range(first, last, topic, aggregate, id_))
    before = f" ({done.before:,} were there before)" if done.before else ""
    summary = f"replay {done.id}: {counted(done.events, 'event')} published to {topic}{before}"
    if done.refused:
        summary += f", {done.refused:,} refused by the broker: " + "; ".join(done.examples)
    return Report("replay", not done.refused, summary, {"topic": topic, **vars(done)})


def _run(config: Config, what: Range) -> Replayed:
    from eventpub.cli.terminal import progress
    from eventpub.ops import replay as replaying

    has_begun = False
    with progress(logging.getLogger("eventpub.replay")) as show:

        def published(events: int, total: int) -> None:
            nonlocal has_begun
            if not has_begun:
                resumes = "if it is interrupted, the same command resumes it"
                sys.stderr.write(f"replay {what.named(config.app.id)}: {resumes}\n")
                has_begun = True
            end_if_asked()
            done = min(events / max(total, 1), 1.0)
            show(f"publishing again: {events:,} of {total:,} events", done)

        return replaying.replay(config, what, published)
