"""`eventpub replay`: a range once more, to another topic."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import click

from eventpub.cli.options import Request, configured, reports
from eventpub.cli.output import Report, end_if_asked
from eventpub.terminal import counted

if TYPE_CHECKING:
    from eventpub.config import Config
    from eventpub.ops.replay import Replayed
    from eventpub.ops.replay_pages import Range


@click.command()
@click.option(
    "--from",
    "from_",
    metavar="TIME",
    required=True,
    help="Events created at or after this (RFC 3339).",
)
@click.option(
    "--to", metavar="TIME", required=True, help="Events created at or before this (RFC 3339)."
)
@click.option("--topic", metavar="NAME", required=True, help="To this topic; made if missing.")
@click.option("--aggregate", metavar="ID", help="Only this aggregate's events.")
@click.option(
    "--id",
    "id_",
    metavar="NAME",
    default="",
    help="Name of this replay, in the header eventpub_replay. By default it follows from app.id,"
    " range, topic and aggregate, so the same command goes on where it was interrupted. Give"
    " another name to publish the same range a second time.",
)
@reports
@configured("app.id", "store.url", "store.table", "sink.bootstrap_servers", "ops.log")
def replay(  # noqa: PLR0913 (flags, by keyword)
    request: Request, *, from_: str, to: str, topic: str, aggregate: str | None, id_: str
) -> Report:
    """Publish a range once more, to another topic.

    Records have the header eventpub_replay. Each aggregate's events come in the order of their
    versions, each once, also if the command is interrupted and started again. Exit status 1 if the
    broker refused any.
    """
    from eventpub.cli.commands import _time

    first, last = _time(from_, "--from"), _time(to, "--to")
    loaded = request.load()
    from eventpub.ops.replay_pages import Range

    assert first is not None
    assert last is not None
    done = _run(loaded.config, Range(first, last, topic, aggregate, id_))
    before = f" ({done.before:,} were there before)" if done.before else ""
    summary = f"replay {done.id}: {counted(done.events, 'event')} published to {topic}{before}"
    if done.refused:
        summary += f", {done.refused:,} refused by the broker: " + "; ".join(done.examples)
    result = {
        "id": done.id,
        "topic": topic,
        "events": done.events,
        "before": done.before,
        "refused": done.refused,
        "examples": done.examples,
        "transactions": done.transactions,
    }
    return Report("replay", not done.refused, summary, result)


def _run(config: Config, what: Range) -> Replayed:
    """The replay, which says how far it is."""
    from eventpub.cli.terminal import progress
    from eventpub.ops import replay as replaying

    named = what.named(config.app.id)
    has_begun = False
    with progress(logging.getLogger("eventpub.replay")) as show:

        def published(events: int, total: int | None) -> None:
            nonlocal has_begun
            if not has_begun:
                resumes = "if it is interrupted, the same command resumes it"
                sys.stderr.write(f"replay {named}: {resumes}\n")
                has_begun = True
            end_if_asked()
            of = "" if total is None else f" of {total:,}"
            done = None if total is None else min(events / max(total, 1), 1.0)
            show(f"publishing again: {events:,}{of} events", done)

        return replaying.replay(config, what, published)
