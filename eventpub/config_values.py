"""The form of single values of the configuration, as types of the models in `eventpub.config`.

A refusal says what the value must be, and does not repeat it: it may be a secret.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NoReturn, get_args
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SecretStr,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from eventpub.times import format_time, parse_duration, parse_time


def _property_text(value: Any) -> Any:
    """Properties are text; a TOML number or boolean is what its text would be."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


Micros = Annotated[int, BeforeValidator(parse_duration)]
"""A duration: text with a unit in the configuration, whole microseconds inside."""

Properties = dict[str, Annotated[str, BeforeValidator(_property_text)]]
"""Handed to a library as they are."""


def contradiction(key: str, message: str, suggestion: str) -> NoReturn:
    """Refuse values that are right alone and wrong together.

    Raises:
        PydanticCustomError: of the type "contradiction", which loading makes a ConfigError.
    """
    raise PydanticCustomError(
        "contradiction", "{message}", {"key": key, "message": message, "suggestion": suggestion}
    )


def refuse_both(key: str, secret: object, file: object) -> None:
    """Refuse a secret that is given twice: as it is, and by a file that holds it."""
    if secret is not None and file is not None:
        contradiction(f"{key}_file", f"both {key} and {key}_file are set", "keep one of the two")


class Section(BaseModel):
    """What all sections have in common."""

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


AppId = Annotated[str, AfterValidator(_is_app_id)]


def _is_topic(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,240}", value) or value in {".", ".."}:
        raise ValueError("1 to 240 of A-Z a-z 0-9 . _ -")
    return value


Topic = Annotated[str, AfterValidator(_is_topic)]


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


StoreUrl = Annotated[SecretStr, AfterValidator(_is_url)]


def _is_start(value: Any) -> str:
    """`beginning`, `now`, or the time in one form, so that equal times are equal text."""
    if isinstance(value, str) and value in {"beginning", "now"}:
        return value
    try:
        return format_time(parse_time(value))
    except ValueError as e:
        raise ValueError(f"'beginning', 'now', or {e}") from None


Start = Annotated[str, BeforeValidator(_is_start)]


def _is_zone(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"[+-](0\d|1[0-4]):[0-5]\d", value):
        try:
            ZoneInfo(value)
        except (ValueError, OSError, LookupError):
            raise ValueError(
                "'auto', an offset such as +02:00, or a zone's IANA name such as Europe/Paris"
            ) from None
    return value


Zone = Annotated[str, AfterValidator(_is_zone)]


def _is_http(value: str) -> str:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]*):(\d{1,5})", value)
    if value and not (match and int(match[2]) <= 65_535):
        raise ValueError("'' (off), or address:port such as 127.0.0.1:8077")
    return value


HttpAddress = Annotated[str, AfterValidator(_is_http)]


def is_token(text: str) -> bool:
    """Whether it can be `ops.token`: hard to guess, and an HTTP header can carry it."""
    return len(text) >= 16 and text.isascii() and text.isprintable() and text == text.strip()


def _is_token(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not is_token(value.get_secret_value()):
        raise PydanticCustomError(
            "token", "ops.token has fewer than 16 characters, or no header can carry it"
        )
    return value


Token = Annotated[SecretStr | None, AfterValidator(_is_token)]


def _is_function(value: str | None) -> str | None:
    if value and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", value):
        raise ValueError("package.module:function")
    return value or None


Function = Annotated[str | None, AfterValidator(_is_function)]


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


Servers = Annotated[str, AfterValidator(_is_servers)]


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


Master = Annotated[str, AfterValidator(_is_master)]


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


SnapshotPlace = Annotated[str, AfterValidator(_is_place)]


_HOST = re.compile(
    r"[\w.-]+|\[[0-9a-fA-F:.]+\]|[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(%\w+)?", re.ASCII
)


def _is_host(value: str) -> str:
    if value and not _HOST.fullmatch(value):
        raise ValueError("a host's name or address, without a port; '' for the default")
    return value


Host = Annotated[str, AfterValidator(_is_host)]


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


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


def _key_columns(value: Any) -> Any:
    """One name, or a list; in the environment and in flags, the list as JSON."""
    return _names(value) if not isinstance(value, str) or value.startswith("[") else (value,)


def _are_key_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    if not 1 <= len(names) <= 4 or "" in names or len({n.lower() for n in names}) < len(names):
        raise ValueError('the name of a column, or a list of up to 4, such as ["type", "id"]')
    return names


KeyColumns = Annotated[
    tuple[str, ...], BeforeValidator(_key_columns), AfterValidator(_are_key_columns)
]


AppIds = Annotated[tuple[AppId, ...], BeforeValidator(_names)]
