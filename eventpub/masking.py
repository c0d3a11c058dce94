"""Secrets stay inside: what was remembered here is shown as ``***`` by everything that prints.

Whoever reads a secret (a password of a file, the environment or a URL) remembers it before anything
can fail; whoever writes text for people, logs or scripts passes it through `mask`. This is the last
line of defence: messages should not contain secrets in the first place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote

MASK = "***"

_secrets: set[str] = set()
_pattern: re.Pattern[str] | None = None


def remember(secret: str) -> None:
    """From now on `mask` hides this text, also where it is quoted for a URL or escaped by repr."""
    global _pattern  # noqa: PLW0603 - one process has one set of secrets
    if not secret:
        return
    forms = {secret, quote(secret, safe=""), quote_plus(secret), unquote(secret)}
    forms |= {repr(form)[1:-1] for form in forms}
    _secrets.update(forms)
    # a secret of one to three letters is hidden as a word only: it would be found everywhere
    _pattern = re.compile(
        "|".join(
            re.escape(s) if len(s) > 3 else rf"(?<!\w){re.escape(s)}(?!\w)"
            for s in sorted(_secrets, key=len, reverse=True)
        )
    )


def mask(text: str) -> str:
    """The text with every remembered secret, and every password inside a URL, hidden."""
    text = mask_url(text)
    return _pattern.sub(MASK, text) if _pattern else text


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
    global _pattern  # noqa: PLW0603
    _secrets.clear()
    _pattern = None
