"""The options of the data sources, as a configuration."""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eventpub.config import Config, Gaps, Read, Recount, Store
from eventpub.errors import ConfigError

_SECTIONS: dict[str, Any] = {"store": Store, "read": Read, "gaps": Gaps, "recount": Recount}
_OTHERS = ("shards", "partitions", "state", "state_dir", "rows", "maxRowsPerTrigger", "path")
_NAMES = {
    key: section
    for section, model in _SECTIONS.items()
    for key in model.model_fields
    if key != "columns"
}


@dataclass(frozen=True)
class SourceOptions:
    """What the source `eventstore` is given.

    Attributes:
        config: with the options that are keys of `[store]`, `[read]`, `[gaps]` and `[recount]`.
        partitions: what the aggregates are divided into, by ``CRC32(aggregate_id) % partitions``;
            shard k has the partitions p with ``p % shards == k``.
        state: the location that all executors share.
        state_dir: on each machine, for the indexes.
        all_rows: whether skips and refused rows are yielded, too.
        page_rows: most rows of a window.
    """

    config: Config
    partitions: int
    state: str
    state_dir: Path
    all_rows: bool
    page_rows: int

    @property
    def identity(self) -> dict[str, Any]:
        """What a state belongs to."""
        return {
            "table": self.config.store.full_table,
            "partitions": self.partitions,
            "shards": self.config.spark.shards,
            "first_version": self.config.store.first_version,
        }


def source_options(given: Mapping[str, str]) -> SourceOptions:
    """The options of the source `eventstore`.

    Raises:
        ConfigError: config.unknown_key, config.missing_key, config.invalid_value
    """
    known = {name.lower(): name for name in (*_NAMES, *_OTHERS)}  # Spark gives them in lower case
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    others: dict[str, str] = {}
    columns: dict[str, str] = {}
    for key, value in given.items():
        name = known.get(key.lower())
        if key.lower().startswith("columns."):
            columns[key.lower().removeprefix("columns.")] = value
        elif name is None:
            raise _unknown(key)
        elif name in _NAMES:
            sections[_NAMES[name]][name] = value
        else:
            others[name] = value
    if columns:
        sections["store"]["columns"] = columns
    for required in ("url", "state"):
        if required not in sections["store"] and required not in others:
            raise ConfigError(
                "config.missing_key",
                f"the source eventstore needs the option '{required}'",
                where=f"option {required}",
                suggestion=_REQUIRED[required],
            )
    shards = _number(others, "shards", 1)
    partitions = _number(others, "partitions", shards)
    if partitions < shards:
        raise _invalid("partitions", str(partitions), f"it must be at least shards, {shards}")
    if (rows := others.get("rows", "events")) not in {"events", "all"}:
        raise _invalid("rows", rows, "it is 'events' or 'all'")
    if rows == "events" and sections["gaps"].get("late") == "divert":
        raise _invalid("late", "divert", "late events have the column late; or set rows to 'all'")
    page_rows = _number(others, "maxRowsPerTrigger", 0)
    try:
        config = Config.model_validate(
            {
                **sections,
                "app": {"id": "eventstore"},
                "sink": {"topic": "journal"},
                "spark": {"shards": shards},
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        raise _invalid(name, str(first["input"]), first["msg"]) from None
    return SourceOptions(
        config=config,
        partitions=partitions,
        state=others["state"],
        state_dir=Path(others.get("state_dir") or _default_folder()),
        all_rows=rows == "all",
        page_rows=page_rows or config.read.page_rows,
    )


_REQUIRED = {
    "url": "set it to mysql+pymysql://user@host:3306/database",
    "state": "set it to a location that all executors reach, as the checkpoint does: a folder,"
    " s3://…, gs://… or az://…; the source keeps there what it has decided",
}


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"eventpub-{getpass.getuser()}"


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not (text.isdecimal() and (int(text) > 0 or text == str(default))):
        raise _invalid(name, text, "it is a number above 0")
    return int(text)


def _invalid(name: str, value: str, why: str) -> ConfigError:
    return ConfigError(
        "config.invalid_value",
        f"option {name} = {value!r}: {why}",
        where=f"option {name}",
        suggestion="correct the option",
    )


def _unknown(key: str) -> ConfigError:
    names = sorted([*_NAMES, *_OTHERS])
    near = get_close_matches(key, names, 1)
    return ConfigError(
        "config.unknown_key",
        f"the source eventstore has no option '{key}'",
        where=f"option {key}",
        suggestion=f"did you mean '{near[0]}'?" if near else f"the options are {', '.join(names)}",
    )
