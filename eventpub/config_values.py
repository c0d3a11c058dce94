"""The form of single values of the configuration, as types of the models in `eventpub.config`.

Each says how a value is read, and how it is written where the configuration is shown: as the file
would have it, secrets masked. What a value must be is said by the meaning of its key, or by the
refusal, which does not repeat the value: it may be a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
)

from eventpub import masking
from eventpub.times import format_duration, format_time, parse_duration, parse_time


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a whole number")
    return value


def _folder(value: Any) -> Any:
    if value == "":
        raise ValueError("the path of a folder; '.' for the current one")
    return value


def _property_text(value: Any) -> str:
    """Properties are text; a TOML number or boolean is what its text would be."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise ValueError("text")
    return value if isinstance(value, str) else str(value)


def _url(value: SecretStr) -> SecretStr:
    try:
        url = urlsplit(value.get_secret_value())
        is_whole = url.hostname and url.port != 0 and url.path.strip("/") and not url.fragment
    except ValueError:
        is_whole = False
    if not is_whole or url.scheme not in {"mysql+pymysql", "mariadb+pymysql"}:
        form = "mysql+pymysql://user@host:3306/database"
        raise ValueError(f"a URL such as {form}; quote special characters (%40 for @)")
    return value


def _start(value: Any) -> str:
    """A time in one form, so that equal times are equal text."""
    if isinstance(value, str) and value in {"beginning", "now"}:
        return value
    try:
        return format_time(parse_time(value))
    except ValueError as e:
        raise ValueError(f"'beginning', 'now', or {e}") from None


def _zone(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"[+-](0\d|1[0-4]):[0-5]\d", value):
        try:
            ZoneInfo(value)
        except (ValueError, OSError, LookupError):
            form = "'auto', an offset such as +02:00, or a zone's IANA name such as Europe/Paris"
            raise ValueError(form) from None
    return value


def _token(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if len(text) < 16 or not (text.isascii() and text.isprintable()) or text != text.strip():
        raise ValueError(
            "16 or more printable ASCII characters, without spaces around them, such as openssl"
            " rand -hex 16 prints"
        )
    return value


def _names(value: Any) -> Any:
    """One name, or a list; in the environment and in flags, the list as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.startswith("[") else [value] if value else []
    except (ValueError, RecursionError):
        raise ValueError('a name, or a list such as ["a", "b"]') from None


def _key_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    if not 1 <= len(names) <= 4 or "" in names or len({n.lower() for n in names}) < len(names):
        raise ValueError('the name of a column, or a list of up to 4, such as ["type", "id"]')
    return names


def _shown(properties: dict[str, str]) -> dict[str, str]:
    secret = {n for n, v in properties.items() if isinstance(v, masking.FileSecret)}
    secret.update(filter(is_secret_property, properties))
    return {n: masking.MASK if n in secret else masking.mask_url(v) for n, v in properties.items()}


def _written(how: Callable[[Any], Any]) -> PlainSerializer:
    return PlainSerializer(how, when_used="json-unless-none")


def _like(pattern: str) -> Any:
    return Field(pattern=rf"^(?:{pattern})\Z")


_NONE_IF_EMPTY = BeforeValidator(lambda value: None if value == "" else value)
_PORT = r"(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
_IPV6 = r"\[[0-9a-fA-F:.]+\]"
_PROTOCOL = r"(?i:PLAINTEXT|SSL|SASL_PLAINTEXT|SASL_SSL)://"
_SERVER = rf"\s*(?:{_PROTOCOL})?(?:{_IPV6}|[^\s:/,\[\]]+)(?::{_PORT})?\s*"

Whole = Annotated[int, BeforeValidator(_whole)]
Micros = Annotated[int, BeforeValidator(parse_duration), _written(format_duration)]
"""A duration: text with a unit in the configuration, whole microseconds inside."""
Name = Annotated[str, Field(min_length=1)]
Secret = Annotated[SecretStr, _written(lambda _: masking.MASK)]
Properties = Annotated[dict[str, Annotated[str, PlainValidator(_property_text)]], _written(_shown)]
"""Passed to a library as they are."""
Folder = Annotated[Path, BeforeValidator(_folder)]
File = Annotated[Path | None, _NONE_IF_EMPTY]
Column = Annotated[str | None, _NONE_IF_EMPTY]
KeyColumns = Annotated[
    tuple[str, ...],
    BeforeValidator(_names),
    AfterValidator(_key_columns),
    _written(lambda names: list(names) if names[1:] else names[0]),
]
AppId = Annotated[str, _like(r"[A-Za-z0-9._-]{1,200}")]
AppIds = Annotated[tuple[AppId, ...], BeforeValidator(_names)]
StoreUrl = Annotated[
    SecretStr,
    AfterValidator(_url),
    _written(lambda url: masking.mask_url(url.get_secret_value())),
]
Start = Annotated[str, BeforeValidator(_start)]
Zone = Annotated[str, AfterValidator(_zone)]
Topic = Annotated[str, _like(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,240}")]
Servers = Annotated[
    str, _like(f"{_SERVER}(?:,{_SERVER})*"), AfterValidator(lambda text: re.sub(r"\s", "", text))
]
_FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
Function = Annotated[Annotated[str, _like(_FUNCTION)] | None, _NONE_IF_EMPTY]
Master = Annotated[
    Name,
    _like(
        r"yarn|local(\[(\*|[1-9]\d{0,3})(\s*,\s*\d+)?\])?|local-cluster\[[\s\d,]+\]"
        r"|spark://[^\s/,]+:\d{1,5}(,[^\s/,]+:\d{1,5})*|(?!spark:)[a-z][a-z0-9+.-]*://\S+"
    ),
]
_SCHEME = "(?:file|s3|s3a|gs|az|abfs|abfss|https)://"
Location = Annotated[
    str, _like(rf"(?![A-Za-z][A-Za-z0-9+.-]*:)(?s:.*)|{_SCHEME}(?s:.*)[^/](?s:.*)")
]
HttpAddress = Annotated[str, _like(rf"|(?:{_IPV6}|[^\s:/\[\]]*):(?:0|{_PORT})")]
Token = Annotated[Secret, AfterValidator(_token)]


# --- properties of libraries: which may not be set, and which hold a secret

_ONLY_OWN_KEY = "it has a key of its own in [sink]"
_JOINS_NO_GROUP = "eventpub uses no consumer group"
_IS_NO_TEXT = "it is not a property of librdkafka but an argument of its Python client"
_LOG_IS_WATCHED = "the client's log is watched for lost answers of the transaction coordinator"

PROTECTED_PROPERTIES: dict[str, str] = {
    "bootstrap.servers": _ONLY_OWN_KEY,
    "metadata.broker.list": _ONLY_OWN_KEY,
    "transaction.timeout.ms": _ONLY_OWN_KEY,
    "transactional.id": "derived from app.id and the shard's number, to fence the former owner",
    "enable.gapless.guarantee": "transactions give it",
    "partitioner": "the partition is CRC32 of the aggregate's id",
    "delivery.report.only.error": "delivery reports are counted before each commit",
    "isolation.level": "what is read back must be committed",
    "group.id": _JOINS_NO_GROUP,
    "enable.auto.commit": _JOINS_NO_GROUP,
    "enable.auto.offset.store": _JOINS_NO_GROUP,
    "enable.partition.eof": "reading back relies on it to end",
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
    "spark.task.maxFailures": "eventpub itself restarts a lost shard",
}


def refused_spark_property(name: str, value: str) -> str | None:
    if name == "spark.submit.deployMode" and value.strip().lower() != "client":
        return "the publisher's own process is Spark's driver"
    if name == "spark.speculation" and value.strip().lower() != "false":
        return "two attempts of a task would fence each other"
    if not name.startswith("spark."):
        return "Spark ignores names that do not begin with spark."
    return _OF_SPARK.get(name)


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
