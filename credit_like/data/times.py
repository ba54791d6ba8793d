"""Times in any CF calendar: text ↔ time ↔ seconds.

Times of the standard calendar are numpy `datetime64[s]`; those of other calendars (noleap, 360_day, …) are
`cftime.datetime` objects. `seconds` counts from 1970-01-01 in the times' own calendar, so that differences and
comparisons are integers.
"""

from __future__ import annotations

from typing import Any

import cftime
import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError

Times = NDArray[Any]
_DAY = 86400  # s
_MONTHS = np.array([31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])  # days in a leap year


def calendar_of(times: Times) -> str:
    """Return `standard`, or the calendar of cftime objects."""
    if times.dtype.kind == "M" or not len(times):
        return "standard"
    return str(times[0].calendar)


def seconds(times: Times) -> NDArray[np.int64]:
    """Return seconds since 1970-01-01 in the times' calendar."""
    if times.dtype.kind == "M":
        return times.astype("datetime64[s]").astype(np.int64)
    since = cftime.date2num(times, "seconds since 1970-01-01", calendar=calendar_of(times))
    return np.asarray(np.rint(since), np.int64)


def whole_seconds(times: Times) -> Times:
    """Round dates, or differences of dates, to seconds.

    An hour that is a part of a day in floating point may be some microseconds early.
    """
    kind = "datetime64" if times.dtype.kind == "M" else "timedelta64"
    rounded = times.astype(f"{kind}[us]") + np.timedelta64(500, "ms")
    return np.asarray(rounded.astype(f"{kind}[s]"))


def for_xarray(times: Times) -> Times:
    """Return times in nanoseconds, as xarray has them, or in seconds where these do not reach: they end in April 2262."""
    if times.dtype.kind != "M":
        return times
    near = times.astype("datetime64[s]")
    fine = near.astype("datetime64[ns]")
    return fine if (fine.astype("datetime64[s]") == near).all() else near


def from_seconds(values: NDArray[np.int64], calendar: str) -> Times:
    """Convert seconds to times; the inverse of `seconds`."""
    if calendar == "standard":
        return np.asarray(values, np.int64).astype("datetime64[s]")
    return np.asarray(cftime.num2date(values, "seconds since 1970-01-01", calendar=calendar), dtype=object)


def one_time(second: int, calendar: str) -> Any:
    """Return the time of a number of seconds."""
    return from_seconds(np.array([second]), calendar)[0]


def to_text(time: Any) -> str:
    """Format as `YYYY-MM-DDTHH:MM:SS`."""
    return str(time.astype("datetime64[s]")) if isinstance(time, np.datetime64) else time.strftime("%Y-%m-%dT%H:%M:%S")


def compact(time: Any) -> str:
    """Format as `YYYYMMDDTHHMMSS`, for the names of files."""
    return to_text(time).replace("-", "").replace(":", "")


def parse(text: str, calendar: str) -> int:
    """Parse an ISO time of the experiment and return seconds since 1970-01-01.

    Raises UserError for a day that the calendar does not have.
    """
    try:
        if calendar == "standard":
            return int(np.datetime64(text, "s").astype(np.int64))
        date, _, clock = text.partition("T")
        of_day = map(int, clock.split(":")) if clock else ()
        time = cftime.datetime(*map(int, date.split("-")), *of_day, calendar=calendar)
    except ValueError as error:
        raise UserError(str(error)) from error
    return int(seconds(np.array([time], dtype=object))[0])


def year_fraction(times: Times) -> NDArray[np.float64]:
    """Return the elapsed fraction of the year at each time, 0 ≤ f < 1, for any length of the year."""
    if times.dtype.kind == "M":
        times = times.astype("datetime64[s]")
        first = times.astype("datetime64[Y]")
        length = (first + 1).astype("datetime64[s]") - first.astype("datetime64[s]")
        return np.asarray((times - first) / length, np.float64)
    since = seconds(times)
    calendar = calendar_of(times)
    bounds = {
        year: [parse(f"{year + shift:04d}-01-01T00:00:00", calendar) for shift in (0, 1)]
        for year in {time.year for time in times}
    }
    ends = np.array([bounds[time.year] for time in times], np.float64)
    return np.asarray((since - ends[:, 0]) / (ends[:, 1] - ends[:, 0]), np.float64)


def nearest_in_year(axis: Times, wanted: Times) -> NDArray[np.int64]:
    """Return the position on the axis of a climatological year for each wanted time.

    That is a time of the nearest day of the year, which is the same month and day where the axis has it, and of these the
    nearest in the day. 29 February is nearest to 28 February. The calendars may differ.
    """
    (there, second_there), (here, second_here) = _in_year(axis), _in_year(wanted)
    days = _the_shorter_way(there[None, :] - here[:, None], 2 * int(_MONTHS.sum()))
    return np.argmin(days * _DAY + _the_shorter_way(second_there[None, :] - second_here[:, None], _DAY), axis=1)


def _in_year(times: Times) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the day of a leap year in half days and the second of the day; 30 February is half a day after the 29th."""
    if times.dtype.kind == "M":
        since = times.astype("datetime64[s]")
        months, days = since.astype("datetime64[M]"), since.astype("datetime64[D]")
        month = months.astype(np.int64) % 12
        day = (days - months.astype("datetime64[D]")).astype(np.int64)
        second = (since - days).astype(np.int64)
    else:
        parts = [(t.month - 1, t.day - 1, (t.hour * 60 + t.minute) * 60 + t.second) for t in times]
        month, day, second = np.array(parts, np.int64).reshape(-1, 3).T
    first = np.cumsum(_MONTHS) - _MONTHS
    return 2 * first[month] + np.minimum(2 * day, 2 * _MONTHS[month] - 1), second


def _the_shorter_way(apart: NDArray[np.int64], around: int) -> NDArray[np.int64]:
    """Return distances on a circle, given differences of positions on it."""
    apart = np.abs(apart)
    return np.minimum(apart, around - apart)


def spread(times: NDArray[np.int64], count: int, step: int) -> NDArray[np.int64]:
    """Return the indices of at most `count` of these times (seconds, `step` apart), evenly spread and each time of day as often.

    An even stride alone would often be a whole number of days.
    """
    if len(times) <= count:
        return np.arange(len(times))
    per_day = 86400 // step if 86400 % step == 0 else 1
    hour = times // step % per_day
    chosen = []
    for number, first in enumerate(np.linspace(0, len(times), count, endpoint=False).astype(int)):
        found = np.flatnonzero(hour[first : first + per_day] == number % per_day)
        chosen.append(first + (found[0] if len(found) else 0))
    return np.unique(chosen)
