"""Secrets stay inside: what was remembered here is shown as ``***`` by everything that prints.

Whoever reads a secret (a password of a file, the environment or a URL) remembers it before anything
can fail; whoever writes text for people, logs or scripts passes it through `mask`. This is the last
line of defence: messages should not contain secrets in the first place.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

MASK = "***"


class FileSecret(str):
    """A secret as it stood in a file when the configuration was read.

    Attributes:
        file: where it stands; a machine that runs only shards need not have it.
    """

    file: Path

    def __new__(cls, text: str, file: Path) -> FileSecret:
        made = super().__new__(cls, text)
        made.file = file
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return FileSecret, (str(self), self.file)


def current(secret: str) -> str:
    """A secret as it is now: one of a file may have been rotated.

    While the file is being replaced, it is the one that was there before.
    """
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
_forms: list[str] | None = None
"""As of `_as_written`; None: to be made anew."""


def remember(secret: str, *, passing: bool = False) -> None:
    """From now on `mask` hides this text, also where it is quoted for a URL or escaped by repr.

    Args:
        passing: it is one of many that follow one another, as tokens do: the last 32 are kept.
    """
    global _forms  # noqa: PLW0603 - one process has one set of secrets
    with _lock:
        if not secret or secret in _lasting or secret in _passing:
            return
        if passing:
            _passing.append(secret)
        else:
            _lasting.add(secret)
        _forms = None


def mask(text: str) -> str:
    """The text with every remembered secret, and every password inside a URL, hidden."""
    text = mask_url(text)
    for form in _as_written():
        if len(form) > 3:
            text = text.replace(form, MASK)
        elif form in text:  # as a word only: it would be found everywhere
            text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", MASK, text)
    return text


def _as_written() -> list[str]:
    """The secrets, and how they look in a URL and in what repr prints, longest first."""
    global _forms  # noqa: PLW0603
    with _lock:
        if _forms is None:
            secrets = {*_lasting, *_passing}
            forms = {how(s) for s in secrets for how in (str, _quoted, quote_plus, unquote)}
            _forms = sorted(forms | {repr(form)[1:-1] for form in forms}, key=len, reverse=True)
        return _forms


def _quoted(secret: str) -> str:
    return quote(secret, safe="")


def mask_url(text: str) -> str:
    """The text with the passwords inside URLs (``//user:password@``) hidden."""
    return re.sub(r"(://[^\s:/@]*):[^\s\"']*@", rf"\1:{MASK}@", text)


def mask_all(value: Any) -> Any:
    """`mask` for every text inside lists and mappings."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {mask_all(k): mask_all(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [mask_all(v) for v in value]
    return value


def forget_all() -> None:
    """Forget every secret; for tests."""
    global _forms  # noqa: PLW0603
    _lasting.clear()
    _passing.clear()
    _forms = None
