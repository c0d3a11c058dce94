"""Local time and UTC, both ways: nothing is left out and nothing is put outside of its window."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventpub.errors import StoreError
from eventpub.sources.mysql.values import Zone, fixed_zone, named_zone
from tests.store.tables import SECOND, utc

HOUR = 3600 * SECOND
BERLIN = named_zone("Europe/Berlin")
NAMES = ["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "Africa/Casablanca", "UTC"]
ZONES = {name: named_zone(name) for name in NAMES}
BACK = utc("2025-10-26 01:00:00")  # 03:00 summer time becomes 02:00
FORTH = utc("2025-03-30 01:00:00")  # 02:00 becomes 03:00 summer time

instants = st.integers(0, utc("2060-01-01"))


@settings(deadline=None)
@given(st.sampled_from(NAMES), instants)
def test_local_time_is_what_the_rules_of_the_zone_say(name: str, instant: int) -> None:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=instant)
    wall = moment.astimezone(ZoneInfo(name)).replace(tzinfo=UTC)
    expected = (wall - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert ZONES[name].local(instant) == expected


@settings(deadline=None)
@given(
    st.sampled_from(NAMES),
    instants,
    st.integers(1, 400 * 24 * HOUR),
    st.lists(st.floats(0, 1), min_size=1),
)
def test_each_row_is_found_in_the_window_it_was_written_in(
    name: str, after: int, length: int, places: list[float]
) -> None:
    zone, upto = ZONES[name], after + length
    written = [after + max(1, round(place * length)) for place in places]
    local = np.array([zone.local(t) for t in written], np.int64)
    first, last = zone.local_range(after, upto)
    assert first <= local.min()
    assert local.max() <= last
    found = zone.utc(local, after, upto)
    assert (found > after).all()
    assert (found <= upto).all()
    assert [zone.local(int(t)) for t in found] == local.tolist()


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.lists(instants, min_size=2, max_size=6, unique=True))
def test_adjoining_windows_leave_no_local_time_out(name: str, bounds: list[int]) -> None:
    zone = ZONES[name]
    bounds.sort()
    ranges = [zone.local_range(a, b) for a, b in pairwise(bounds)]
    for (_, last), (first, _) in pairwise(ranges):
        assert first <= last + 1


def test_an_hour_that_is_lived_twice_is_read_twice_and_stays_in_its_window() -> None:
    assert (BACK, HOUR) in BERLIN.repeated
    before = BERLIN.local_range(BACK - 2 * HOUR, BACK - 1)
    behind = BERLIN.local_range(BACK - 1, BACK + 2 * HOUR)
    assert before == (utc("2025-10-26 01:00:00.000001"), utc("2025-10-26 02:59:59.999999"))
    assert behind == (utc("2025-10-26 02:00:00"), utc("2025-10-26 04:00:00"))
    half_past_two = np.array([utc("2025-10-26 02:30:00")])
    assert BERLIN.utc(half_past_two, BACK - 2 * HOUR, BACK - 1) == [BACK - HOUR // 2]
    assert BERLIN.utc(half_past_two, BACK - 1, BACK + 2 * HOUR) == [BACK + HOUR // 2]


def test_a_local_time_that_never_was_is_read_at_the_change() -> None:
    never = np.array([utc("2025-03-30 02:30:00")])
    first, last = BERLIN.local_range(FORTH - 1, FORTH)
    assert first <= never[0] <= last
    assert BERLIN.utc(never, FORTH - 1, FORTH) == [FORTH]


@pytest.mark.parametrize(
    ("name", "hours"), [("+02:00", 2), ("-05:30", -5.5), ("UTC", 0), ("Z", 0), ("+0:15", 0.25)]
)
def test_offsets_are_zones_without_rules(name: str, hours: float) -> None:
    zone = fixed_zone(name)
    assert zone == Zone(name, (), (round(hours * HOUR),))


def test_an_unknown_zone_is_named() -> None:
    with pytest.raises(StoreError, match="Europe/Atlantis") as caught:
        named_zone("Europe/Atlantis")
    assert caught.value.code == "store.time_zone_unknown"
