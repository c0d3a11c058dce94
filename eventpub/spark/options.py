"""What Spark hands to the data sources: options, as a configuration, and a micro-batch's plan."""

from __future__ import annotations

import base64
import os
import pickle
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError

from eventpub.channel import Beginning
from eventpub.config import Config, Gaps, Read, Recount, Sink, Store
from eventpub.errors import ConfigError, StateError
from eventpub.times import parse_time

_SECTIONS: dict[str, Any] = {"store": Store, "read": Read, "gaps": Gaps, "recount": Recount}
_SECTION_OF = {
    key: section
    for section, model in _SECTIONS.items()
    for key in model.model_fields
    if key != "columns"
} | {"dead_limit": "sink"}
_SINK_KEYS = (
    "create_topics", "partitions", "replication_factor", "dead_limit", "transaction_timeout",
)  # fmt: skip
_REQUIRED = {
    "url": "set it to mysql+pymysql://user@host:3306/database",
    "state": "set it to a location that all executors reach, as the checkpoint does: a folder,"
    " s3://…, gs://… or az://…; the source keeps there what it has decided",
    "id": "set it to a name for what publishes, which stays the same",
    "kafka.bootstrap.servers": "set it to the brokers, host:port, with commas between",
}

_TUPLES = ("buckets", "requests", "answered", "rows_in", "journals")
"""Fields of a plan that JSON has as lists."""

LEAST_BYTES, FIRST_BYTES = 1 << 20, 8 << 20
"""For a task of the first batch; see `Plan.most_bytes`."""

Model = TypeVar("Model", bound=BaseModel)
_Time = Annotated[int, BeforeValidator(parse_time)]


@dataclass(frozen=True)
class Plan:
    """One micro-batch, for all shards, and Spark's offset. Times are µs on the database's clock.

    Attributes:
        query: identity of the query's checkpoint; journals and indexes belong to it.
        batch: 0: nothing is planned yet.
        start: events created up to here are not published; None: all are.
        begin: a shard that has read nothing reads what was created after this.
        upto: events created up to here belong to this batch or an earlier one.
        after: few enough rows were created after this, up to `upto`, to be read as one page; None:
            unknown.
        open_since, hidden_since, uncounted_since: see `channel.Window`.
        unpublished_since: rows that may be unpublished below `upto`, except holds, were created
            after this.
        comparison, buckets: the recount's last comparison, and what this batch compares.
        newest: see `DatabaseChanges.newest`.
        server: identity of the database server; "": unknown.
        read_as: see `Layout.read_as`; "": unknown.
        most_bytes: after so many bytes of rows a task leaves the rest of its window to the next
            batch.
        rows_in, journals: by shard, see `channel.Report`, of the batch before.
        snapshot: the shards keep snapshots of their indexes.
        requests: by the fields of `channel.Request`.
        answered: ids of recent requests, not to be repeated.
    """

    query: str
    batch: int = 0
    start: int | None = None
    begin: int = 0
    upto: int = 0
    after: int | None = None
    open_since: int | None = None
    hidden_since: int | None = None
    uncounted_since: int | None = None
    unpublished_since: int | None = None
    comparison: int = 0
    buckets: tuple[int, ...] = ()
    newest: tuple[int, int, str] | None = None
    server: str = ""
    read_as: str = ""
    most_bytes: int = FIRST_BYTES
    rows_in: tuple[int, ...] = ()
    journals: tuple[str, ...] = ()
    snapshot: bool = False
    requests: tuple[dict[str, Any], ...] = ()
    answered: tuple[str, ...] = ()

    def to_offset(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> Plan:
        """Inverse of `to_offset`; raises state.checkpoint_version."""
        if "query" not in offset or not offset.keys() <= {field.name for field in fields(cls)}:
            raise StateError(
                "state.checkpoint_version",
                "the checkpoint was written by another version of eventpub, or another source",
                where=f"offset of query {offset.get('query')}",
                suggestion="install the version that wrote it; or start with a new checkpoint",
            )
        newest = offset.get("newest")
        tuples = {n: tuple(offset.get(n, ())) for n in _TUPLES}
        return cls(**offset | tuples | {"newest": None if newest is None else tuple(newest)})


@dataclass(frozen=True)
class Publisher:
    """What the query of `eventpub run` needs besides its configuration.

    Attributes:
        query: names the checkpoint, and what its batches publish.
        location: of the state.
        initial: the first offset of a new checkpoint; its first batch reads the topic back.
        beginning: what is known to be published.
        accepts_topic, start_id: see `Assignment`.
        owner: names this start of `eventpub run`, which has taken the id.
    """

    query: str
    location: str
    partitions: int
    initial: Plan
    beginning: Beginning
    accepts_topic: bool = False
    start_id: str = ""
    owner: str = ""

    def packed(self, config: Config) -> str:
        """As an option; its name must contain `secret`, so that Spark redacts it."""
        return base64.b64encode(pickle.dumps((self, config))).decode()

    @staticmethod
    def unpacked(option: str) -> tuple[Publisher, Config]:
        """Inverse of `packed`: unpickles, so only for options of this process's user."""
        found: tuple[Publisher, Config] = pickle.loads(base64.b64decode(option))
        return found


class _Own(BaseModel):
    """Options of the source that the configuration does not have.

    Attributes:
        partitions: aggregates are divided by ``CRC32(aggregate_id) % partitions``; shard k has the
            partitions p with ``p % shards == k``.
        rows: "all": also skips and refused rows.
        state: the location that all executors share.
        state_dir: for the indexes, on each machine.
        from_, to: of a batch read, first and last `create_time`, µs; None: the boundary.
    """

    shards: PositiveInt = 1
    partitions: PositiveInt = 0
    rows: Literal["events", "all"] = "events"
    path: str = ""
    state_dir: str = ""
    state: str = ""
    most_rows: PositiveInt | None = Field(None, alias="maxRowsPerTrigger")
    from_: _Time = Field(0, alias="from")
    to: _Time | None = None


class SourceOptions(_Own):
    """Options of the source `eventstore`; `publisher`: None in a user's own job."""

    config: Config
    publisher: Publisher | None = None

    @property
    def all_rows(self) -> bool:
        return self.rows == "all"

    @property
    def identity(self) -> dict[str, Any]:
        """What a state belongs to."""
        return {
            "table": self.config.store.full_table,
            "columns.aggregate_id": self.config.store.key,
            "partitions": self.partitions,
            "shards": self.config.run.shards,
            "first_version": self.config.store.first_version,
        }


def source_options(given: Mapping[str, str], *, is_stream: bool = True) -> SourceOptions:
    """Options of the source `eventstore`; a stream needs a state.

    Raises:
        ConfigError: config.unknown_key, config.missing_key, config.invalid_value
    """
    if (packed := given.get("publisher_secret")) is not None:
        publisher, config = Publisher.unpacked(packed)
        return SourceOptions(
            config=config,
            partitions=publisher.partitions,
            rows="all",
            state=publisher.location,
            state_dir=str(config.app.state_dir.absolute()),
            publisher=publisher,
        )
    others = [field.alias or name for name, field in _Own.model_fields.items()]
    of_other = {"from", "to"} if is_stream else {"start", "maxRowsPerTrigger"}
    of = f"a {'stream' if is_stream else 'batch'} of eventstore"
    found, columns = _named(of, given, {*_SECTION_OF, *others} - of_other, "columns.")
    _require(found, "url", *["state"] * is_stream)
    given_own = {name: found[name] for name in others if name in found}
    own = _validated(_Own, given_own)
    sections: dict[str, dict[str, Any]] = {name: {} for name in (*_SECTIONS, "sink")}
    for name in found.keys() & _SECTION_OF.keys():
        sections[_SECTION_OF[name]][name] = found[name]
    if columns:
        sections["store"]["columns"] = columns
    fixed = {"app": {"id": "eventstore"}, "sink": {**sections["sink"], "topic": "journal"}}
    config = _validated(Config, {**sections, **fixed, "run": {"shards": own.shards}})
    partitions = own.partitions or own.shards
    if partitions < own.shards:
        raise _invalid("partitions", f"it must be at least shards, {own.shards}")
    if own.to is not None and own.to < own.from_:
        raise _invalid("to", "it is before 'from'")
    if own.rows == "events" and config.gaps.late == "divert":
        raise _invalid("late", "late events have the column late; or set rows to 'all'")
    state_dir = own.state_dir or f"{tempfile.gettempdir()}/eventpub-{os.getuid()}"
    whole = {"config": config, "partitions": partitions, "state_dir": state_dir}
    return SourceOptions.model_validate(given_own | whole)


@dataclass(frozen=True)
class SinkOptions:
    """Options of the sink.

    Attributes:
        id: names what publishes.
        sink: its topic is for rows that do not name one, if `has_topic`.
        after_query: the query that this one follows, or "".
        query, owner: see `Publisher`; "": a user's query, with Spark's own id.
        state_dir: the publisher's; None: a user's own query.
        partitions: of the publisher's topics at its start; 0: a user's own query.
    """

    id: str
    sink: Sink
    has_topic: bool
    after_query: str
    query: str = ""
    state_dir: Path | None = None
    partitions: int = 0
    owner: str = ""


def sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Options of the sink `eventpub`.

    Raises:
        ConfigError: config.unknown_key, config.missing_key, config.invalid_value
    """
    if (packed := given.get("publisher_secret")) is not None:
        publisher, config = Publisher.unpacked(packed)
        folder = config.app.state_dir.absolute()
        of_query = publisher.query, folder, publisher.partitions, publisher.owner
        return SinkOptions(config.app.id, config.sink, True, "", *of_query)
    names = (*_SINK_KEYS, "id", "topic", "after_query", "checkpointLocation", "path")
    found, properties = _named("the sink eventpub", given, names, "kafka.")
    servers = properties.pop("bootstrap.servers", "")
    _require(found | {"kafka.bootstrap.servers": servers}, "id", "kafka.bootstrap.servers")
    topic = found.get("topic", "")
    fields = {name: found[name] for name in _SINK_KEYS if name in found}
    to = {"topic": topic or found["id"], "bootstrap_servers": servers, "properties": properties}
    sink = _validated(Sink, fields | to)
    return SinkOptions(found["id"], sink, bool(topic), found.get("after_query", ""))


def _named(
    of: str, given: Mapping[str, str], names: Iterable[str], prefix: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Known options, and those with the prefix; Spark may change the case of names."""
    known = {name.lower(): name for name in names}
    found, prefixed = dict[str, str](), dict[str, str]()
    for key, value in given.items():
        lower = key.lower()
        if lower.startswith(prefix):
            prefixed[lower.removeprefix(prefix)] = value
        elif lower in known:
            found[known[lower]] = value
        else:
            near = get_close_matches(lower, [*known, f"{prefix}…"], 1)
            raise ConfigError(
                "config.unknown_key",
                f"{of} has no option '{key}'",
                where=f"option {key}",
                suggestion=(f"did you mean '{known.get(near[0], near[0])}'? " if near else "")
                + f"The options are {', '.join([*sorted(known.values()), f'{prefix}…'])}",
            )
    return found, prefixed


def _require(found: Mapping[str, str], *names: str) -> None:
    for name in names:
        if not found.get(name):
            raise ConfigError(
                "config.missing_key",
                f"the option '{name}' is required",
                where=f"option {name}",
                suggestion=_REQUIRED[name],
            )


def _validated(model: type[Model], data: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise _invalid(str(first["loc"][-1]), first["msg"]) from None


def _invalid(name: str, why: str) -> ConfigError:
    return ConfigError(
        "config.invalid_value",
        f"option {name}: {why}",
        where=f"option {name}",
        suggestion="correct the option",
    )
