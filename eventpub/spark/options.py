"""The options of the data sources, as a configuration."""

from __future__ import annotations

import base64
import getpass
import pickle
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eventpub.channel import Beginning
from eventpub.config import Config, Gaps, Read, Recount, Sink, Store
from eventpub.errors import ConfigError, EventpubError, from_dict
from eventpub.spark.plan import Plan
from eventpub.times import parse_time

_SECTIONS: dict[str, Any] = {"store": Store, "read": Read, "gaps": Gaps, "recount": Recount}
_OTHERS = (
    "shards", "partitions", "state", "state_dir", "rows", "maxRowsPerTrigger", "path", "from", "to",
)  # fmt: skip
_SINK_KEYS = (
    "create_topics", "partitions", "replication_factor", "dead_limit", "transaction_timeout",
)  # fmt: skip
_OTHERS_OF_SINK = ("id", "topic", "after_query", "checkpointlocation", "path")
_KEY = re.compile(
    r"\[store\.columns\]|\[?sink\.properties(?:\.([\w.]+))?\]?|\b(store|read|gaps|recount|sink)\.([a-z_]+)\b"
)
_NAMES = {
    key: section
    for section, model in _SECTIONS.items()
    for key in model.model_fields
    if key != "columns"
}


@dataclass(frozen=True)
class Publisher:
    """What the query of `eventpub run` is given beside its configuration.

    Attributes:
        query: names the checkpoint, and what its batches publish.
        location: of the state.
        partitions: of the topic.
        initial: the first offset of a new checkpoint; its first batch reads the topic back.
        beginning: what is known of what was published before.
    """

    query: str
    location: str
    partitions: int
    initial: Plan
    beginning: Beginning

    def packed(self, config: Config) -> str:
        """As an option; its name must have `secret` in it, so that Spark does not show it."""
        return base64.b64encode(pickle.dumps((self, config))).decode()

    @staticmethod
    def unpacked(option: str) -> tuple[Publisher, Config]:
        """What `packed` made; of this process's user only."""
        found: tuple[Publisher, Config] = pickle.loads(base64.b64decode(option))
        return found


@dataclass(frozen=True)
class SourceOptions:
    """What the source `eventstore` is given.

    Attributes:
        config: with the options that are keys of `[store]`, `[read]`, `[gaps]` and `[recount]`.
        partitions: what the aggregates are divided into, by ``CRC32(aggregate_id) % partitions``;
            shard k has the partitions p with ``p % shards == k``.
        state: the location that all executors share.
        state_dir: on each machine, for the indexes.
        all_rows: whether skips and refused rows are yielded, too.
        most_rows: most rows of a batch, as of `planner.Planner`.
        publisher: of the source of `eventpub run`; None: it is of a user's own job.
        from_, to: of a batch, the first and last `create_time`, µs; None: the boundary.
    """

    config: Config
    partitions: int
    state: str
    state_dir: Path
    all_rows: bool
    most_rows: int | None
    publisher: Publisher | None = None
    from_: int = 0
    to: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What a state belongs to."""
        return {
            "table": self.config.store.full_table,
            "partitions": self.partitions,
            "shards": self.config.run.shards,
            "first_version": self.config.store.first_version,
        }


_OF_A_BATCH = {
    "from": "a stream begins at the option 'start'; 'from' is of spark.read",
    "to": "a stream has no end: trigger(availableNow=True) ends at now; 'to' is of spark.read",
}
_OF_A_STREAM = {
    "start": "spark.read begins at the option 'from'; 'start' is of a stream",
    "maxRowsPerTrigger": "spark.read makes one batch; limit its time by 'from' and 'to'",
}
"""Options that the other way of reading would leave unheard, and why they are refused."""


def source_options(given: Mapping[str, str], *, is_stream: bool = True) -> SourceOptions:
    """The options of the source `eventstore`.

    Args:
        is_stream: whether it is read as a stream, which needs a state, and not as a batch.

    Raises:
        ConfigError: config.unknown_key, config.missing_key, config.invalid_value
    """
    if (packed := given.get("publisher_secret")) is not None:
        return _of_publisher(*Publisher.unpacked(packed))
    sections, others = _sorted(given)
    for required in ("url", "state") if is_stream else ("url",):
        if required not in sections["store"] and required not in others:
            raise ConfigError(
                "config.missing_key",
                f"the source eventstore needs the option '{required}'",
                where=f"option {required}",
                suggestion=_REQUIRED[required],
            )
    for name, why in _OF_A_BATCH.items() if is_stream else _OF_A_STREAM.items():
        for of in (others, *sections.values()):
            if name in of:
                raise _invalid(name, str(of[name]), why)
    shards = _number(others, "shards", 1)
    partitions = _number(others, "partitions", shards)
    if partitions < shards:
        raise _invalid("partitions", str(partitions), f"it must be at least shards, {shards}")
    if (rows := others.get("rows", "events")) not in {"events", "all"}:
        raise _invalid("rows", rows, "it must be 'events' or 'all'")
    if rows == "events" and sections["gaps"].get("late") == "divert":
        raise _invalid("late", "divert", "late events have the column late; or set rows to 'all'")
    most_rows = _number(others, "maxRowsPerTrigger", 0) or None
    try:
        config = Config.model_validate(
            {
                **sections,
                "app": {"id": "eventstore"},
                "sink": {"topic": "journal"},
                "run": {"shards": shards},
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        raise _invalid(name, str(first["input"]), first["msg"]) from None
    from_, to = _time(others, "from") or 0, _time(others, "to")
    if to is not None and to < from_:
        raise _invalid("to", others["to"], "it is before 'from'")
    return SourceOptions(
        config=config,
        partitions=partitions,
        state=others.get("state", ""),
        state_dir=Path(others.get("state_dir") or _default_folder()),
        all_rows=rows == "all",
        most_rows=most_rows,
        from_=from_,
        to=to,
    )


def _time(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name, "")
    try:
        return parse_time(text) if text else None
    except ValueError:
        raise _invalid(name, text, "it must be a time such as 2026-01-31T12:00:00Z") from None


def _sorted(given: Mapping[str, str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The options that are keys of the configuration, by section; and the others."""
    known = {name.lower(): name for name in (*_NAMES, *_OTHERS)}  # Spark may change their case
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    others: dict[str, str] = {}
    columns: dict[str, str] = {}
    for key, value in given.items():
        name = known.get(key.lower())
        if key.lower().startswith("columns."):
            columns[key.lower().removeprefix("columns.")] = value
        elif name is None:
            raise _unknown(key)
        elif name in _NAMES:
            sections[_NAMES[name]][name] = value
        else:
            others[name] = value
    if columns:
        sections["store"]["columns"] = columns
    return sections, others


def _of_publisher(publisher: Publisher, config: Config) -> SourceOptions:
    return SourceOptions(
        config=config,
        partitions=publisher.partitions,
        state=publisher.location,
        state_dir=config.app.state_dir.absolute(),
        all_rows=True,
        most_rows=None,
        publisher=publisher,
    )


@dataclass(frozen=True)
class SinkOptions:
    """What the sink is given.

    Attributes:
        id: names what publishes.
        sink: as of `[sink]`; the topic is that of rows that do not name one.
        has_topic: whether there is such a topic.
        after_query: the query that this one follows; "": none.
        query: names the query; "": Spark's own id of it does.
        state_dir: of the publisher, on the driver's machine; None: it is a user's own query.
    """

    id: str
    sink: Sink
    has_topic: bool
    after_query: str
    query: str = ""
    state_dir: Path | None = None


def sink_options(given: Mapping[str, str]) -> SinkOptions:
    """The options of the sink `eventpub`.

    Raises:
        ConfigError: config.unknown_key, config.missing_key, config.invalid_value
    """
    if (packed := given.get("publisher_secret")) is not None:
        publisher, config = Publisher.unpacked(packed)
        folder = config.app.state_dir.absolute()
        return SinkOptions(config.app.id, config.sink, True, "", publisher.query, folder)
    fields: dict[str, Any] = {}
    properties: dict[str, str] = {}
    others: dict[str, str] = {}
    for key, value in given.items():
        name = key.lower()
        if name.startswith("kafka."):
            properties[name.removeprefix("kafka.")] = value
        elif name in _SINK_KEYS:
            fields[name] = value
        elif name in _OTHERS_OF_SINK:
            others[name] = value
        else:
            near = get_close_matches(
                name, [*_SINK_KEYS, *_OTHERS_OF_SINK, "kafka.bootstrap.servers"], 1
            )
            raise ConfigError(
                "config.unknown_key",
                f"the sink eventpub has no option '{key}'",
                where=f"option {key}",
                suggestion=f"did you mean '{near[0]}'?"
                if near
                else "properties of librdkafka begin with kafka.",
            )
    servers = properties.pop("bootstrap.servers", "")
    for required, value in (("id", others.get("id", "")), ("kafka.bootstrap.servers", servers)):
        if not value:
            raise ConfigError(
                "config.missing_key",
                f"the sink eventpub needs the option '{required}'",
                where=f"option {required}",
                suggestion="set it to a name for what publishes, which stays the same"
                if required == "id"
                else "set it to the brokers, host:port, with commas between",
            )
    topic = others.get("topic", "")
    try:
        sink = Sink(
            topic=topic or others["id"],
            bootstrap_servers=servers,
            properties=properties,
            **fields,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            "config.invalid_value",
            f"option {'.'.join(map(str, first['loc']))}: {first['msg']}",
            where="options of the sink eventpub",
            suggestion="correct the option",
        ) from None
    return SinkOptions(others["id"], sink, bool(topic), others.get("after_query", ""))


_REQUIRED = {
    "url": "set it to mysql+pymysql://user@host:3306/database",
    "state": "set it to a location that all executors reach, as the checkpoint does: a folder,"
    " s3://…, gs://… or az://…; the source keeps there what it has decided",
}


def with_options(error: EventpubError) -> EventpubError:
    """An error of a user's own query: with its options in place of the configuration's keys."""
    found = error.to_dict()
    for name in ("message", "where", "suggestion"):
        found[name] = found[name] and _KEY.sub(_option_of, found[name])
    return from_dict(found)


def _option_of(key: re.Match[str]) -> str:
    of_librdkafka, section, name = key.groups()
    if section is None:
        names = "columns.…" if "columns" in key[0] else f"kafka.{of_librdkafka or '…'}"
        return f"option {names}"
    if name == "bootstrap_servers":
        return "option kafka.bootstrap.servers"
    is_one = name in _NAMES or name in Sink.model_fields
    return f"option {name}" if is_one else key[0]


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"eventpub-{getpass.getuser()}"


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not (text.isdecimal() and (int(text) > 0 or text == str(default))):
        raise _invalid(name, text, "it must be a number above 0")
    return int(text)


def _invalid(name: str, value: str, why: str) -> ConfigError:
    return ConfigError(
        "config.invalid_value",
        f"option {name} = {value!r}: {why}",
        where=f"option {name}",
        suggestion="correct the option",
    )


def _unknown(key: str) -> ConfigError:
    names = sorted([*_NAMES, *_OTHERS])
    near = get_close_matches(key, names, 1)
    return ConfigError(
        "config.unknown_key",
        f"the source eventstore has no option '{key}'",
        where=f"option {key}",
        suggestion=f"did you mean '{near[0]}'?" if near else f"the options are {', '.join(names)}",
    )
