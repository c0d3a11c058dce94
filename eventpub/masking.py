"""Masks secrets as ``***`` in everything that is printed.

Code that reads a secret must `remember` it before anything can fail.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

MASK = "***"


class FileSecret(str):
    file: Path

    def __new__(cls, text: str, file: Path) -> FileSecret:
        made = super().__new__(cls, text)
        made.file = file
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return FileSecret, (str(self), self.file)


def current(secret: str) -> str:
    """The current value of a secret: its file may have been rotated."""
    if not isinstance(secret, FileSecret):
        return secret
    with suppress(OSError, UnicodeDecodeError):
        if text := secret.file.read_text(encoding="utf-8").rstrip("\r\n"):
            remember(text, passing=True)
            return text
    return secret


_lock = threading.Lock()
_lasting: set[str] = set()
_passing: deque[str] = deque(maxlen=32)
_forms: tuple[re.Pattern[str] | None, list[str]] = (None, [])
"""Secrets that are ordinary words, and all forms of the others, longest first."""


def remember(secret: str, *, passing: bool = False) -> None:
    """Have `mask` hide this text, also when quoted for a URL or escaped by repr.

    With `passing`, for short-lived secrets such as tokens, only the last 32 are kept.
    """
    global _forms  # noqa: PLW0603 - one process has one set of secrets
    with _lock:
        if not secret or secret in _lasting or secret in _passing:
            return
        if passing:
            _passing.append(secret)
        else:
            _lasting.add(secret)
        secrets = {*_lasting, *_passing}
        words = {s for s in secrets if _AN_ORDINARY_WORD.fullmatch(s)}
        ways = (str, partial(quote, safe=""), quote_plus, unquote)
        forms = {how(s) for s in secrets - words for how in ways}
        forms |= {repr(form)[1:-1] for form in forms}
        _forms = _in_place(words), sorted(forms, key=len, reverse=True)


def mask(text: str) -> str:
    """Hide every remembered secret.

    A secret that is also an ordinary word is hidden only where a secret is expected (after
    "password" and the like, or before a URL's host); hiding it elsewhere would reveal it.
    """
    words, others = _forms
    for form in others:
        text = text.replace(form, MASK)
    return words.sub(MASK, text) if words else text


_AN_ORDINARY_WORD = re.compile(r"[A-Za-z]?[a-z]{0,9}|[0-9]{1,6}|.{1,3}", re.DOTALL)


def _in_place(words: set[str]) -> re.Pattern[str] | None:
    if not words:
        return None
    word = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    named = "".join(rf"(?<={name}{sign})" + "|" for name in _NAMES for sign in _SIGNS)
    return re.compile(rf"(?:{named[:-1]})(?:{word})(?!\w)|(?<=:)(?:{word})(?=@)", re.IGNORECASE)


_NAMES = ("password", "passwd", "pwd", "secret", "token", "bearer")
_SIGNS = ("=", ":", ": ", " ", '="', "='", '": "', "': '")


def mask_url(text: str) -> str:
    return re.sub(r"(://[^\s:/@]*):[^\s\"']*@", rf"\1:{MASK}@", mask(text))


def mask_all(value: Any) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: mask_all(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [mask_all(v) for v in value]
    return value
