"""Configuration: what the keys of `eventpub.toml` mean, their defaults and their limits.

The models here are plain, immutable values: every package takes its own section and knows nothing
of files or environment variables. Durations are whole microseconds inside (`Micros`).
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

_ONLY_OWN_KEY = "it has a key of its own in [sink]"
_JOINS_NO_GROUP = "eventpub joins no group"
_IS_NO_TEXT = "it is no property of librdkafka, but an argument of its Python client"
_LOG_IS_WATCHED = "the client's log is watched for lost answers of the transaction coordinator"

PROTECTED_PROPERTIES: dict[str, str] = {
    "bootstrap.servers": _ONLY_OWN_KEY,
    "metadata.broker.list": _ONLY_OWN_KEY,
    "transaction.timeout.ms": _ONLY_OWN_KEY,
    "transactional.id": "it is made of app.id and the shard's number, so that a newer owner fences",
    "enable.gapless.guarantee": "transactions give it",
    "partitioner": "the partition is CRC32 of the aggregate's id",
    "delivery.report.only.error": "delivery reports are counted before each commit",
    "isolation.level": "what is read back must be committed",
    "group.id": _JOINS_NO_GROUP,
    "enable.auto.commit": _JOINS_NO_GROUP,
    "enable.auto.offset.store": _JOINS_NO_GROUP,
    "enable.partition.eof": "reading back ends by it",
    "auto.offset.reset": "an offset that is gone must be reported, not skipped",
    "default.topic.config": _IS_NO_TEXT,
    "error_cb": _IS_NO_TEXT,
    "logger": _IS_NO_TEXT,
    "oauth_cb": _IS_NO_TEXT,
    "on_commit": _IS_NO_TEXT,
    "on_delivery": _IS_NO_TEXT,
    "stats_cb": _IS_NO_TEXT,
    "throttle_cb": _IS_NO_TEXT,
    "log.queue": _LOG_IS_WATCHED,
    "log_level": _LOG_IS_WATCHED,
}
"""Names that `[sink.properties]` may not set, each with the reason."""


def refused_property(name: str, value: str, delivery: str) -> str | None:  # noqa: PLR0911 (one case a fault)
    """Why a property of `[sink.properties]` would break what `sink.delivery` promises, or None."""
    text = value.strip().lower()
    if name in PROTECTED_PROPERTIES:
        return PROTECTED_PROPERTIES[name]
    if delivery == "at_most_once":
        return None
    match name:
        case "enable.idempotence" if text != "true":
            return "without it a retry repeats or reorders records"
        case "acks" | "request.required.acks" if text not in {"all", "-1"}:
            return "only acks=all survives the loss of a broker"
        case "max.in.flight" | "max.in.flight.requests.per.connection":
            if not (text.isdigit() and 1 <= int(text) <= 5):
                return "more than 5 requests in flight lose the order of an idempotent producer"
        case "retries" | "message.send.max.retries" if text == "0":
            return "without retries a broker's restart loses records"
        case "log.connection.close" if text != "true" and delivery == "exactly_once":
            return _LOG_IS_WATCHED
        case _:
            pass
    return None


_OF_SPARK: dict[str, str] = {
    "spark.master": "it has a key of its own, spark.master",
    "spark.python.daemon.module": "eventpub's own starts the processes of the shards",
    "spark.task.maxFailures": "eventpub starts a shard again that was lost",
}


def refused_spark_property(name: str, value: str) -> str | None:
    """Why a property of `[spark.properties]` cannot be set, or None."""
    if name == "spark.submit.deployMode" and value.strip().lower() != "client":
        return "the publisher's own process is Spark's driver"
    if not name.startswith("spark."):
        return "Spark ignores names that do not begin with spark."
    return _OF_SPARK.get(name)


_UNITS = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}


_DURATION = "a number and a unit (us, ms, s, m, h or d), such as '250ms' or '1.5s'; at most 365d"
_LONGEST = 365 * _UNITS["d"]


def parse_duration(value: Any) -> int:
    """Microseconds of a duration such as ``"250ms"``, ``"1.5s"``, ``"5m"`` or ``"7d"``.

    A bare zero needs no unit; any other bare number is refused, since its unit would be a guess.
    """
    if isinstance(value, bool):
        raise ValueError(_DURATION)
    text = str(value).strip()
    if text in {"0", "0.0"}:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)", text)
    micros = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not match or micros > _LONGEST:
        raise ValueError(_DURATION)
    return round(micros)


def format_duration(micros: int) -> str:
    """A duration as the configuration would write it, in the largest whole unit."""
    for unit in ("d", "h", "m", "s", "ms", "us"):
        if micros and micros % _UNITS[unit] == 0:
            return f"{micros // _UNITS[unit]}{unit}"
    return "0"


_RFC_3339 = re.compile(
    r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(?:\.\d{1,6})?(?:[Zz]|[+-]\d{2}:\d{2})"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_time(value: Any) -> int:
    """UTC microseconds since 1970 of an RFC 3339 time; the zone is required.

    Raises:
        ValueError: it is no such time.
    """
    text = value.isoformat() if isinstance(value, datetime) else str(value).strip()
    form = "an RFC 3339 time with its zone, such as 2026-01-31T09:30:00Z"
    if not _RFC_3339.fullmatch(text):
        raise ValueError(form)
    try:
        # in UTC it must be a time of the years 1 to 9999, too
        time = datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(form) from None
    return (time - _EPOCH) // timedelta(microseconds=1)


def format_time(micros: int) -> str:
    """RFC 3339, UTC, six decimals: ``2026-01-31T09:30:00.000000Z``."""
    text = (_EPOCH + timedelta(microseconds=micros)).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")


SECRET_NAME = (
    r"passw|passphrase|secret|token|credential|private|access\.?key|\.key\.pem|"
    r"oauthbearer\.config|jaas"
)
"""Is found in the names of properties whose values are secret; a regular expression, case
ignored, of Python and of Java."""


FILE_SUFFIX = ".file"
"""`NAME.file` in `[sink.properties]` names the file that holds the value of `NAME`."""
_OF_NO_SECRET = (".location", ".url", FILE_SUFFIX)


def is_secret_property(name: str) -> bool:
    """Whether the value of a librdkafka or Spark property must never be shown."""
    found = re.search(SECRET_NAME, name, re.IGNORECASE)
    return found is not None and not name.endswith(_OF_NO_SECRET)


def _property_text(value: Any) -> Any:
    """Properties are text; a TOML number or boolean is what its text would be."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


Micros = Annotated[int, BeforeValidator(parse_duration)]
"""A duration: text with a unit in the configuration, whole microseconds inside."""

Properties = dict[str, Annotated[str, BeforeValidator(_property_text)]]
"""Handed to a library as they are."""


def _contradiction(key: str, message: str, suggestion: str) -> NoReturn:
    raise PydanticCustomError(
        "contradiction", "{message}", {"key": key, "message": message, "suggestion": suggestion}
    )


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what the library takes and nobody means; an optional file of no name is none."""
        field = cls.model_fields[str(info.field_name)]
        kinds = get_args(field.annotation) or (field.annotation,)
        is_number = not any(isinstance(m, BeforeValidator) for m in field.metadata)
        if isinstance(value, bool) and int in kinds and is_number:
            raise ValueError("a whole number")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("text without the character NUL")
        if Path in kinds and value == "":
            if NoneType not in kinds:
                raise ValueError("the path of a folder; '.' for the current one")
            return None
        return value


def _is_app_id(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", value):
        raise ValueError(
            "1 to 200 of A-Z a-z 0-9 . _ - (it becomes part of transactional ids and file names)"
        )
    return value


def _is_topic(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,240}", value) or value in {".", ".."}:
        raise ValueError("1 to 240 of A-Z a-z 0-9 . _ -")
    return value


def _is_url(value: SecretStr) -> SecretStr:
    form = "mysql+pymysql://user@host:3306/database"
    try:
        url = urlsplit(value.get_secret_value())
        port_is_fine = url.port is None or url.port > 0
    except ValueError:
        raise ValueError(f"a URL such as {form}; quote special characters (%40 for @)") from None
    if url.scheme not in {"mysql+pymysql", "mariadb+pymysql"}:
        raise ValueError(f"a URL that begins with mysql+pymysql://, such as {form}")
    if not (url.hostname and port_is_fine and url.path.strip("/")) or url.fragment:
        raise ValueError(f"a URL with host and database, such as {form}")
    return value


def _is_start(value: Any) -> str:
    """`beginning`, `now`, or the time in one form, so that equal times are equal text."""
    if isinstance(value, str) and value in {"beginning", "now"}:
        return value
    try:
        return format_time(parse_time(value))
    except ValueError as e:
        raise ValueError(f"'beginning', 'now', or {e}") from None


def _is_zone(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"[+-](0\d|1[0-4]):[0-5]\d", value):
        try:
            ZoneInfo(value)
        except (ValueError, OSError, LookupError):
            raise ValueError(
                "'auto', an offset such as +02:00, or a zone's IANA name such as Europe/Paris"
            ) from None
    return value


def _is_http(value: str) -> str:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]*):(\d{1,5})", value)
    if value and not (match and int(match[2]) <= 65_535):
        raise ValueError("'' (off), or address:port such as 127.0.0.1:8077")
    return value


def is_token(text: str) -> bool:
    """Whether it can be `ops.token`: hard to guess, and an HTTP header can carry it."""
    return len(text) >= 16 and text.isascii() and text.isprintable() and text == text.strip()


def _is_token(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not is_token(value.get_secret_value()):
        raise PydanticCustomError(
            "token", "ops.token has fewer than 16 characters, or no header can carry it"
        )
    return value


def _is_function(value: str | None) -> str | None:
    if value and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", value):
        raise ValueError("package.module:function")
    return value or None


_SERVER = re.compile(
    r"(?:(?:PLAINTEXT|SSL|SASL_PLAINTEXT|SASL_SSL)://)?(\[[0-9a-fA-F:.]+\]|[^\s:/,\[\]]+)(?::(\d{1,5}))?",
    re.IGNORECASE,
)


def _is_servers(value: str) -> str:
    parts = [p.strip() for p in value.split(",")]
    found = [_SERVER.fullmatch(p) for p in parts]
    if not all(m and (m[2] is None or 1 <= int(m[2]) <= 65_535) for m in found):
        raise ValueError(
            "host:port, several with commas between; a port from 1 to 65535, without one 9092"
        )
    return ",".join(parts)


def _is_kind(value: Any) -> Any:
    if value in ("sql", "files"):
        raise ValueError(f"'kafka': '{value}' is not built yet")
    return value


_MASTER = re.compile(
    r"none|yarn|local(\[(\*|[1-9]\d{0,3})(\s*,\s*\d+)?\])?|local-cluster\[[\s\d,]+\]"
    r"|spark://[^\s/,]+:\d{1,5}(,[^\s/,]+:\d{1,5})*|(?!spark:)[a-z][a-z0-9+.-]*://\S+"
)
"""What Spark itself reads in detail; a name is a typing error."""


def _is_master(value: str) -> str:
    if value and not _MASTER.fullmatch(value):
        raise ValueError(
            "'none', 'local[*]', 'local[N]', 'local-cluster[…]', 'spark://host:port',"
            " 'k8s://…' or 'yarn'"
        )
    return value


PLACES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
"""Schemes of URIs that copies of the index can be kept at: pyarrow's file systems."""


def _is_place(value: str) -> str:
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?(.*)", value, re.DOTALL)
    if scheme and not (scheme[1] in PLACES and scheme[2] and scheme[3].strip("/")):
        also = "; for s3a:// write s3://" if scheme[1] in {"s3a", "s3n"} else ""
        raise ValueError(
            "'' (none), a folder, or a URI of "
            + ", ".join(f"{known}://" for known in PLACES)
            + f" with what follows it{also}"
        )
    return value


_HOST = re.compile(
    r"[\w.-]+|\[[0-9a-fA-F:.]+\]|[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(%\w+)?", re.ASCII
)


def _is_host(value: str) -> str:
    if value and not _HOST.fullmatch(value):
        raise ValueError("a host's name or address, without a port; '' for the default")
    return value


def _is_unbounded(value: str) -> str:
    if value:
        raise ValueError(
            "'': a limit is not supported; the index keeps all that tells a new event from one"
            " that was published"
        )
    return value


AppId = Annotated[str, AfterValidator(_is_app_id)]


def _names(value: Any) -> Any:
    """A list; in the environment and in flags, text with commas between, or JSON."""
    if not isinstance(value, str):
        return value
    if value.startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError('names with commas between, or a list such as ["a", "b"]') from None
    return [name.strip() for name in value.split(",") if name.strip()]


class App(_Section):
    """`[app]`"""

    id: AppId = Field(
        description="name of this publisher: the ce_source of its records and a part of its"
        " transactional ids; only one publisher of a name may run; when you change it, add the old"
        " one to former_ids"
    )
    former_ids: Annotated[tuple[AppId, ...], BeforeValidator(_names)] = Field(
        (),
        description="former values of app.id: records on the topic with these as ce_source count as"
        " this publisher's own",
    )
    state_dir: Path = Field(
        Path("./state"),
        description="folder of the index and the position, kept between runs",
    )


class Columns(_Section):
    """`[store.columns]`: the table's name of each column; only those that differ."""

    id: str | None = Field("id", description="a unique ascending number; '' if the table has none")
    aggregate_id: str = Field("aggregate_id", min_length=1, description="text, compared as bytes")
    version: str = Field("version", min_length=1, description="1, 2, 3, … within the aggregate")
    event_type: str = Field("event_type", min_length=1, description="the header ce_type")
    payload: str = Field("payload", min_length=1, description="the record's value, byte for byte")
    metadata: str | None = Field(
        "metadata", description="a flat JSON object, published as headers; '' if the table has none"
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


class Store(_Section):
    """`[store]`"""

    url: Annotated[SecretStr, AfterValidator(_is_url)] = Field(
        description="mysql+pymysql://user@host:3306/database"
    )
    password: SecretStr | None = Field(
        None, description="the account's password; wins over one in store.url"
    )
    password_file: Path | None = Field(None, description="a file that holds the password, instead")
    table: str = Field(
        "events", min_length=1, description="the event table, in the database of store.url"
    )
    first_version: int = Field(
        1, ge=0, le=1, description="version of an aggregate's first event; 0 in Axon's tables"
    )
    time_zone: Annotated[str, AfterValidator(_is_zone)] = Field(
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
    columns: Columns = Columns()

    @model_validator(mode="after")
    def _one_password(self) -> Store:
        if self.password is not None and self.password_file is not None:
            _contradiction(
                "store.password_file",
                "both store.password and store.password_file are set",
                "keep one of the two",
            )
        return self


class Read(_Section):
    """`[read]`"""

    start: Annotated[str, BeforeValidator(_is_start)] = Field(
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


class Gaps(_Section):
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
    backtrack: bool = Field(
        True, description="look missing versions up by key; false loses events, for the bench only"
    )

    @property
    def longest_wait(self) -> int:
        """Between two attempts, µs."""
        return self.backoff_base << (self.max_backoff - 1)


class Recount(_Section):
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


class Sink(_Section):
    """`[sink]`"""

    topic: Annotated[str, AfterValidator(_is_topic)] = Field(
        description="topic of the events; its side topics are <topic>.gaps, .dead and .late"
    )
    bootstrap_servers: Annotated[str, AfterValidator(_is_servers)] = Field(
        "127.0.0.1:9092",
        description="brokers, host:port, several with commas between; without a port, 9092",
    )
    kind: Annotated[Literal["kafka"], BeforeValidator(_is_kind)] = Field(
        "kafka", description="where the events are published"
    )
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
    ignored_sources: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (),
        description="ce_source of other producers that may write to the topic: their records are"
        " ignored, instead of the error sink.other_publisher",
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

    token_provider: Annotated[str | None, AfterValidator(_is_function)] = Field(
        None,
        description="for SASL/OAUTHBEARER: `package.module:function`, called with"
        " sasl.oauthbearer.config; returns a token and when it expires, in seconds since 1970",
    )

    @model_validator(mode="after")
    def _tokens_come_from_somewhere(self) -> Sink:
        given = self.properties
        mechanism = given.get("sasl.mechanism") or given.get("sasl.mechanisms") or ""
        if mechanism.upper() != "OAUTHBEARER":
            if self.token_provider is not None:
                _contradiction(
                    "sink.token_provider",
                    "sink.token_provider is set, and sasl.mechanism is not OAUTHBEARER",
                    'set "sasl.mechanism" = "OAUTHBEARER" in [sink.properties], or remove it',
                )
        elif (
            self.token_provider is None
            and given.get("sasl.oauthbearer.method", "").lower() != "oidc"
            and given.get("enable.sasl.oauthbearer.unsecure.jwt", "").lower() != "true"
        ):
            _contradiction(
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


class Spark(_Section):
    """`[spark]`"""

    master: Annotated[str, AfterValidator(_is_master)] = Field(
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


class Index(_Section):
    """`[index]`: what a shard knows of each aggregate, on the disk of its machine."""

    max_bytes: Annotated[str, AfterValidator(_is_unbounded)] = Field(
        "", description="largest size of the index; '' = unbounded, the only value so far"
    )


class State(_Section):
    """`[state]`: copies of the indexes, for a shard that moves to another machine."""

    snapshots: Annotated[str, AfterValidator(_is_place)] = Field(
        "",
        description="folder or URI (s3://…, gs://…, hdfs://…, abfs://…) that all machines of a"
        " cluster reach; '' = none are kept, and a machine that is new to a shard reads the whole"
        " topic back",
    )
    snapshot_every: Annotated[Micros, Field(ge=1_000_000)] = Field(
        300_000_000, description="time between two copies of a shard's index"
    )


class Channel(_Section):
    """`[channel]`: between the coordinator and the shards on a cluster's machines."""

    host: Annotated[str, AfterValidator(_is_host)] = Field(
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
            _contradiction(
                f"channel.{missing}",
                "one of channel.certificate_file and channel.key_file is set without the other",
                f"set channel.{missing}, too; without both there is no TLS",
            )
        return self


class Ops(_Section):
    """`[ops]`"""

    http: Annotated[str, AfterValidator(_is_http)] = Field(
        "127.0.0.1:8077",
        description="address of metrics, health and dashboard; '' = off",
    )
    token: Annotated[SecretStr | None, AfterValidator(_is_token)] = Field(
        None,
        description="secret with which one may pause, resume, retry and skip on the dashboard; at"
        " least 16 characters; unset = nobody may",
    )
    token_file: Path | None = Field(None, description="a file that holds the token, instead")
    log: Literal["auto", "text", "json"] = Field(
        "auto", description="form of the log on stderr; auto = text on a terminal, json otherwise"
    )

    traces: bool = Field(
        False,
        description="send a span of each transaction to an OpenTelemetry collector, which the"
        " variables OTEL_… of the environment name; needs the extra 'traces'",
    )

    @model_validator(mode="after")
    def _one_token(self) -> Ops:
        if self.token is not None and self.token_file is not None:
            _contradiction(
                "ops.token_file",
                "both ops.token and ops.token_file are set",
                "keep one of the two",
            )
        return self


class Config(_Section):
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

    @model_validator(mode="after")
    def _shards_have_partitions(self) -> Config:
        # an existing topic may have more partitions than the default of one to be created
        stated = "partitions" in self.sink.model_fields_set
        if stated and self.spark.shards > self.sink.partitions:
            _contradiction(
                "spark.shards",
                f"{self.spark.shards} shards cannot share {self.sink.partitions} partitions",
                f"set spark.shards to at most {self.sink.partitions}, or raise sink.partitions",
            )
        return self
