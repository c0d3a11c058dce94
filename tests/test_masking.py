"""What was remembered is shown nowhere, and what passes is forgotten in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from eventpub import masking


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    masking.forget_all()
    yield
    masking.forget_all()


def test_a_secret_is_hidden_in_each_way_of_writing_it() -> None:
    secret = "a/b c'\\d"
    masking.remember(secret)
    for text in (secret, quote(secret, safe=""), repr(secret)[1:-1]):
        assert masking.mask(f"at {text} end") == "at *** end"


def test_a_short_secret_is_hidden_as_a_word_only_and_a_longer_one_as_a_whole() -> None:
    masking.remember("pw")
    masking.remember("pw-and-more")
    assert masking.mask("pw, spw, pw-and-more") == "***, spw, ***"


def test_tokens_that_follow_one_another_are_not_kept_for_ever() -> None:
    """Each was kept, and all were compiled again with each: a second of CPU a call after a day."""
    masking.remember("a password")
    tokens = [f"{n:06d}{'x' * 1500}" for n in range(2000)]
    began = time.process_time()
    for token in tokens:
        masking.remember(token, passing=True)
        masking.remember(token, passing=True)
    assert time.process_time() - began < 5
    assert masking.mask(" ".join(tokens[-32:]) + " a password") == " ".join(["***"] * 33)
    assert masking.mask(tokens[0]) == tokens[0]
