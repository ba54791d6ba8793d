"""Durations, sizes and times as text and back."""

import datetime as dt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_like.schema.base import Section, format_duration, format_size, parse_duration, parse_size
from credit_like.schema.data import parse_time

positive = st.timedeltas(dt.timedelta(milliseconds=1), dt.timedelta(days=10_000)).map(
    lambda d: dt.timedelta(milliseconds=d // dt.timedelta(milliseconds=1))
)


@settings(deadline=None)
@given(positive)
def test_durations_survive_a_round_trip(duration):
    assert parse_duration(format_duration(duration)) == duration


@settings(deadline=None)
@given(st.integers(1, 10_000), st.sampled_from([("s", 1), ("min", 60), ("h", 3600), ("d", 86400)]))
def test_durations_mean_what_their_units_say(number, unit):
    name, seconds = unit
    assert parse_duration(f"{number}{name}").total_seconds() == number * seconds
    assert parse_duration(f" {number} {name} ").total_seconds() == number * seconds


@settings(deadline=None)
@given(st.integers(0, 99), st.integers(0, 59), st.integers(1, 59))
def test_walltimes_are_hours_minutes_seconds(hours, minutes, seconds):
    expected = dt.timedelta(hours=hours, minutes=minutes, seconds=seconds)
    assert parse_duration(f"{hours:02d}:{minutes:02d}:{seconds:02d}") == expected


@pytest.mark.parametrize(
    "text", ["6", "6 hours", "h", "-6h", "0h", "00:00:00", "6h30", "12:60:00", "", None, 6, True, "1e3s"]
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(text)


@settings(deadline=None)
@given(st.datetimes(dt.datetime(1000, 1, 1), dt.datetime(9999, 12, 31)).map(lambda t: t.replace(microsecond=0)))
def test_times_survive_a_round_trip(time):
    text = parse_time(time)
    assert dt.datetime.fromisoformat(text) == time
    assert parse_time(text) == text
    assert parse_time(text.replace("T", " ")) == text


@settings(deadline=None)
@given(st.lists(st.datetimes(dt.datetime(1000, 1, 1), dt.datetime(9999, 12, 31)), min_size=2))
def test_times_sort_as_their_text(times):
    assert [parse_time(time.replace(microsecond=0)) for time in sorted(times)] == sorted(
        parse_time(time.replace(microsecond=0)) for time in times
    )


def test_times_may_leave_out_the_clock_and_have_days_of_other_calendars():
    assert parse_time("2020-01-31") == "2020-01-31T00:00:00"
    assert parse_time("2020-01-31T18") == "2020-01-31T18:00:00"
    assert parse_time(dt.date(2020, 1, 31)) == "2020-01-31T00:00:00"
    assert parse_time("2020-02-30T06:30") == "2020-02-30T06:30:00"


@pytest.mark.parametrize(
    "text",
    ["2020", "2020-13-01", "2020-00-01", "2020-01-32", "2020-01-01T24", "2020-01-01T12:60", "1.1.2020", None, 2020],
)
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="expected a time"):
        parse_time(text)


class Numbers(Section):
    count: int = 1
    size: float | None = 2.0


def test_true_is_no_number_and_nothing_may_replace_a_default():
    assert Numbers(size=None).model_dump() == {"count": 1, "size": None}
    with pytest.raises(ValueError, match="expected a number, got true"):
        Numbers(count=True)
    with pytest.raises(ValueError, match="expected a number, got false"):
        Numbers(size=False)
    with pytest.raises(ValueError, match="finite"):
        Numbers(size=float("nan"))


@settings(deadline=None)
@given(st.integers(1, 2**62))
def test_sizes_survive_a_round_trip(size):
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("100GB", 100 * 10**9), ("1.5 TB", 1_500_000_000_000), ("1kB", 1000), (7, 7), (" 3MB ", 3_000_000)],
)
def test_sizes_mean_what_their_units_say(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["100", "0GB", "-1GB", "1 GiB", "0.1B", "", None, 0, -1, True, 1.5, 2**63])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a size such as 100GB"):
        parse_size(text)
