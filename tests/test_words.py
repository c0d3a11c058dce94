"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from eventpub.errors import counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 events"), (1, "1 event"), (2, "2 events"), (1000, "1,000 events")]
)
def test_one_is_singular(number: int, said: str) -> None:
    assert counted(number, "event") == said


def test_the_words_after_a_number_may_be_any() -> None:
    words = "aggregate is held", "aggregates are held"
    assert [counted(n, *words) for n in (1, 2)] == ["1 aggregate is held", "2 aggregates are held"]
