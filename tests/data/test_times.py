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


def dates(start, periods, freq, calendar="standard"):
    return xr.date_range(start, periods=periods, freq=freq, calendar=calendar, use_cftime=calendar != "standard").values


@pytest.mark.parametrize("wanted", [*CALENDARS, "julian"])
@pytest.mark.parametrize(
    ("year", "calendar"), [(2020, "standard"), (2021, "standard"), (2001, "noleap"), (2001, "360_day")]
)
def test_the_time_of_a_climatological_year_has_the_same_month_day_and_hour(year, calendar, wanted):
    axis = dates(f"{year}-01-01", {2020: 366, 2021: 365, 2001: 365}[year] * 4, "6h", calendar)
    if calendar == "360_day":
        axis = axis[: 360 * 4]
    asked = dates("2019-06-01", 3 * 365 * 4, "6h", wanted)
    there = [times.to_text(time)[5:] for time in axis]
    got = [there[i] for i in times.nearest_in_year(axis, asked)]
    for time, found in zip(map(times.to_text, asked), got, strict=True):
        assert found[6:] == time[11:]
        if time[5:] in there:
            assert found == time[5:]
        else:  # the last of a month that is longer there, or what follows it
            assert time[5:10] in ("02-29", "02-30", *(f"{month:02d}-31" for month in range(1, 13)))
            month, day = map(int, found[:5].split("-"))
            assert (month, day) in (
                (int(time[5:7]), 28),
                (int(time[5:7]), 29),
                (int(time[5:7]), 30),
                (int(time[5:7]) % 12 + 1, 1),
            )


def test_the_nearest_time_of_a_sparse_climatological_year():
    monthly = dates("1900-01-01", 12, "MS") + np.timedelta64(14, "D")
    asked = np.array(
        ["2020-01-01T18", "2020-01-15T23", "2020-02-03", "2020-12-29", "2020-12-31T18", "2021-02-28"], "M8[s]"
    )
    np.testing.assert_array_equal(times.nearest_in_year(monthly, asked), [0, 0, 1, 11, 0, 1])
    daily = dates("2001-01-01T12", 365, "D", "noleap")
    asked = np.array(["2020-01-01T00", "2020-02-29T18", "2020-03-01T00", "2020-12-31T18"], "M8[s]")
    np.testing.assert_array_equal(times.nearest_in_year(daily, asked), [0, 58, 59, 364])
    six_hourly = dates("2001-01-01", 1460, "6h")
    asked = np.array(["2020-07-02T07", "2020-07-02T23", "2020-12-31T23"], "M8[s]")
    np.testing.assert_array_equal(times.nearest_in_year(six_hourly, asked) % 4, [1, 0, 0])


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
