"""Variants of one test, of which the usual run has some."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest


def variants(values: Iterable[Any], most: int = 1) -> list[Any]:
    """Parameters: the first `most` for `script/test`, the others for `script/test --long`."""
    rest = iter(values)
    return [*islice(rest, most), *(pytest.param(v, marks=pytest.mark.long) for v in rest)]
