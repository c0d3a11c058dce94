"""The columns that identify an aggregate, and the key made of them.

One column is the key as it is. Several are joined by ``|``, after ``%`` was written as ``%25`` and
``|`` as ``%7C`` in each. The database joins them; `split` is the way back, so that lookups compare
the columns themselves and use their index.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["text", "enum", "bytes", "number", "uuid", "native_uuid"]

_UTF8 = {"utf8mb4", "utf8mb3", "utf8", "ascii"}
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}|1[0-9]{19}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DASHES = (21, 17, 13, 9)
"""Where dashes go into a UUID's hexadecimal digits, from the right."""
NOTHING = "FALSE"


def literal(text: str) -> str:
    """Text as an SQL string of utf8mb4, in hexadecimal, whatever the quoting rules."""
    return f"_utf8mb4 X'{text.encode().hex()}'"


@dataclass(frozen=True)
class IdPart:
    """One column of the identity.

    Args:
        name: quoted.
        kind: "bytes" are UTF-8; "uuid" is BINARY(16), read as text; "native_uuid" is MariaDB's.
        charset, collation: ``binary`` where it has none.
    """

    name: str
    kind: Kind
    charset: str = "binary"
    collation: str = "binary"

    @property
    def is_bytewise(self) -> bool:
        """Whether values that the column holds equal have equal bytes."""
        return self.kind != "text" or self.collation.endswith(("_0900_bin", "_nopad_bin"))

    @property
    def selected(self) -> str:
        """The expression that is sent as text."""
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
        """The expression whose bytes are the text's UTF-8."""
        is_other = self.kind in {"text", "enum"} and self.charset not in _UTF8
        return f"CONVERT({self.name} USING utf8mb4)" if is_other else self.selected

    def equals(self, value: str) -> str:
        """The condition that the column has a value, byte for byte, by index.

        The value is converted to the column's character set and collation, so the index serves;
        where the collation is not bytewise, the bytes are compared as well.
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
        # a character set makes "?" of what it lacks, and an ENUM takes '2' for its second value
        if self.kind == "enum" or not self.is_bytewise or self.charset != "utf8mb4":
            condition += f" AND CAST({self.utf8} AS BINARY) = {octets}"
        return condition


@dataclass(frozen=True)
class Identity:
    """The columns of the identity, in the order of the key."""

    parts: tuple[IdPart, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def selected(self) -> str:
        """The expression of the key; NULL where a column is."""
        return self.parts[0].selected if len(self.parts) == 1 else self.utf8

    @property
    def utf8(self) -> str:
        """The expression whose bytes are the key's UTF-8."""
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
        """Whether the key is one column of text, as only such a one can have a slice column."""
        return len(self.parts) == 1 and self.parts[0].kind in {"text", "bytes"}

    def equals(self, key: str) -> str:
        """The condition that a row is of an aggregate, by the index of its columns."""
        values = [key] if len(self.parts) == 1 else split(key)
        if len(values) != len(self.parts):
            return NOTHING
        each = [part.equals(value) for part, value in zip(self.parts, values, strict=True)]
        return NOTHING if NOTHING in each else " AND ".join(each)


def joined(values: Sequence[str]) -> str:
    """The key of several columns' values."""
    return "|".join(value.replace("%", "%25").replace("|", "%7C") for value in values)


def split(key: str) -> list[str]:
    """The values that `joined` made a key of; none where it cannot have made it."""
    values = [part.replace("%7C", "|").replace("%25", "%") for part in key.split("|")]
    return values if joined(values) == key else []
