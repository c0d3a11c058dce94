"""All keys of the configuration, their defaults, and the key that a wrong name was meant for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from eventpub.config import Config
from eventpub.properties import is_secret_property

PREFIX = "EVENTPUB_"


class Key(NamedTuple):
    """One key, as the documentation and `config show` see it.

    Args:
        name: "store.columns.id"
        variable: its environment variable.
        info: its type, default and meaning.
        is_map: it holds properties of a library, under names of their own.
        default: as the file would write it; None where there is none.
    """

    name: str
    variable: str
    info: FieldInfo
    is_map: bool
    default: Any


def effective(config: Config) -> dict[str, Any]:
    """Every key's value as the file would write it; secrets are masked."""
    return dict(_leaves(config.model_dump(mode="json")))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_NEEDED = {"app": {"id": "-"}, "store": {"url": "mysql+pymysql://-/-"}, "sink": {"topic": "-"}}
_DEFAULTS = effective(Config.model_validate(_NEEDED))


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    for field, info in model.model_fields.items():
        name, kind = f"{prefix}{field}", info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, f"{name}.")
        else:
            variable = PREFIX + name.upper().replace(".", "__")
            default = None if info.is_required() else _DEFAULTS.get(name)
            yield Key(name, variable, info, field == "properties", default)


KEYS: dict[str, Key] = {key.name: key for key in _walk(Config)}
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(name.rpartition(".")[0] for name in KEYS))
MAPS: tuple[str, ...] = tuple(name for name, key in KEYS.items() if key.is_map)


def split(name: str) -> tuple[str, str]:
    """A key's section and the rest; a property's name, which may have dots, is one."""
    section = next((m for m in MAPS if name.startswith(f"{m}.")), name.rpartition(".")[0])
    return section, name.removeprefix(f"{section}.")


def is_secret(name: str) -> bool:
    if name in KEYS:
        return "SecretStr" in str(KEYS[name].info.annotation)
    return is_secret_property(name)


def meant_by(name: str) -> str | None:
    """The key or section that a wrong name was meant for: of another section, or misspelt."""
    known = {key: key for key in (*KEYS, *SECTIONS)}
    by_last = {key.rpartition(".")[2]: key for key in reversed(KEYS)}
    last = name.rpartition(".")[2]
    if found := known.get(name) or by_last.get(last):
        return found
    for names, wrong in ((known, name), (by_last, last)):
        if near := difflib.get_close_matches(wrong, names, n=1, cutoff=0.75):
            return names[near[0]]
    return None
