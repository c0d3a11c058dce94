"""What is wrong with the values of the configuration, in our words: the key, its value and where it
came from, what it must be. No secret appears in any of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventpub import masking
from eventpub.errors import ConfigError
from eventpub.properties import is_secret_property
from eventpub.settings_sources import KEYS, Layers
from eventpub.times import format_duration

_SECRETS = {"store.url", "store.password", "ops.token"}


class CombinedConfigError(ConfigError):
    """Several things are wrong at once; the first gives the code, `problems` has them all."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        first = problems[0]
        super().__init__(first.code, first.message, where=first.where, suggestion=first.suggestion)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """As of any error, with all of them under `problems`."""
        return super().to_dict() | {"problems": [p.to_dict() for p in self.problems]}


def problem_of(detail: dict[str, Any], layers: Layers, file: Path) -> ConfigError:
    key = _key_of(detail["loc"], layers)
    context = detail.get("ctx", {})
    match detail["type"]:
        case "missing":
            there = "" if file.exists() else " (no such file)"
            variable = KEYS[key].variable
            return ConfigError(
                "config.missing_key",
                f"{key} is not set; looked in {file}{there}, {variable} and the flags",
                where=key,
                suggestion=f"set it in the file, by {variable}, or by --set {key}=…",
            )
        case "contradiction":
            return ConfigError(
                "config.contradiction",
                context["message"],
                where=context["key"],
                suggestion=context["suggestion"],
            )
    origin = layers.origins.get(key, "default")
    if detail["type"] == "token":
        return invalid_token(key, origin)
    return ConfigError(
        "config.invalid_value",
        f"{key} = {_quoted(key, layers.values.get(key))} ({origin}) is not valid",
        where=key,
        suggestion=f"it must be: {_wanted(detail, key)}",
    )


def _key_of(loc: Sequence[str | int], layers: Layers) -> str:
    """The key of a fault, which may be that of one name of its list."""
    for length in range(len(loc), 0, -1):
        key = ".".join(str(part) for part in loc[:length])
        if key in KEYS or key in layers.values:
            return key
    return ".".join(str(part) for part in loc)


def invalid_token(key: str, origin: str) -> ConfigError:
    return ConfigError(
        "config.invalid_token",
        f"the token of the dashboard ({origin}) has fewer than 16 characters, or ones that an HTTP"
        " header cannot carry",
        where=key,
        suggestion="use 16 or more printable ASCII characters, without spaces around them:"
        " openssl rand -hex 16",
    )


_TYPES = {
    **dict.fromkeys(
        ("int_parsing", "int_parsing_size", "int_from_float", "int_type"), "a whole number"
    ),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("string_type", "string_unicode"), "text"),
    "finite_number": "a whole number",
    "path_type": "the path of a file or folder",
    "tuple_type": 'a list of names, such as ["a", "b"]',
}
"""By the library's kind of fault what a value must be."""


def _wanted(detail: dict[str, Any], key: str) -> str:
    """What a value must be, in our words."""

    def bound(limit: int) -> str:
        return format_duration(limit) if key in KEYS and KEYS[key].is_duration else str(limit)

    context = detail.get("ctx", {})
    match detail["type"]:
        case "string_too_short":
            return "some text; leave the key out for the default"
        case "greater_than_equal":
            return f"at least {bound(context['ge'])}"
        case "less_than_equal":
            return f"at most {bound(context['le'])}"
    if detail["type"] in _TYPES:
        return _TYPES[detail["type"]]
    return re.sub(r"^(Value error, |Input should be )", "", detail["msg"])


def _quoted(key: str, value: Any) -> str:
    if key in _SECRETS or (key not in KEYS and is_secret_property(key)):
        return masking.MASK
    text = masking.mask_url(json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= 120 else f"{text[:117]}…"


def joined(problems: Sequence[ConfigError]) -> ConfigError:
    return problems[0] if len(problems) == 1 else CombinedConfigError(problems)
