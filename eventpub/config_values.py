"""Types of single values of the configuration; which properties of libraries are refused or secret.

A refusal says the meaning of the key, not the text of an exception, which may have a secret in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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
from eventpub.errors import ConfigError
from eventpub.times import format_duration, format_time, parse_duration, parse_time


def _reads(convert: Callable[[Any], Any], validator: Any = BeforeValidator) -> Any:
    """By a function that returns the value to take; None, or an exception, refuses."""

    def converted(value: Any) -> Any:
        with suppress(Exception):
            if (found := convert(value)) is not None:
                return found
        raise ValueError

    return validator(converted)


def _url(value: SecretStr) -> SecretStr | None:
    url = urlsplit(value.get_secret_value())
    is_whole = url.hostname and url.port != 0 and url.path.strip("/") and not url.fragment
    return value if is_whole and url.scheme in {"mysql+pymysql", "mariadb+pymysql"} else None


def _columns(value: Any) -> tuple[str, ...] | None:
    """One name, or a list; in the environment and in flags, the list as JSON."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else [value]
    is_unique = len({name.lower() for name in value}) == len(value)
    return tuple(value) if 1 <= len(value) <= 4 and all(value) and is_unique else None


def _start(value: Any) -> str:
    return str(value) if value in ("beginning", "now") else format_time(parse_time(value))


def _zone(name: str) -> str:
    is_offset = re.fullmatch(r"[+-](0\d|1[0-4]):[0-5]\d", name)
    return name if name == "auto" or is_offset else ZoneInfo(name).key


def _token(value: SecretStr) -> SecretStr | None:
    return value if re.fullmatch(r"[!-~][ -~]{14,}[!-~]", value.get_secret_value()) else None


def _property(value: Any) -> str:
    """Properties are text; a TOML number or boolean is what its text would be."""
    if not isinstance(value, str | int | float):
        raise ValueError("text")
    return value if isinstance(value, str) else str(value).lower()


def _shown(properties: dict[str, str]) -> dict[str, str]:
    def shown(name: str, value: str) -> str:
        is_secret = is_secret_property(name) or isinstance(value, masking.FileSecret)
        return masking.MASK if is_secret else masking.mask_url(value)

    return {name: shown(name, value) for name, value in properties.items()}


def read_file(file: Path, key: str) -> str:
    """The text of a file that a key names; raises config.file_unreadable."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            "config.file_unreadable",
            f"{file} cannot be read: {reason}",
            where=key,
            suggestion="name a file that the account that runs eventpub can read",
        ) from None


def read_secret(file: Path, key: str) -> masking.FileSecret:
    text = read_file(file, key).rstrip("\r\n")
    if not text:
        raise ConfigError(
            "config.password_file",
            f"{file} is empty",
            where=key,
            suggestion="write the secret into it, or remove the key",
        )
    masking.remember(text)
    return masking.FileSecret(text, file.absolute())


def _like(pattern: str) -> Any:
    return Field(pattern=rf"^(?:{pattern})\Z")


_written = partial(PlainSerializer, when_used="json-unless-none")
_NONE_IF_EMPTY = BeforeValidator(lambda value: None if value == "" else value)
_PORT = r"(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
_IPV6 = r"\[[0-9a-fA-F:.]+\]"
_PROTOCOL = r"(?i:PLAINTEXT|SSL|SASL_PLAINTEXT|SASL_SSL)://"
_SERVER = rf"\s*(?:{_PROTOCOL})?(?:{_IPV6}|[^\s:/,\[\]]+)(?::{_PORT})?\s*"
_SCHEME = "(?:file|s3|s3a|gs|az|abfs|abfss|https)://"

Whole = Annotated[int, BeforeValidator(lambda value: "" if isinstance(value, bool) else value)]
Micros = Annotated[int, BeforeValidator(parse_duration), _written(format_duration)]
"""A duration: text with a unit in the configuration, whole microseconds inside."""
Name = Annotated[str, Field(min_length=1)]
Secret = Annotated[SecretStr, _written(lambda _: masking.MASK)]
Token = Annotated[Secret, _reads(_token, AfterValidator)]
Properties = Annotated[dict[str, Annotated[str, PlainValidator(_property)]], _written(_shown)]
"""Passed to a library as they are."""
Folder = Annotated[Path, _NONE_IF_EMPTY]
File = Annotated[Path | None, _NONE_IF_EMPTY]
Column = Annotated[str | None, _NONE_IF_EMPTY]
KeyColumns = Annotated[
    tuple[str, ...],
    _reads(_columns),
    _written(lambda names: list(names) if names[1:] else names[0]),
]
AppId = Annotated[str, _like(r"[A-Za-z0-9._-]{1,200}")]
StoreUrl = Annotated[
    SecretStr,
    _reads(_url, AfterValidator),
    _written(lambda url: masking.mask_url(url.get_secret_value())),
]
Start = Annotated[str, _reads(_start)]
Zone = Annotated[str, _reads(_zone)]
TOPIC = r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,240}"
Topic = Annotated[str, _like(TOPIC)]
Servers = Annotated[
    str, _like(f"{_SERVER}(?:,{_SERVER})*"), AfterValidator(partial(re.sub, r"\s", ""))
]
Function = Annotated[
    Annotated[str, _like(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")] | None, _NONE_IF_EMPTY
]
Master = Annotated[
    Name,
    _like(
        r"yarn|local(\[(\*|[1-9]\d{0,3})(\s*,\s*\d+)?\])?|local-cluster\[[\s\d,]+\]"
        r"|spark://[^\s/,]+:\d{1,5}(,[^\s/,]+:\d{1,5})*|(?!spark:)[a-z][a-z0-9+.-]*://\S+"
    ),
]
Location = Annotated[str, _like(rf"(?![A-Za-z][\w+.-]*:)(?s:.*)|{_SCHEME}(?s:.*)[^/](?s:.*)")]
HttpAddress = Annotated[str, _like(rf"|(?:{_IPV6}|[^\s:/\[\]]*):(?:0|{_PORT})")]


# --- properties of libraries

SECRET_NAME = (
    r"passw|passphrase|secret|token|credential|private|(access|account|encryption)\.?key|"
    r"\.key\.pem|\.sas\.|oauthbearer\.config|jaas"
)
"""Is found in the names of properties whose values are secret; a regular expression, case
ignored, of Python and of Java."""


def is_secret_property(name: str) -> bool:
    """Whether the value of a librdkafka or Spark property must never be shown."""
    is_found = re.search(SECRET_NAME, name, re.IGNORECASE) is not None
    return is_found and not name.endswith((".location", ".url", ".file"))


_OURS = """
    bootstrap.servers metadata.broker.list transaction.timeout.ms transactional.id partitioner
    enable.gapless.guarantee delivery.report.only.error isolation.level enable.partition.eof
    auto.offset.reset group.id enable.auto.commit enable.auto.offset.store log.queue log_level
    default.topic.config error_cb logger oauth_cb on_commit on_delivery stats_cb throttle_cb
    spark.master spark.python.daemon.module spark.task.maxFailures
"""
PROTECTED_PROPERTIES = frozenset(_OURS.split())
"""Names that `[sink.properties]` and `[spark.properties]` may not set."""
ALLOWED_VALUES = {
    **dict.fromkeys(("enable.idempotence", "log.connection.close"), ("true", "true")),
    **dict.fromkeys(("acks", "request.required.acks"), ("all|-1", "all or -1")),
    **dict.fromkeys(
        ("max.in.flight", "max.in.flight.requests.per.connection"), ("[1-5]", "1 to 5")
    ),
    **dict.fromkeys(("retries", "message.send.max.retries"), ("[^0].*|0.+", "above 0")),
    "spark.submit.deployMode": ("client", "client"),
    "spark.speculation": ("false", "false"),
}
"""By property the values that it may have: a regular expression, and in words."""
