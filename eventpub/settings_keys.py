"""All keys of the configuration, their defaults, and the one that a wrong name stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from eventpub import masking
from eventpub.config import Config
from eventpub.properties import is_secret_property
from eventpub.times import format_duration, parse_duration

PREFIX = "EVENTPUB_"


class Key(NamedTuple):
    """One key, as the documentation and `config show` see it.

    Args:
        name: "store.columns.id"
        variable: its environment variable.
        info: its type, default and meaning.
        is_map: it holds properties of a library, under names of their own.
    """

    name: str
    variable: str
    info: FieldInfo
    is_map: bool

    @property
    def is_duration(self) -> bool:
        """Whether the value is a duration."""
        return any(getattr(m, "func", None) is parse_duration for m in self.info.metadata)

    @property
    def default(self) -> Any:
        """As the file would write it; None where there is none."""
        has_none = self.info.is_required() or self.is_map
        return None if has_none else self.as_written(self.info.default)

    def as_written(self, value: Any) -> Any:
        """A value as the file would write it; a secret is masked."""
        if isinstance(value, SecretStr):
            secret = value.get_secret_value()
            return masking.mask_url(secret) if self.name == "store.url" else masking.MASK
        if self.is_duration:
            return format_duration(value)
        if isinstance(value, tuple):
            is_one = self.name == "store.columns.aggregate_id" and len(value) == 1
            return value[0] if is_one else [*value]
        return str(value) if isinstance(value, Path) else value


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    for field, info in model.model_fields.items():
        name, kind = f"{prefix}{field}", info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, f"{name}.")
        else:
            variable = PREFIX + name.upper().replace(".", "__")
            yield Key(name, variable, info, field == "properties")


KEYS: dict[str, Key] = {key.name: key for key in _walk(Config)}
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(name.rpartition(".")[0] for name in KEYS))
MAPS: tuple[str, ...] = tuple(name for name, key in KEYS.items() if key.is_map)


def split(name: str) -> tuple[str, str]:
    """A key's section and the rest; a property's name, which may have dots, is one."""
    section = next((m for m in MAPS if name.startswith(f"{m}.")), name.rpartition(".")[0])
    return section, name.removeprefix(f"{section}.")


def is_secret(name: str) -> bool:
    """Whether the value of a key or property is never shown."""
    if name in KEYS:
        return "SecretStr" in str(KEYS[name].info.annotation)
    return is_secret_property(name)


def meant_by(name: str) -> str | None:
    """The key or section that a wrong name stands for: of another section, or misspelt."""
    known = {key: key for key in (*KEYS, *SECTIONS)}
    by_last = {key.rpartition(".")[2]: key for key in reversed(KEYS)}
    last = name.rpartition(".")[2]
    if found := known.get(name) or by_last.get(last):
        return found
    for names, wrong in ((known, name), (by_last, last)):
        if near := difflib.get_close_matches(wrong, names, n=1, cutoff=0.75):
            return names[near[0]]
    return None
