"""Configuration: what the keys of `eventpub.toml` mean, their defaults and their limits.

The models here are plain, immutable values: every package takes its own section and knows nothing
of files or environment variables. Durations are whole microseconds inside (`Micros`). The form of a
single value is in `eventpub.config_values`, what a property may be in `eventpub.properties`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from eventpub.config_values import (
    AppId,
    AppIds,
    Function,
    Host,
    HttpAddress,
    KeyColumns,
    Master,
    Micros,
    Properties,
    Section,
    Servers,
    SnapshotPlace,
    Start,
    StoreUrl,
    Token,
    Topic,
    Zone,
    contradiction,
    refuse_both,
)
from eventpub.times import format_duration, format_time, parse_time

__all__ = [
    "App",
    "Channel",
    "Columns",
    "Config",
    "Gaps",
    "Index",
    "Ops",
    "Read",
    "Recount",
    "Sink",
    "Spark",
    "State",
    "Store",
    "format_duration",
    "format_time",
    "parse_time",
]


class App(Section):
    """`[app]`"""

    id: AppId = Field(
        description="name of this publisher: the ce_source of its records and a part of its"
        " transactional ids; only one publisher of a name may run; when you change it, add the old"
        " one to former_ids"
    )
    former_ids: AppIds = Field(
        (),
        description="former values of app.id: records on the topic with these as ce_source count as"
        " this publisher's own",
    )
    state_dir: Path = Field(
        Path("./state"),
        description="folder of the index and the position, kept between runs",
    )


class Columns(Section):
    """`[store.columns]`: the table's name of each column; only those that differ."""

    id: str | None = Field("id", description="a unique ascending number; '' if the table has none")
    aggregate_id: KeyColumns = Field(
        ("aggregate_id",),
        description="text, compared as bytes, a whole number, or BINARY(16), read as a UUID; where"
        ' several columns say it a list, such as ["aggregate_type", "aggregate_id"]: the key is'
        " their values joined by | (in each, % becomes %25 and | becomes %7C)",
    )
    version: str = Field("version", min_length=1, description="1, 2, 3, … within the aggregate")
    event_type: str = Field("event_type", min_length=1, description="the header ce_type")
    payload: str = Field("payload", min_length=1, description="the record's value, byte for byte")
    metadata: str | None = Field(
        "metadata",
        description="a flat JSON object, published as headers; anything else is one header"
        " `metadata`, byte for byte; '' if the table has none",
    )
    create_time: str = Field(
        "create_time",
        min_length=1,
        description="TIMESTAMP or DATETIME, set by the database when the row is inserted",
    )

    @field_validator("id", "metadata")
    @classmethod
    def _empty_is_none(cls, value: str | None) -> str | None:
        return value or None


class Store(Section):
    """`[store]`"""

    url: StoreUrl = Field(description="mysql+pymysql://user@host:3306/database")
    password: SecretStr | None = Field(
        None,
        description="the account's password; wins over one in store.url from the same source",
    )
    password_file: Path | None = Field(
        None, description="a file that holds the password, instead; read for each connection"
    )
    table: str = Field(
        "events", min_length=1, description="the event table, in the database of store.url"
    )
    first_version: int = Field(
        1, ge=0, le=1, description="version of an aggregate's first event; 0 in Axon's tables"
    )
    time_zone: Zone = Field(
        "auto",
        description="zone of a DATETIME create_time: an IANA name or offset; auto = the server's",
    )
    connect_timeout: Micros = Field(
        5_000_000,
        ge=1_000_000,
        le=3_600_000_000,
        description="longest wait for a connection; 1s to 1h",
    )
    allow_replica: bool = Field(
        False,
        description="read from a replica although it may lose events: rows that it applies later"
        " than recount.horizon after their create_time may be lost, and the primary's open"
        " transactions are not seen",
    )
    takes_all_writes: bool = Field(
        False,
        description="your promise that every writer of the event table uses the server that url"
        " names, though others could take writes, too: Galera, a group in multi-primary mode, two"
        " servers that replicate each other; eventpub cannot check it",
    )
    without_identity: Literal["stop", "skip"] = Field(
        "stop",
        description="rows whose aggregate_id or version is NULL: 'stop' with the error"
        " store.row_invalid, or 'skip' them: they are counted and passed over, and appear neither"
        " on the topic nor among the dead letters",
    )
    columns: Columns = Columns()

    @property
    def full_table(self) -> str:
        """The table with its database, wherever that runs."""
        database = unquote(urlsplit(self.url.get_secret_value()).path).lstrip("/")
        return f"{database}.{self.table}"

    @model_validator(mode="after")
    def _one_password(self) -> Store:
        refuse_both("store.password", self.password, self.password_file)
        return self


class Read(Section):
    """`[read]`"""

    start: Start = Field(
        "beginning",
        description="events created up to this are not published: 'beginning' (publish all), 'now',"
        " or an RFC 3339 time; decided at the first start and kept in app.state_dir",
    )
    delay: Micros = Field(
        1_000_000,
        description="age at which events are read, so that transactions can commit first: the"
        " boundary is the database's clock minus delay",
    )
    page_rows: int = Field(50_000, ge=1, le=10_000_000, description="most rows read at once")
    watermark: Literal["auto", "off"] = Field(
        "auto",
        description="auto: the boundary also waits for open transactions, where the account may see"
        " them (PROCESS); off: read.delay alone",
    )
    max_wait: Micros = Field(
        1_000_000,
        description="longest wait of the boundary for an open transaction; the recount finds the"
        " events of a transaction that is open for longer, when it has committed",
    )


class Gaps(Section):
    """`[gaps]`"""

    policy: Literal["hold_aggregate", "hold_shard"] = Field(
        "hold_aggregate",
        description="what waits for a missing version: its aggregate, or its whole shard (keeps the"
        " order across the shard's aggregates)",
    )
    max_backoff: int = Field(
        8,
        ge=1,
        le=30,
        description="number of attempts (not a time) before a missing version is skipped; 8 with"
        " backoff_base = '250ms' take 63.75 s",
    )
    backoff_base: Micros = Field(
        250_000,
        le=3_600_000_000,
        description="wait before the first attempt after the gap was seen; doubles each time",
    )
    late: Literal["publish", "divert", "drop"] = Field(
        "publish",
        description="what to do with an event that appears after its version was skipped: publish"
        " it with the header eventpub_late, divert it to <topic>.late, or drop it",
    )

    @property
    def longest_wait(self) -> int:
        """Between two attempts, µs."""
        return self.backoff_base << (self.max_backoff - 1)


class Recount(Section):
    """`[recount]`"""

    horizon: Micros = Field(
        300_000_000,
        le=86_400_000_000,
        description="age up to which the rows of each bucket (one second of create_time) are"
        " counted again, to find events that committed late and that no later version points to;"
        " 0 = off",
    )
    rows_in_past: Literal["stop", "count"] = Field(
        "stop",
        description="what to do when rows keep being inserted with a create_time older than"
        " recount.horizon, because of another time zone or an import of old rows: 'stop' with the"
        " error store.rows_in_past, or 'count' the buckets of those that are seen again, which"
        " publishes them",
    )


class Sink(Section):
    """`[sink]`"""

    topic: Topic = Field(
        description="topic of the events; its side topics are <topic>.gaps, .dead and .late"
    )
    bootstrap_servers: Servers = Field(
        "127.0.0.1:9092",
        description="brokers, host:port, several with commas between; without a port, 9092",
    )
    kind: Literal["kafka"] = Field("kafka", description="where the events are published")
    delivery: Literal["exactly_once", "at_least_once", "at_most_once"] = Field(
        "exactly_once",
        description="what a crash may do: exactly_once: nothing is lost or repeated; at_least_once:"
        " events may be repeated; at_most_once: events may be lost",
    )
    create_topics: bool = Field(True, description="create missing topics, if the account may")
    partitions: int = Field(8, ge=1, le=4096, description="of a topic that eventpub creates")
    replication_factor: int = Field(
        -1,
        ge=-1,
        le=32_767,
        description="of a topic that eventpub creates; -1 = the broker's default",
    )
    transaction_timeout: Micros = Field(
        60_000_000,
        ge=1_000_000,
        le=900_000_000,
        description="the broker aborts a transaction that is open longer; 1s to 15m",
    )
    dead_limit: int = Field(
        100,
        ge=1,
        le=1_000_000_000,
        description="dead letters in a row that are allowed; at one more the publisher stops",
    )
    accept_topic_id: str = Field(
        "",
        description="Kafka's id of the topic to continue in, after it was deleted and created"
        " again or sink.topic was changed (`eventpub doctor` shows it): only what was not published"
        " before is published there",
    )
    properties: Properties = Field(
        default_factory=dict,
        repr=False,
        description="properties of librdkafka; `NAME.file` names a file that holds the value of"
        " `NAME`",
    )

    token_provider: Function = Field(
        None,
        description="for SASL/OAUTHBEARER: `package.module:function`, called with"
        " sasl.oauthbearer.config; returns a token and when it expires, in seconds since 1970",
    )

    @model_validator(mode="after")
    def _login_is_whole(self) -> Sink:
        given = self.properties
        mechanism = given.get("sasl.mechanism") or given.get("sasl.mechanisms") or ""
        if mechanism.upper() != "OAUTHBEARER":
            if self.token_provider is not None:
                contradiction(
                    "sink.token_provider",
                    "sink.token_provider is set, and sasl.mechanism is not OAUTHBEARER",
                    'set "sasl.mechanism" = "OAUTHBEARER" in [sink.properties], or remove it',
                )
            protocol = given.get("security.protocol", "")
            if protocol.upper().startswith("SASL_") and not mechanism:
                contradiction(
                    "sink.properties.security.protocol",
                    f"security.protocol is {protocol}, and sasl.mechanism is not set",
                    "set sasl.mechanism in [sink.properties] to one that the broker takes, such as"
                    " PLAIN or SCRAM-SHA-512",
                )
        elif (
            self.token_provider is None
            and given.get("sasl.oauthbearer.method", "").lower() != "oidc"
            and given.get("enable.sasl.oauthbearer.unsecure.jwt", "").lower() != "true"
        ):
            contradiction(
                "sink.token_provider",
                "sasl.mechanism is OAUTHBEARER, and nothing gives a token",
                "set sink.token_provider, or sasl.oauthbearer.method = oidc with the other"
                " sasl.oauthbearer.* in [sink.properties]",
            )
        return self

    @property
    def gaps_topic(self) -> str:
        """The topic of recorded skips."""
        return f"{self.topic}.gaps"

    @property
    def dead_topic(self) -> str:
        """The topic of refused rows."""
        return f"{self.topic}.dead"

    @property
    def topics(self) -> tuple[str, str, str, str]:
        """The topic and those beside it."""
        return self.topic, self.gaps_topic, self.dead_topic, self.late_topic

    @property
    def late_topic(self) -> str:
        """The topic of late events where `gaps.late` is "divert"."""
        return f"{self.topic}.late"


class Spark(Section):
    """`[spark]`"""

    master: Master = Field(
        "local[*]",
        min_length=1,
        description="Spark's master; `local[N]` gets at least as many slots as there are shards;"
        " 'none': no Spark and no Java, the shards are threads of the publisher's process: the"
        " recommended way on one machine, which `eventpub init` writes; the default is for those"
        " who have Spark, and is kept so that a configuration without this key stays what it was",
    )
    shards: int = Field(
        2,
        ge=1,
        le=1024,
        description="parts into which the aggregates are split, published in parallel; at most the"
        " topic's partitions (also with master = 'none')",
    )
    trigger: Annotated[Micros, Field(ge=10_000)] = Field(
        100_000,
        description="the database is polled twice in this time while events come; a longer time"
        " makes fewer and larger transactions (also with master = 'none')",
    )
    properties: Properties = Field(
        default_factory=dict, repr=False, description="properties of Spark"
    )


class Index(Section):
    """`[index]`: what a shard knows of each aggregate, on the disk of its machine."""

    max_bytes: Literal[""] = Field(
        "", description="largest size of the index; '' = unbounded, the only value so far"
    )


class State(Section):
    """`[state]`: copies of the indexes, for a shard that moves to another machine."""

    snapshots: SnapshotPlace = Field(
        "",
        description="folder or URI (s3://…, gs://…, hdfs://…, abfs://…) that all machines of a"
        " cluster reach; '' = none are kept, and a machine that is new to a shard reads the whole"
        " topic back",
    )
    snapshot_every: Annotated[Micros, Field(ge=1_000_000)] = Field(
        300_000_000, description="time between two copies of a shard's index"
    )


class Channel(Section):
    """`[channel]`: between the coordinator and the shards on a cluster's machines."""

    host: Host = Field(
        "",
        description="name or address by which executors reach this machine; '' = loopback where"
        " Spark is on this machine, else this machine's name",
    )
    port: int = Field(
        0, ge=0, le=65_535, description="port on which the publisher listens; 0 = any free one"
    )
    certificate_file: Path | None = Field(
        None, description="TLS: certificate of this machine, PEM; without it, no TLS"
    )
    key_file: Path | None = Field(None, description="TLS: its private key, PEM")
    ca_file: Path | None = Field(
        None, description="TLS: certificates that executors trust, PEM; '' = those of the system"
    )

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Channel:
        if (self.certificate_file is None) != (self.key_file is None):
            missing = "key_file" if self.key_file is None else "certificate_file"
            contradiction(
                f"channel.{missing}",
                "one of channel.certificate_file and channel.key_file is set without the other",
                f"set channel.{missing}, too; without both there is no TLS",
            )
        return self


class Ops(Section):
    """`[ops]`"""

    http: HttpAddress = Field(
        "127.0.0.1:8077",
        description="address of metrics, health and dashboard; '' = off",
    )
    token: Token = Field(
        None,
        description="secret with which one may pause, resume, retry and skip on the dashboard; at"
        " least 16 characters; unset = nobody may",
    )
    token_file: Path | None = Field(None, description="a file that holds the token, instead")
    log: Literal["auto", "text", "json"] = Field(
        "auto", description="form of the log on stderr; auto = text on a terminal, json otherwise"
    )

    @model_validator(mode="after")
    def _one_token(self) -> Ops:
        refuse_both("ops.token", self.token, self.token_file)
        return self


class Config(Section):
    """The whole of `eventpub.toml`."""

    app: App
    store: Store
    read: Read = Read()
    gaps: Gaps = Gaps()
    recount: Recount = Recount()
    sink: Sink
    spark: Spark = Spark()
    index: Index = Index()
    state: State = State()
    channel: Channel = Channel()
    ops: Ops = Ops()
