"""What was remembered is shown nowhere, and what passes is forgotten in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from eventpub import masking
from tests.in_process import forget_secrets


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget_secrets()
    yield
    forget_secrets()


def test_a_secret_is_hidden_in_each_way_of_writing_it() -> None:
    secret = "a/b c'\\d"
    masking.remember(secret)
    for text in (secret, quote(secret, safe=""), repr(secret)[1:-1]):
        assert masking.mask(f"at {text} end") == "at *** end"


@pytest.mark.parametrize("word", ["wrong", "events", "Publisher", "pw", "1234"])
def test_a_secret_that_is_an_ordinary_word_is_hidden_where_a_secret_stands(word: str) -> None:
    masking.remember(word)
    text = f"1 of 9 checks is {word}: {word} {{'{word}': 1}}"
    assert masking.mask(text) == text
    for leak in (f"mysql://u:{word}@h/{word}", f"password={word}", f"Token: {word} {word}"):
        shown = masking.mask(leak)
        assert shown.count("***") == 1
        assert shown.count(word) == leak.count(word) - 1


def test_names_of_fields_and_ids_stay_as_they_are() -> None:
    masking.remember("events")
    masking.remember("lag-seconds-2")
    found = {"events": 3, "lag-seconds-2": "lag-seconds-2", "aggregate_id": "sip://a:5060@b"}
    assert masking.mask_all(found) == found | {"lag-seconds-2": "***"}


def test_a_password_in_a_url_that_nobody_has_remembered_is_hidden_in_text_of_others() -> None:
    assert masking.mask_url("at s3://me:mine@h/x") == "at s3://me:***@h/x"


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
