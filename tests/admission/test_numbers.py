"""Numbers of aggregates in arrays: the same as a dictionary of them, whoever asks for which."""

from __future__ import annotations

import numpy as np
import pytest

from eventpub.admission import Numbers, numbers_of

KNOWN = {"a": 1, "c": 3, "d": 4}


@pytest.fixture
def numbers() -> Numbers:
    there = np.array([True, False, True, True])
    return Numbers(["a", "b", "c", "d"], np.array([1, 2, 3, 4]), there)


def test_it_is_the_dictionary_of_those_that_are_there(numbers: Numbers) -> None:
    assert numbers == KNOWN
    assert numbers.get("b", 7) == 7
    assert "b" not in numbers


@pytest.mark.parametrize("text", ["", "ab", "abcd", "ba", "dx", "abcde", "a"])
def test_who_asks_for_some_in_any_order_gets_what_a_dictionary_says(
    numbers: Numbers, text: str
) -> None:
    names = list(text)
    expected = [KNOWN.get(name, -1) for name in names]
    assert numbers.of(names, -1).tolist() == expected
    assert numbers_of(names, KNOWN, -1).tolist() == expected


def test_what_was_given_out_may_be_changed(numbers: Numbers) -> None:
    numbers.of(numbers.names, -1)[:] = 0
    assert numbers.of(["a"], -1).tolist() == [1]
