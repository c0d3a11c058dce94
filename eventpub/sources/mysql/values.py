"""How the identity's columns and `create_time` are read and compared.

A single identity column is the key itself. Several are joined by ``|`` after escaping ``%`` as
``%25`` and ``|`` as ``%7C``. The database joins them; `split` reverses it, so that lookups compare
the columns themselves and use their index.

A DATETIME holds local time. Instants are µs since 1970, UTC, or of the local clock where named so.
A local time in an hour that clocks repeat gets the UTC instant in the window it was read in.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import Connection, mapped, run

Kind: TypeAlias = Literal["text", "enum", "bytes", "number", "uuid", "native_uuid"]

_UTF8 = {"utf8mb4", "utf8mb3", "utf8", "ascii"}
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}|1[0-9]{19}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DASHES = (21, 17, 13, 9)
NOTHING = "FALSE"


def literal(text: str) -> str:
    """Text as an SQL string of utf8mb4, in hexadecimal, independent of quoting rules."""
    return f"_utf8mb4 X'{text.encode().hex()}'"


@dataclass(frozen=True)
class IdPart:
    """One column of the identity; `name` is quoted, `charset` and `collation` may be ``binary``.

    `kind`: "bytes" are UTF-8; "uuid" is BINARY(16), read as text; "native_uuid" is MariaDB's.
    """

    name: str
    kind: Kind
    charset: str = "binary"
    collation: str = "binary"

    @property
    def is_bytewise(self) -> bool:
        """Whether values that compare equal have equal bytes."""
        return self.kind != "text" or self.collation.endswith(("_0900_bin", "_nopad_bin"))

    @property
    def grouped(self) -> str:
        """For GROUP BY: only values of equal bytes are one."""
        return self.name if self.is_bytewise else f"{self.name}, CAST({self.name} AS BINARY)"

    @property
    def merged(self) -> str:
        """Which values the collation takes for one."""
        is_binary = self.collation.endswith("_bin")
        ignored = "trailing blanks" if is_binary else "case, accents or whatever else it ignores"
        return f"collation {self.collation} treats ids as equal that differ only in {ignored}"

    @property
    def selected(self) -> str:
        if self.kind == "uuid":
            text = f"HEX({self.name})"
            for at in _DASHES:
                text = f"INSERT({text}, {at}, 0, '-')"
            return f"LOWER({text})"
        if self.kind == "native_uuid":
            return f"CAST({self.name} AS CHAR)"
        # without the zeros that ZEROFILL shows
        return f"({self.name} + 0)" if self.kind == "number" else self.name

    @property
    def utf8(self) -> str:
        is_other = self.kind in {"text", "enum"} and self.charset not in _UTF8
        return f"CONVERT({self.name} USING utf8mb4)" if is_other else self.selected

    def equals(self, value: str) -> str:
        """The condition that the column has a value, byte for byte, by index.

        The value is converted to the column's character set and collation, so the index serves;
        if the collation is not bytewise, the bytes are compared as well.
        """
        if self.kind == "number":
            return f"{self.name} = {value}" if _NUMBER.fullmatch(value) else NOTHING
        if self.kind in {"uuid", "native_uuid"}:
            stored = f"X'{value.replace('-', '')}'" if self.kind == "uuid" else f"'{value}'"
            return f"{self.name} = {stored}" if _UUID.fullmatch(value) else NOTHING
        octets = f"X'{value.encode().hex()}'"
        if self.kind == "bytes":
            return f"{self.name} = {octets}"
        stored = literal(value)
        if self.charset != "utf8mb4":
            stored = f"CONVERT({stored} USING {self.charset})"
        condition = f"{self.name} = {stored} COLLATE {self.collation}"
        # a character set may turn characters into "?", and an ENUM takes '2' for its second value
        if self.kind == "enum" or not self.is_bytewise or self.charset != "utf8mb4":
            condition += f" AND CAST({self.utf8} AS BINARY) = {octets}"
        return condition


@dataclass(frozen=True)
class Identity:
    parts: tuple[IdPart, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def selected(self) -> str:
        """The expression for the key; NULL if any column is."""
        return self.parts[0].selected if len(self.parts) == 1 else self.utf8

    @property
    def utf8(self) -> str:
        if len(self.parts) == 1:
            return self.parts[0].utf8
        # as bytes, since columns of two collations cannot be joined as text
        each = [
            f"REPLACE(REPLACE(CAST({part.utf8} AS BINARY), '%', '%25'), '|', '%7C')"
            for part in self.parts
        ]
        return "CONCAT(" + ", '|', ".join(each) + ")"

    @property
    def is_text(self) -> bool:
        """Whether the key is one text column; only such a key can have a slice column."""
        return len(self.parts) == 1 and self.parts[0].kind in {"text", "bytes"}

    def equals(self, key: str) -> str:
        values = [key] if len(self.parts) == 1 else split(key)
        if len(values) != len(self.parts):
            return NOTHING
        each = [part.equals(value) for part, value in zip(self.parts, values, strict=True)]
        return NOTHING if NOTHING in each else " AND ".join(each)


def joined(values: Sequence[str]) -> str:
    return "|".join(value.replace("%", "%25").replace("|", "%7C") for value in values)


def split(key: str) -> list[str]:
    """The values that `joined` combined; empty if it cannot have made this key."""
    values = [part.replace("%7C", "|").replace("%25", "%") for part in key.split("|")]
    return values if joined(values) == key else []


# -- times

_SECOND = 1_000_000
_STEP = 6 * 86_400
_LAST = 4_102_444_800  # 2100: later rules do not exist yet
_NEVER = 1 << 62

Offsets = Callable[[Sequence[int]], "list[int | None]"]
"""Seconds east of UTC at some instants (seconds since 1970); None: unknown."""


@dataclass(frozen=True)
class Zone:
    """A time zone's offsets from UTC.

    Args:
        changes: instants (µs UTC, ascending) at which a new offset begins.
        offsets: µs east of UTC; one more than `changes`: the first holds before all of them.
    """

    name: str
    changes: tuple[int, ...]
    offsets: tuple[int, ...]

    def local(self, instant: int) -> int:
        return instant + self.offsets[bisect_right(self.changes, instant)]

    @cached_property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """When the clocks go back, and by how much."""
        steps = zip(self.changes, self.offsets, self.offsets[1:], strict=False)
        return tuple((at, old - new) for at, old, new in steps if new < old)

    def next_backward_change(self, instant: int) -> int:
        return next((at for at, _ in self.repeated if at >= instant), _NEVER)

    def local_range(self, after: int, upto: int) -> tuple[int, int]:
        """The smallest range ``first ≤ local ≤ last`` that covers ``after < t ≤ upto``.

        Ranges of adjacent windows leave no gap.
        """
        back = [at for at, _ in self.repeated if after < at <= upto]
        first = min([self.local(after) + 1, *(self.local(t) for t in back)])
        last = max([self.local(upto), *(self.local(t - 1) for t in back if t - 1 > after)])
        return first, last

    def utc(
        self, local: npt.NDArray[np.int64], after: int | None = None, upto: int | None = None
    ) -> npt.NDArray[np.int64]:
        """The instants of local times read in ``after < t ≤ upto``; else the earlier ones."""
        starts, ends, offsets = self._tables
        i = np.searchsorted(ends, local, side="right")
        # a local time that a forward change skips counts as the change itself
        earlier = np.maximum(local, starts[i]) - offsets[i]
        if after is None or upto is None:
            return earlier
        later = local - offsets[np.searchsorted(starts[1:], local, side="right")]
        instants = np.where(earlier > after, earlier, np.maximum(earlier, later))
        return np.clip(instants, after + 1, upto)

    def latest(self, local: int) -> int:
        starts, _, offsets = self._tables
        later = local - offsets[np.searchsorted(starts[1:], local, side="right")]
        return int(max(self.utc(np.array([local]))[0], later))

    @cached_property
    def _tables(
        self,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Local start and end of each period of one offset, and the offset."""
        offsets = np.array(self.offsets, np.int64)
        changes = np.array(self.changes, np.int64)
        starts = np.concatenate([[np.iinfo(np.int64).min // 2], changes + offsets[1:]])
        # searchsorted needs ascending ends; they are, but for changes closer than their size
        ends = np.maximum.accumulate(changes + offsets[:-1]) if len(changes) else changes
        return starts, ends, offsets


UTC = Zone("UTC", (), (0,))


def fixed_zone(name: str) -> Zone | None:
    if name.upper() in {"UTC", "Z", "ETC/UTC"}:
        return Zone(name, (), (0,))
    match = re.fullmatch(r"([+-])(\d{1,2}):([0-5]\d)", name)
    if not match:
        return None
    seconds = (int(match[2]) * 60 + int(match[3])) * 60
    return Zone(name, (), ((-seconds if match[1] == "-" else seconds) * _SECOND,))


def named_zone(name: str) -> Zone:
    """The zone of an IANA name; raises store.time_zone_unknown."""
    try:
        info = ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise StoreError(
            "store.time_zone_unknown",
            f"unknown time zone {name!r}",
            where="store.time_zone",
            suggestion="write an IANA name such as Europe/Berlin or an offset such as +02:00; "
            "where the system has no time zone data: pip install tzdata",
        ) from error

    def offsets(instants: Sequence[int]) -> list[int | None]:
        local = (datetime.fromtimestamp(t, info).utcoffset() or timedelta() for t in instants)
        return [round(offset.total_seconds()) for offset in local]

    return sampled_zone(name, offsets)


def sampled_zone(name: str, offsets: Offsets, last: int = _LAST) -> Zone:
    """A zone from sampled offsets; each change is located by bisection.

    Samples are 6 days apart: since 1970 no zone has kept an offset for less than 6.9 days.
    """
    known: list[tuple[int, int]] = []
    for start in range(0, last, 1_000 * _STEP):
        some = range(start, min(start + 1_000 * _STEP, last), _STEP)
        known += [(t, o) for t, o in zip(some, offsets(some), strict=True) if o is not None]
    if not known:
        raise StoreError(
            "store.time_zone_unknown",
            f"the database cannot resolve its time zone {name!r}",
            where="store.time_zone",
            suggestion="set store.time_zone to an IANA name or an offset",
        )
    spans = [(before, at, old, new) for (before, old), (at, new) in pairwise(known) if old != new]
    while any(at - before > 1 for before, at, _, _ in spans):
        middles = [(before + at) // 2 for before, at, _, _ in spans]
        spans = [
            (before, middle, old, new) if offset != old else (middle, at, old, new)
            for (before, at, old, new), middle, offset in zip(
                spans, middles, offsets(middles), strict=True
            )
        ]
    return Zone(
        name,
        tuple(at * _SECOND for _, at, _, _ in spans),
        (known[0][1] * _SECOND, *(new * _SECOND for _, _, _, new in spans)),
    )


def is_utc(default: str) -> bool:
    """Whether a column default is the time in UTC, and not computed from it."""
    return bool(re.fullmatch(r"\(*utc_timestamp(\(\d?\))?\)*", default))


def zone_of(config: Store, connection: Connection, default: str) -> Zone:
    """The zone of a DATETIME with this default."""
    name = "UTC" if config.time_zone == "auto" and is_utc(default) else config.time_zone
    if name != "auto":
        return fixed_zone(name) or named_zone(name)
    with mapped("store.time_zone"):
        name = str(run(connection, "SELECT @@GLOBAL.time_zone")[0][0])
        return fixed_zone(name) or _server_zone(name, connection)


def _server_zone(name: str, connection: Connection) -> Zone:
    """The zone by the rules of the server, which writes the local times."""

    def offsets(instants: Sequence[int]) -> list[int | None]:
        local = "TIMESTAMPDIFF(SECOND, '1970-01-01', FROM_UNIXTIME({}))".format
        row = run(connection, f"SELECT {', '.join(map(local, instants))}")[0]
        return [None if at is None else int(at) - t for at, t in zip(row, instants, strict=True)]

    run(connection, f"SET time_zone = {literal(name)}")
    try:
        return sampled_zone(name, offsets)
    finally:
        run(connection, "SET time_zone = '+00:00'")


def writers_zone(zone: str | None) -> str:
    """The fix if writers' times are off by the difference of two zones; `zone` is that in which a
    DATETIME is read, None for a TIMESTAMP.
    """
    if zone is None:
        return (
            "if writers set create_time themselves, have their sessions SET time_zone to the"
            " zone of the values they write, or let the column take its default"
        )
    return (
        "if the writers' sessions use another time zone: set store.time_zone to it, or have them"
        f" SET time_zone to that of {zone}"
    )
