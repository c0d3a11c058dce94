"""Configuration: the keys of `eventpub.toml`, their meaning, defaults and limits.

The models are plain, immutable values: a package takes its own section and knows nothing of files
or environment variables, which `eventpub.settings` reads. The text below a key is its meaning: in
docs/configuration.md, and in the refusal of a value. Durations are whole microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from eventpub import config_values as form
from eventpub.errors import ConfigError
from eventpub.times import format_duration, format_time, parse_time

__all__ = ["Config", "contradictions", "format_duration", "format_time", "parse_time"]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        regex_engine="python-re",
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _has_no_nul(cls, value: Any) -> Any:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("text without the character NUL")
        return value


class App(Section):
    id: form.AppId
    """name of this publisher, 1 to 200 of A-Z a-z 0-9 . _ -: the ce_source of its records and part
    of its transactional ids; never run two with one name"""
    state_dir: form.Folder = Path("./state")
    """folder of the index and the position, kept between runs"""


class Run(Section):
    engine: Literal["spark", "threads"] = "spark"
    """what publishes: 'spark' (Structured Streaming) or 'threads' (one process without Java)"""
    shards: form.Whole = Field(2, ge=1, le=1024)
    """number of parts into which aggregates are split and published in parallel; at most
    the topic's partitions"""
    trigger: form.Micros = Field(100_000, ge=10_000)
    """shortest time between two polls of the database; a longer one makes fewer, larger
    transactions"""


class Columns(Section):
    id: form.Column = "id"
    """a unique ascending number; '' if the table has none"""
    aggregate_id: form.KeyColumns = ("aggregate_id",)
    """text, compared as bytes, a whole number, or BINARY(16), read as a UUID; for several columns a
    list, such as ["aggregate_type", "aggregate_id"]: the key is their values joined by | (in each,
    % becomes %25 and | becomes %7C)"""
    version: form.Name = "version"
    """1, 2, 3, … within the aggregate"""
    event_type: form.Name = "event_type"
    """the header ce_type"""
    payload: form.Name = "payload"
    """the record's value, byte for byte"""
    metadata: form.Column = "metadata"
    """a flat JSON object, published as headers; anything else is one header `metadata`, byte for
    byte; '' if the table has none"""
    create_time: form.Name = "create_time"
    """TIMESTAMP or DATETIME, set by the database when the row is inserted"""


class Store(Section):
    url: form.StoreUrl
    """mysql+pymysql://user@host:3306/database, with special characters percent-encoded (%40
    for @)"""
    password: form.Secret | None = None
    """the account's password; wins over one in store.url from the same source"""
    password_file: form.File = None
    """a file that holds the password, instead; read for each connection"""
    table: form.Name = "events"
    """the event table, in the database of store.url"""
    first_version: form.Whole = Field(1, ge=0, le=1)
    """version of an aggregate's first event; 0 in Axon's tables"""
    time_zone: form.Zone = "auto"
    """zone of DATETIME: auto (the server's; UTC for UTC_TIMESTAMP), IANA name or offset (+02:00)"""
    connect_timeout: form.Micros = Field(5_000_000, ge=1_000_000, le=3_600_000_000)
    """longest wait for a connection; 1s to 1h"""
    allow_replica: bool = False
    """read from a replica: rows that it applies more than recount.horizon after their create_time
    may be lost, and the primary's open transactions are not seen"""
    takes_all_writes: bool = False
    """your promise that every writer of the event table uses the server in url although others
    accept writes, too (Galera, multi-primary replication); eventpub cannot check it"""
    without_identity: Literal["stop", "skip"] = "stop"
    """rows whose aggregate_id or version is NULL: 'stop' with the error store.row_invalid, or
    'skip': count them; they are neither on the topic nor dead letters"""
    columns: Columns = Columns()

    @property
    def full_table(self) -> str:
        """The table with its database, wherever that runs."""
        database = unquote(urlsplit(self.url.get_secret_value()).path).lstrip("/")
        return f"{database}.{self.table}"

    @property
    def key(self) -> str:
        """The columns that tell aggregates apart, in a state's identity; one may be renamed."""
        columns = self.columns.aggregate_id
        return " and ".join(columns) if len(columns) > 1 else "one column"


class Read(Section):
    start: form.Start = "beginning"
    """events created up to this are not published: 'beginning' (publish all), 'now', or an RFC 3339
    time with its zone; decided at the first start and kept in app.state_dir"""
    delay: form.Micros = 1_000_000
    """age at which events are read: the boundary is the database's clock minus delay"""
    page_rows: form.Whole = Field(50_000, ge=1, le=10_000_000)
    """most rows read at once"""
    watermark: Literal["auto", "off"] = "auto"
    """auto: the boundary waits for open transactions, too, if the account may see them
    (PROCESS); off: never"""
    max_wait: form.Micros = 1_000_000
    """longest wait of the boundary for an open transaction; the recount finds later commits"""


class Gaps(Section):
    policy: Literal["hold_aggregate", "hold_shard"] = "hold_aggregate"
    """what waits for a missing version: its aggregate, or its whole shard, which stays in order"""
    max_backoff: form.Whole = Field(8, ge=1, le=30)
    """attempts before a missing version is skipped; 8 with backoff_base = '250ms' take 63.75 s"""
    backoff_base: form.Micros = Field(250_000, le=3_600_000_000)
    """wait before the first attempt after the gap was seen; doubles each time"""
    late: Literal["publish", "divert", "drop"] = "publish"
    """an event that appears after its version was skipped: publish it with the header
    eventpub_late, divert it to <topic>.late, or drop it"""

    @property
    def longest_wait(self) -> int:
        """Between two attempts, µs."""
        return self.backoff_base << (self.max_backoff - 1)


class Recount(Section):
    horizon: form.Micros = Field(300_000_000, le=86_400_000_000, multiple_of=1_000_000)
    """age up to which the rows of each second of create_time are counted again, to find events
    that committed late and that no later version points to; whole seconds, 0 = off"""
    rows_in_past: Literal["stop", "count"] = "stop"
    """rows that keep being inserted with a create_time older than recount.horizon (another time
    zone, an import): 'stop' with the error store.rows_in_past, or 'count' them again and publish"""


class Sink(Section):
    topic: form.Topic
    """topic of the events, 1 to 240 of A-Z a-z 0-9 . _ -, without other writers"""
    bootstrap_servers: form.Servers = "127.0.0.1:9092"
    """brokers, host:port, comma-separated; a port from 1 to 65535, by default 9092"""
    kind: Literal["kafka"] = "kafka"
    """where the events are published"""
    delivery: Literal["exactly_once", "at_least_once", "at_most_once"] = "exactly_once"
    """what a crash may do: exactly_once: nothing is lost or repeated; at_least_once: events may be
    repeated; at_most_once: events may be lost"""
    create_topics: bool = True
    """create missing topics, if the account may"""
    partitions: form.Whole = Field(8, ge=1, le=4096)
    """number of partitions of a topic that eventpub creates"""
    replication_factor: form.Whole = Field(-1, ge=-1, le=32_767)
    """replication factor of a topic that eventpub creates; -1 = the broker's default"""
    transaction_timeout: form.Micros = Field(60_000_000, ge=1_000_000, le=900_000_000)
    """the broker aborts a transaction that stays open for longer; 1s to 15m"""
    dead_limit: form.Whole = Field(100, ge=1, le=1_000_000_000)
    """most dead letters in a row; one more stops the publisher"""
    accept_topic_id: str = ""
    """Kafka's id (`eventpub doctor` shows it) of a recreated or another topic, in which only what
    was not published before is published"""
    properties: form.Properties = Field(default_factory=dict, repr=False)
    """properties of librdkafka; `NAME.file` names a file that holds the value of `NAME`"""
    token_provider: form.Function = None
    """for OAUTHBEARER: `package.module:function`, called with sasl.oauthbearer.config; returns a
    token and when it expires, in seconds since 1970"""

    @property
    def gaps_topic(self) -> str:
        return f"{self.topic}.gaps"

    @property
    def dead_topic(self) -> str:
        return f"{self.topic}.dead"

    @property
    def late_topic(self) -> str:
        return f"{self.topic}.late"

    @property
    def topics(self) -> tuple[str, str, str, str]:
        return self.topic, self.gaps_topic, self.dead_topic, self.late_topic


class Spark(Section):
    master: form.Master = "local[*]"
    """Spark's master: 'local[*]' or 'local[N]', with at least as many slots as there are shards,
    'local-cluster[…]', 'spark://host:port', 'k8s://…' or 'yarn'"""
    trigger: form.Micros = Field(600_000, ge=10_000)
    """shortest time from the start of one micro-batch to the next; run.trigger if that is longer,
    or set and this is not"""
    properties: form.Properties = Field(default_factory=dict, repr=False)
    """properties of Spark"""


class State(Section):
    location: form.Location = ""
    """location that all executors share: a folder, or s3://…, gs://…, az://… or abfss://…; '' = in
    app.state_dir (one machine)"""
    snapshot_every: form.Micros = Field(300_000_000, ge=1_000_000)
    """time between two snapshots of a shard's index there"""


class Ops(Section):
    http: form.HttpAddress = "127.0.0.1:8077"
    """address:port of metrics, health and dashboard, such as 127.0.0.1:8077; '' = off"""
    token: form.Token | None = None
    """secret required to pause, resume, retry and skip on the dashboard, 16 or more printable ASCII
    characters (openssl rand -hex 16); unset = the dashboard is read-only"""
    token_file: form.File = None
    """a file that holds the token, instead"""
    log: Literal["auto", "text", "json"] = "auto"
    """form of the log on stderr; auto = text on a terminal, json otherwise"""


class Config(Section):
    app: App
    run: Run = Run()
    store: Store
    read: Read = Read()
    gaps: Gaps = Gaps()
    recount: Recount = Recount()
    sink: Sink
    spark: Spark = Spark()
    state: State = State()
    ops: Ops = Ops()

    @property
    def batch_trigger(self) -> int:
        """Of Spark's micro-batches, µs."""
        run, spark = self.run, self.spark
        is_set = [("trigger" in section.model_fields_set) for section in (run, spark)]
        return run.trigger if is_set == [True, False] else max(run.trigger, spark.trigger)


def refused_properties(
    section: str, properties: Mapping[str, str], delivery: str
) -> Iterator[ConfigError]:
    """Those of librdkafka or Spark that would break what `sink.delivery` promises."""
    for name, value in properties.items():
        allowed, words = form.ALLOWED_VALUES.get(name, (".*", ""))
        is_free = delivery == "at_most_once"
        is_free |= delivery == "at_least_once" and name == "log.connection.close"
        why = f"it must be {words}"
        if section == "spark" and not name.startswith("spark."):
            why = "Spark ignores names that do not begin with spark."
        elif name in form.PROTECTED_PROPERTIES:
            keys = "see [sink] and [spark] for keys that replace it"
            why = f"eventpub sets or does not use it; {keys}"
        elif is_free or re.fullmatch(allowed, value.strip().lower(), re.DOTALL):
            continue
        yield ConfigError(
            "config.contradiction",
            f"{name} cannot be set like this: {why}",
            where=f"{section}.properties.{name}",
            suggestion=f"remove {name} from [{section}.properties]",
        )


def contradictions(config: Config) -> Iterator[ConfigError]:
    """Values that are right alone and wrong together."""
    sink = config.sink
    yield from refused_properties("sink", sink.properties, sink.delivery)
    yield from refused_properties("spark", config.spark.properties, sink.delivery)
    if config.run.engine == "spark" and sink.delivery != "exactly_once":
        yield ConfigError(
            "config.contradiction",
            f'sink.delivery = "{sink.delivery}" is only for run.engine = "threads"',
            where="sink.delivery",
            suggestion='remove sink.delivery, or set run.engine = "threads"',
        )
    if not config.recount.horizon and config.recount.rows_in_past == "count":
        yield ConfigError(
            "config.contradiction",
            'recount.rows_in_past = "count" finds nothing where recount.horizon is "0"',
            where="recount.rows_in_past",
            suggestion='set recount.horizon to a duration, such as "5m", or remove'
            " recount.rows_in_past",
        )
    given = {name: value.upper() for name, value in sink.properties.items()}
    of_library = given.get("sasl.oauthbearer.method") == "OIDC"
    of_library = of_library or given.get("enable.sasl.oauthbearer.unsecure.jwt") == "TRUE"
    is_asked = "OAUTHBEARER" in {given.get("sasl.mechanism"), given.get("sasl.mechanisms")}
    has_provider = sink.token_provider is not None
    if is_asked != has_provider and not (is_asked and of_library):
        yield ConfigError(
            "config.contradiction",
            "sasl.mechanism is OAUTHBEARER, and neither sink.token_provider nor"
            " sasl.oauthbearer.method = oidc is set"
            if is_asked
            else "sink.token_provider is set, and sasl.mechanism is not OAUTHBEARER",
            where="sink.token_provider",
            suggestion='set "sasl.mechanism" = "OAUTHBEARER" in [sink.properties], and'
            " sink.token_provider or sasl.oauthbearer.method = oidc; or none of them",
        )
