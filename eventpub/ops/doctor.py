"""`eventpub doctor`: checks everything that `run` needs, and changes nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from eventpub.config import Config
from eventpub.errors import Check, EventpubError, SinkError, StateError, StoreError
from eventpub.state import WITHOUT_FILES, StateDir

_LITTLE_SPACE = 1 << 30
_NO_SPACE = 64 << 20
_CANNOT_BE_REACHED = re.compile(
    r"(store|sink)\.(unreachable|auth_failed|auth_unsupported|token_failed|connection_lost|timeout"
    r"|tls_failed|too_many_connections|not_authorized)"
)


def examine(config: Config) -> list[Check]:
    """Every check, in the order in which a user would fix what is wrong."""
    parts: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("event store", lambda: _store(config)),
        ("topic", lambda: _sink(config)),
        ("backlog", lambda: _backlog(config)),
        ("state", lambda: _state(config)),
        ("Java", lambda: _spark(config)),
        ("state.location", lambda: _location(config)),
    ]
    # in parallel: a database and a broker that are both down must not take twice as long
    with ThreadPoolExecutor(len(parts)) as pool:
        return [c for part in pool.map(_guarded, parts) for c in part]


def unreachable(checks: Sequence[Check]) -> EventpubError | None:
    for check in checks:
        if check.status == "wrong" and _CANNOT_BE_REACHED.fullmatch(check.code or ""):
            kind = StoreError if str(check.code).startswith("store.") else SinkError
            return kind(str(check.code), check.message, suggestion=check.suggestion)
    return None


def _guarded(part: tuple[str, Callable[[], Iterable[Check]]]) -> list[Check]:
    name, checks = part
    try:
        return list(checks())
    except EventpubError as error:
        return [Check.wrong(name, error)]


_OF_STORE = "columns, indexes, identity, time zone and clock, open transactions"
_OF_TOPIC = "topics, partitions, transactions, settings of topics and brokers"


def _and_the_others(checks: list[Check], first: Sequence[str], others: str) -> list[Check]:
    """The checks, and which others were skipped if one of the first is wrong."""
    wrong = next((c for c in checks if c.name in first and c.status == "wrong"), None)
    if wrong is None:
        return checks
    return [*checks, Check(others, "skipped", f"not checked; first fix: {wrong.name}")]


def _store(config: Config) -> Iterable[Check]:
    from eventpub.sources.mysql.checking import checks

    first = ("event store", "event store: connection", "event store: table")
    former_server = None
    with suppress(StateError):  # the topic's part reports it
        former_server = _progress(config).get("server")
    found = checks(config.store, former_server)
    return _and_the_others([*found], first, f"event store: {_OF_STORE}")


def _progress(config: Config) -> dict[str, Any]:
    state = StateDir(config.app.state_dir)
    return state.read(state.progress_file) or {}


def _sink(config: Config) -> Iterable[Check]:
    from eventpub.sink.checks import Written, checks
    from eventpub.sink.client import Clients

    known = _progress(config)
    ends = {(topic, number): end for topic, number, end in known.get("ends", ())}
    written = Written(known.get("topics", {}), ends, known.get("partitions"))
    found = checks(
        Clients(config.sink),
        config.app.id,
        config.run.shards,
        late=config.gaps.late == "divert",
        written=written,
        is_numbered=config.run.engine == "spark",
    )
    return _and_the_others([*found], ["broker"], _OF_TOPIC)


def _backlog(config: Config) -> list[Check]:
    from eventpub.publisher.prepare import check_backlog
    from eventpub.sink.client import Clients
    from eventpub.sources.base import start_position
    from eventpub.sources.mysql import EventStore

    state = StateDir(config.app.state_dir)
    try:
        with EventStore(config.store, EventStore.discover(config.store)) as store:
            started = (state.read(state.start_file) or {}).get("position")
            start = start_position(config.read, store.now) if started is None else int(started)
            known = (state.read(state.progress_file) or {}).get("position")
            check_backlog(config, Clients(config.sink), store, known, start)
    except EventpubError as error:
        if error.code != "sink.backlog_too_old":
            return []  # other parts report it
        raise
    return [Check("backlog", "ok", "the topic keeps the oldest event that is to be published")]


def _state(config: Config) -> list[Check]:
    from eventpub.publisher.prepare import find_start, require_own
    from eventpub.shard.assignment import real_parts
    from eventpub.sources.mysql import EventStore

    def now() -> int:
        with EventStore(config.store, EventStore.discover(config.store)) as store:
            return store.now()

    folder = config.app.state_dir
    checks = [state_dir(folder)]
    if checks[0].status == "wrong":
        return checks
    state = StateDir(folder)
    if folder.is_dir():
        state.require_ours()
    try:
        require_own(config, state, real_parts(config))
        find_start(config, state, real_parts(config), now)
    except (SinkError, StoreError) as error:  # other parts report what cannot be reached, or read
        if isinstance(error, SinkError) and not _CANNOT_BE_REACHED.match(error.code):
            raise
    damaged = state.damaged()
    if damaged:
        names = ", ".join(file.name for file in damaged)
        said = f"{names} in {folder} is damaged and cannot be read"
        checks.append(Check("state files", "warn", said, WITHOUT_FILES, "state.file_damaged"))
    return checks


def state_dir(folder: Path) -> Check:
    name = "state directory"
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(
            name,
            "wrong",
            f"{there} is not a folder that this account can write to",
            f"give it write access to {there}, or set app.state_dir",
            "state.not_writable",
        )
    free = shutil.disk_usage(there).free
    space = f"{free / (1 << 30):.1f} GiB free"
    if free < _LITTLE_SPACE:
        return Check(
            name,
            "wrong" if free < _NO_SPACE else "warn",
            f"{folder}: only {space}",
            "free some space, or set app.state_dir to a larger disk",
            "state.disk_full",
        )
    return Check(name, "ok", f"{folder}: {space}")


def _spark(config: Config) -> list[Check]:
    if config.run.engine == "threads":
        return [Check("Java", "ok", 'not needed: run.engine is "threads"')]
    from eventpub.spark.session import require_java

    return [Check("Java", "ok", require_java())]


def _location(config: Config) -> list[Check]:
    location = config.state.location
    is_there = "://" in location or (location and Path(location).exists())  # else a run creates it
    if config.run.engine == "threads" or not is_there:
        return []
    from eventpub.spark.place import Place

    next(Place(location).names(""), None)
    return [Check("state.location", "ok", f"{location} can be listed")]
