"""How many pages a window has while the reader is far behind."""

from __future__ import annotations

from eventpub.spark.source import Pages


def counts(took: list[float], full: bool = True) -> list[int]:
    """The pages of each window, where the one before took so long."""
    pages, now, found = Pages(), 0.0, []
    pages.asked(full, now)
    for seconds in took:
        now += seconds
        pages.asked(full, now)
        found.append(pages.count)
    return found


def test_full_windows_that_are_done_soon_grow() -> None:
    assert counts([0.5] * 6) == [2, 4, 8, 16, 20, 20]


def test_windows_that_take_long_shrink_again() -> None:
    assert counts([0.5, 0.5, 2.0, 4.0, 4.0, 4.0]) == [2, 4, 4, 2, 1, 1]


def test_a_window_that_is_not_full_begins_anew() -> None:
    pages = Pages()
    for now in (0.0, 0.5, 1.0):
        pages.asked(True, now)
    assert pages.count == 4
    pages.asked(False, 1.5)
    assert pages.count == 1
    pages.asked(True, 100.0)
    assert pages.count == 1, "the time before it tells nothing of a full window's"
