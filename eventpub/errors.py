"""The errors that eventpub raises on purpose.

    EventpubError
    ├── ConfigError      wrong use or configuration               exit status 2
    ├── StoreError       the store (MySQL, MariaDB)               exit status 3
    ├── SinkError        the broker and its topics                exit status 3
    ├── StateError       the state directory: index, position     exit status 3
    ├── LocalError       servers that eventpub starts itself      exit status 3
    └── VersionConflict  raised only by `eventpub.append`

Each package maps the errors of the libraries that it uses to these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from eventpub.masking import mask_url

_MARK = "eventpub-error:"
_FIELDS = "code", "message", "where", "suggestion", "retriable"


class EventpubError(Exception):
    """Base of all errors of eventpub.

    Args:
        code: stable name, ``package.what``, listed in docs/errors.md.
        message: one sentence, without secrets.
        where: configuration key, table, topic or file.
        retriable: the same call may succeed later.
    """

    exit_status: ClassVar[int] = 3

    def __init__(
        self,
        code: str,
        message: str,
        *,
        where: str | None = None,
        suggestion: str | None = None,
        retriable: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.where = where
        self.suggestion = suggestion
        self.retriable = retriable

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        if self.where:
            text += f" [{self.where}]"
        if self.suggestion:
            text += f"\n  to fix it: {self.suggestion}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        return {"type": type(self).__name__} | {name: getattr(self, name) for name in _FIELDS}

    def marked(self) -> str:
        """One line that `find_marked` finds in the text of a Spark exception."""
        return f"{_MARK}{json.dumps(self.to_dict())}"


class ConfigError(EventpubError):
    exit_status = 2


class StoreError(EventpubError):
    """The store is unreachable, refused access, or is not set up."""


class SinkError(EventpubError):
    """The broker is unreachable or refused access, or a topic is not as required."""


class StateError(EventpubError):
    """The state directory (index, position) is unusable, or a runner or Spark was lost."""


class LocalError(EventpubError):
    """A server that eventpub runs on this machine could not be set up."""


class VersionConflict(EventpubError):  # noqa: N818 (the name users hold on to)
    """Another writer has already appended the expected version."""

    exit_status = 1


_KINDS: list[type[EventpubError]] = [EventpubError, *EventpubError.__subclasses__()]
_TYPES = {kind.__name__: kind for kind in _KINDS}


def from_dict(data: dict[str, Any]) -> EventpubError:
    return _TYPES.get(data["type"], EventpubError)(**{name: data[name] for name in _FIELDS})


def words_of(error: BaseException) -> str:
    """The text of an exception; a JVM's exception asks the JVM, which may be dead."""
    try:
        return mask_url(str(error))
    except Exception:
        return type(error).__name__


def find_marked(text: str) -> EventpubError | None:
    """The error that a Spark worker put into the text of its exception."""
    at = text.find(_MARK)
    if at < 0:
        return None
    try:
        data, _ = json.JSONDecoder().raw_decode(text, at + len(_MARK))
    except ValueError:
        return None
    return from_dict(data)


@dataclass(frozen=True)
class Check:
    """One finding of `eventpub doctor`.

    Args:
        status: "warn": works, but not well; "wrong": `run` would fail; "skipped": not checked.
        code: of the error with which `run` would fail.
    """

    name: str
    status: Literal["ok", "warn", "wrong", "skipped"]
    message: str
    suggestion: str | None = None
    code: str | None = None

    @classmethod
    def wrong(cls, name: str, error: EventpubError) -> Check:
        message = error.message if error.where is None else f"{error.message} ({error.where})"
        return cls(name, "wrong", message, error.suggestion, error.code)


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 event``, ``2 events``, ``1,000 events``; the default of `many` is `one` with an "s"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def named_versions(first: int, last: int) -> str:
    return f"version {first}" if first == last else f"versions {first} to {last}"
