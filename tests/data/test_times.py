import cftime
import numpy as np
import pytest
import xarray as xr

from credit_like.data import times

CALENDARS = ["standard", "noleap", "360_day", "all_leap"]


def axis(calendar):
    return xr.date_range(
        "1999-12-30T06:00:00", periods=900, freq="13h", calendar=calendar, use_cftime=calendar != "standard"
    ).values


@pytest.mark.parametrize("calendar", CALENDARS)
def test_seconds_text_and_times_are_the_same_thing(calendar):
    values = axis(calendar)
    assert times.calendar_of(values) == calendar
    seconds = times.seconds(values)
    assert set(np.diff(seconds)) == {13 * 3600}
    assert list(times.from_seconds(seconds, calendar)) == list(
        values.astype("datetime64[s]") if calendar == "standard" else values
    )
    for value, second in zip(values[:50], seconds, strict=False):
        assert times.parse(times.to_text(value), calendar) == second


@pytest.mark.parametrize("calendar", CALENDARS)
def test_year_fraction_against_the_calendar_itself(calendar):
    values = axis(calendar)
    days = {"noleap": 365, "360_day": 360, "all_leap": 366}
    for value, fraction in zip(values, times.year_fraction(values), strict=True):
        date = cftime.datetime.strptime(times.to_text(value), "%Y-%m-%dT%H:%M:%S", calendar=calendar)
        year = days.get(calendar) or (366 if date.year % 4 == 0 and date.year != 1900 else 365)
        assert fraction == pytest.approx((date.dayofyr - 1 + date.hour / 24) / year, abs=1e-12)


@pytest.mark.parametrize("calendar", CALENDARS)
def test_a_date_without_a_time_is_its_midnight(calendar):
    assert times.parse("1991-08-08", calendar) == times.parse("1991-08-08T00:00:00", calendar)
    assert times.parse("1991-08-08T06", calendar) == times.parse("1991-08-08T06:00:00", calendar)


def test_a_day_that_the_calendar_does_not_have():
    assert times.parse("2001-02-30T00:00:00", "360_day")
    with pytest.raises(ValueError):
        times.parse("2001-02-30T00:00:00", "noleap")
    with pytest.raises(ValueError):
        times.parse("2001-02-30T00:00:00", "standard")


@pytest.mark.parametrize("count", [40, 50, 200])
@pytest.mark.parametrize("step", [1, 3, 6, 12, 24, 5])
@pytest.mark.parametrize("number", [10, 50, 399, 1460, 1561, 14612])
def test_times_are_spread_over_the_period_and_the_hours_of_the_day(number, step, count):
    axis = 3600 * step * np.arange(number) + 3 * 3600
    chosen = times.spread(axis, count, 3600 * step)
    assert len(np.unique(chosen)) == len(chosen) <= count
    assert (np.diff(chosen) > 0).all()
    if number <= count:
        assert len(chosen) == number
        return
    per_day = 24 // step if 24 % step == 0 else 1
    if number >= count * per_day:
        assert len(chosen) == count
        assert np.diff(chosen, prepend=0, append=number).max() <= number / count + per_day + 1
        often = np.unique(axis[chosen] % 86400, return_counts=True)[1] if per_day > 1 else np.array([count])
        assert len(often) == min(per_day, count)
        assert often.max() - often.min() <= 1


def test_times_are_spread_where_some_are_left_out():
    axis = 21600 * np.delete(np.arange(4000), np.arange(1001, 2003))
    chosen = times.spread(axis, 50, 21600)
    assert len(chosen) == 50
    assert np.unique(axis[chosen] % 86400, return_counts=True)[1].min() >= 11
