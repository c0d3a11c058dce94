"""Configuration: what the keys of `eventpub.toml` mean, their defaults and their limits.

The models here are plain, immutable values: every room takes its own section and knows nothing of
files or environment variables. Durations are whole microseconds inside (`Micros`).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

PROTECTED_PROPERTIES: frozenset[str] = frozenset(
    {
        "transactional.id",
        "transaction.timeout.ms",
        "enable.gapless.guarantee",
        "partitioner",
        "delivery.report.only.error",
        "isolation.level",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "auto.offset.reset",
        "group.id",
        "log.queue",
        "bootstrap.servers",
        "metadata.broker.list",
    }
)
"""Names that `[sink.properties]` may not set: guarantees stand on them, or they have own keys."""


def refused_property(name: str, value: str, delivery: str) -> str | None:
    """Why a property of `[sink.properties]` would break what `sink.delivery` promises, or None."""
    text = value.strip().lower()
    if name in PROTECTED_PROPERTIES:
        return "eventpub's guarantees stand on it, or it has a key of its own in [sink]"
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
        case _:
            pass
    return None


_UNITS = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}


_DURATION = "a number and a unit (us, ms, s, m, h or d), such as '250ms' or '1.5s'"


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
    if not match:
        raise ValueError(_DURATION)
    return round(float(match[1]) * _UNITS[match[2]])


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
    if not _RFC_3339.fullmatch(text):
        raise ValueError("an RFC 3339 time with its zone, such as 2026-01-31T09:30:00Z")
    return (datetime.fromisoformat(text.upper()) - _EPOCH) // timedelta(microseconds=1)


def format_time(micros: int) -> str:
    """RFC 3339, UTC, six decimals: ``2026-01-31T09:30:00.000000Z``."""
    text = (_EPOCH + timedelta(microseconds=micros)).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")


_SECRET_NAME = re.compile(
    r"passw|passphrase|secret|token|credential|private|access\.?key|\.key\.pem|"
    r"oauthbearer\.config|jaas",
    re.IGNORECASE,
)


def is_secret_property(name: str) -> bool:
    """Whether the value of a librdkafka or Spark property must never be shown."""
    return _SECRET_NAME.search(name) is not None and not name.endswith((".location", ".url"))


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


def _is_app_id(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", value):
        raise ValueError("1 to 200 of A-Z a-z 0-9 . _ - (it names topics' writers and files)")
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
    if value != "auto" and not re.fullmatch(r"[+-]\d{2}:\d{2}", value):
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


def _is_servers(value: str) -> str:
    parts = [p.strip() for p in value.split(",")]
    if not all(
        re.fullmatch(r"(?:[A-Za-z_]+://)?(\[[0-9a-fA-F:.]+\]|[^\s:/,]+)(:\d{1,5})?", p)
        for p in parts
    ):
        raise ValueError("host:port, several with commas between")
    return ",".join(parts)


class App(_Section):
    """`[app]`"""

    id: Annotated[str, AfterValidator(_is_app_id)] = Field(
        description="names this publisher: ce_source, transactional ids, state"
    )
    state_dir: Path = Field(
        Path("./state"),
        description="index and Spark checkpoint; while far behind, also rows on their way, at most"
        " four pages",
    )


class Columns(_Section):
    """`[store.columns]`: the table's name of each column; only those that differ."""

    id: str | None = Field("id", description="a unique ascending key; '' where the table has none")
    aggregate_id: str = Field("aggregate_id", min_length=1, description="text, compared as bytes")
    version: str = Field("version", min_length=1, description="1, 2, 3, … within the aggregate")
    event_type: str = Field("event_type", min_length=1, description="published as ce_type")
    payload: str = Field("payload", min_length=1, description="published byte for byte")
    metadata: str | None = Field(
        "metadata", description="a flat JSON object, published as headers; '' where there is none"
    )
    create_time: str = Field(
        "create_time", min_length=1, description="TIMESTAMP or DATETIME of the insert"
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
    password: SecretStr | None = Field(None, description="wins over one in the url")
    password_file: Path | None = Field(None, description="a file that holds the password")
    table: str = Field("events", min_length=1, description="the event table, in the url's database")
    first_version: int = Field(1, ge=0, le=1, description="of every aggregate; 0 in Axon's tables")
    time_zone: Annotated[str, AfterValidator(_is_zone)] = Field(
        "auto",
        description="of a DATETIME create_time: an IANA name or offset; auto = the server's",
    )
    connect_timeout: Micros = Field(
        5_000_000, ge=1_000_000, description="for the connection to be made; at least 1s"
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
        description="what counts as old already: 'beginning' (nothing), 'now', or an RFC 3339 time",
    )
    delay: Micros = Field(1_000_000, description="the dynamic boundary: database now − delay")
    page_rows: int = Field(50_000, ge=1, le=10_000_000, description="most rows of one window")
    watermark: Literal["auto", "off"] = Field(
        "auto", description="hold the boundary below open transactions where they can be seen"
    )
    max_wait: Micros = Field(
        1_000_000,
        description="a transaction that is open longer is passed by; recount finds its events",
    )


class Gaps(_Section):
    """`[gaps]`"""

    policy: Literal["hold_aggregate", "hold_shard"] = Field(
        "hold_aggregate", description="what waits for a missing version"
    )
    max_backoff: int = Field(8, ge=1, le=30, description="attempts before a skip")
    backoff_base: Micros = Field(250_000, description="wait before the first retry; doubles")
    late: Literal["publish", "divert", "drop"] = Field(
        "publish", description="an event that turns up after its gap was skipped"
    )
    backtrack: bool = Field(
        True, description="false loses events; it exists so that the bench can show it"
    )


class Recount(_Section):
    """`[recount]`"""

    horizon: Micros = Field(
        300_000_000,
        le=86_400_000_000,
        description="how late a commit may be and still be found without a later version; 0 = off",
    )


class Sink(_Section):
    """`[sink]`"""

    topic: Annotated[str, AfterValidator(_is_topic)] = Field(
        description="where the events go; <topic>.gaps, .dead and .late stand beside it"
    )
    bootstrap_servers: Annotated[str, AfterValidator(_is_servers)] = Field(
        "127.0.0.1:9092", description="brokers, host:port, several with commas between"
    )
    delivery: Literal["exactly_once", "at_least_once", "at_most_once"] = Field(
        "exactly_once", description="what a crash may do"
    )
    create_topics: bool = Field(True, description="create what is missing, where it may")
    partitions: int = Field(8, ge=1, le=4096, description="of a topic that it creates")
    replication_factor: int = Field(
        -1, ge=-1, le=32_767, description="of a topic that it creates; -1 = broker's"
    )
    transaction_timeout: Micros = Field(
        60_000_000,
        ge=1_000_000,
        le=900_000_000,
        description="the broker aborts a transaction that is open longer; 1s to 15m",
    )
    dead_limit: int = Field(
        100, ge=1, description="refused events in a row before the publisher stops and says why"
    )
    properties: Properties = Field(
        default_factory=dict, repr=False, description="passed to librdkafka as they are"
    )

    @property
    def gaps_topic(self) -> str:
        """The topic of recorded skips."""
        return f"{self.topic}.gaps"

    @property
    def dead_topic(self) -> str:
        """The topic of refused rows."""
        return f"{self.topic}.dead"

    @property
    def late_topic(self) -> str:
        """The topic of late events where `gaps.late` is "divert"."""
        return f"{self.topic}.late"


class Spark(_Section):
    """`[spark]`"""

    master: str = Field(
        "local[*]",
        min_length=1,
        description="where the job runs; `local[N]` runs at least as many tasks at a time as there"
        " are shards",
    )
    shards: int = Field(2, ge=1, le=1024, description="at most the topic's partitions")
    trigger: Micros = Field(100_000, description="shortest time between micro-batches")
    properties: Properties = Field(
        default_factory=dict, repr=False, description="passed to Spark as they are"
    )


class Ops(_Section):
    """`[ops]`"""

    http: Annotated[str, AfterValidator(_is_http)] = Field(
        "127.0.0.1:8077", description="address of metrics, health and dashboard; '' = off"
    )
    log: Literal["auto", "text", "json"] = Field(
        "auto", description="lines on stderr; auto = text on a terminal, json otherwise"
    )


class Config(_Section):
    """The whole of `eventpub.toml`."""

    app: App
    store: Store
    read: Read = Read()
    gaps: Gaps = Gaps()
    recount: Recount = Recount()
    sink: Sink
    spark: Spark = Spark()
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
