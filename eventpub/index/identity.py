"""What an index belongs to, and the format that it is written in: both decide whether it is used.

What must hold: an index that a newer version has written is not read, since what it has may stand
there in another form; nor is one of another application, topic or shard, whose versions would make
this topic lose events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eventpub.errors import StateError

FORMAT = 3
IDENTITY = b"midentity"
"""The key, in every format."""

_NAMES = {"app": "app.id", "topic": "sink.topic", "table": "the table"}
_RENAMED = 'if app.id was changed: app.former_ids = ["{}"]; '
_MOVED = (
    "if sink.topic was changed, and only new events are to be published there: set"
    " sink.accept_topic_id to the new topic's id, which `eventpub doctor` shows; "
)


def require_known_format(items: Iterator[tuple[bytes, bytes]], directory: Path) -> None:
    """To be called before anything else of an index is read.

    Args:
        items: of the key `IDENTITY`; none where nothing was written yet.
        directory: the index.

    Raises:
        StateError: index.newer_format
    """
    written = next((json.loads(identity).get("format") for _, identity in items), None)
    if isinstance(written, int) and written > FORMAT:
        raise StateError(
            "index.newer_format",
            "this index was written by a newer version of eventpub",
            where=str(directory),
            suggestion="install that version again; or stop the publisher, remove the folder"
            " `index` of app.state_dir (on a cluster on each machine) and start it: what was"
            " published is read back from the topic (not where the topic lacks a part of it, as"
            " with sink.accept_topic_id)",
        )


def of_another(found: Mapping[str, Any], required: Mapping[str, Any], where: Path) -> StateError:
    """What differs between the identity that a state has and the one that it must have."""
    differing = [name for name in {**required, **found} if found.get(name) != required.get(name)]
    theirs, ours = (
        " and ".join(_words(name, of) for name in differing) for of in (found, required)
    )
    may_be_renamed = not {*differing} - {"app", "topic"}
    return StateError(
        "state.foreign",
        f"this state belongs to {theirs}, not to {ours}",
        where=str(where),
        suggestion=(
            _RENAMED.format(found.get("app")) if may_be_renamed and "app" in differing else ""
        )
        + (_MOVED if may_be_renamed and "topic" in differing else "")
        + ("otherwise " if may_be_renamed else "")
        + "set app.state_dir to another folder, or remove this one (also after the table"
        " or its database was renamed): what was published is read back from the topic",
    )


def _words(name: str, identity: Mapping[str, Any]) -> str:
    value = identity.get(name)
    if name == "shard" and isinstance(value, list):
        return "shard {} of {}".format(*value)
    if name == "partitions":
        return f"{value} partitions"
    return f"{_NAMES.get(name, name)} {value!r}" if value is not None else f"no {name}"
