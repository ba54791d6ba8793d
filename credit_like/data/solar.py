"""Insolation at the top of the atmosphere, computed from time and place.

Symbols: φ latitude, δ declination, h hour angle, h₀ hour angle of sunset, γ day angle = 2π · elapsed fraction of the
year.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from credit_like.data.times import Times, from_seconds, seconds, to_text, year_fraction
from credit_like.errors import UserError, cut, reason
from credit_like.small_files import read_small

SOLAR_CONSTANT = 1360.8
"""W m-2 at the mean distance of the Sun (Kopp and Lean 2011, doi:10.1029/2010GL045777)."""
_PIECE = 3 * 3600  # s over which declination and distance are held constant: they change by less than 0.05° and 3e-5

Real = NDArray[np.float64]


def orbit(times: Times) -> tuple[Real, Real, Real]:
    """Return declination (rad), equation of time (rad of hour angle) and (mean distance / distance)², each (T,).

    Fourier series of Spencer (1971), Search 2 (5), 172, over the fraction of the calendar's year. Leap days shift this
    against the orbit: from 1979 to 2023 the declination is within 0.006 rad, the distance factor within 1.1e-3 and the
    equation of time within 42 s of those of the Astronomical Almanac. In other calendars the year is stretched to the
    calendar's length.
    """
    day_angle = 2 * np.pi * year_fraction(times)
    cos, sin = (lambda k: np.cos(k * day_angle)), (lambda k: np.sin(k * day_angle))
    declination = (
        0.006918
        - 0.399912 * cos(1)
        + 0.070257 * sin(1)
        - 0.006758 * cos(2)
        + 0.000907 * sin(2)
        - 0.002697 * cos(3)
        + 0.00148 * sin(3)
    )
    equation = 0.000075 + 0.001868 * cos(1) - 0.032077 * sin(1) - 0.014615 * cos(2) - 0.040849 * sin(2)
    distance = 1.000110 + 0.034221 * cos(1) + 0.001280 * sin(1) + 0.000719 * cos(2) + 0.000077 * sin(2)
    return declination, equation, distance


@dataclass(frozen=True)
class Irradiance:
    """Annual means of total solar irradiance at the mean distance of the Sun, W m-2, as read from a table.

    The value of a year holds in its middle, and values between are interpolated linearly. The first half of the first year
    has its value, and the second half of the last year has the last one. Other years are an error.
    """

    path: str
    years: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, times: Times) -> Real:
        """Return (T,) in W m-2. Raises UserError for a year that is not within the table's."""
        fraction = year_fraction(times)
        if times.dtype.kind == "M":
            year = times.astype("datetime64[Y]").astype(np.int64) + 1970
        else:
            year = np.array([time.year for time in times], np.int64)
        outside = (year < self.years[0]) | (year > self.years[-1])
        if outside.any():
            raise UserError(
                f"expected years from {self.years[0]} to {self.years[-1]}, which {self.path} has, got "
                f"{to_text(times[outside][0])}; add lines to the table or change the period"
            )
        return np.asarray(np.interp(year + fraction, np.array(self.years) + 0.5, self.values), np.float64)


@lru_cache
def read_irradiance(path: str) -> Irradiance:
    """Read lines `year value` (blanks or a comma between; `#` begins a comment), in W m-2 and in the order of time.

    Raises UserError with the line for anything else.
    """
    years: list[int] = []
    values: list[float] = []
    try:
        lines = read_small(Path(path)).decode().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"expected a table of years and W m-2, got {path}: {reason(error)}; change the path") from error
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        year, value = _parsed(text, f"{path}:{number}")
        if years and year <= years[-1]:
            raise UserError(f"{path}:{number}: expected a year after {years[-1]}, got {year}; sort the table")
        years.append(year)
        values.append(value)
    if not years:
        raise UserError(f"expected lines of a year and its W m-2 in {path}, got none; add them")
    return Irradiance(path, tuple(years), tuple(values))


def _parsed(text: str, where: str) -> tuple[int, float]:
    """Return year and irradiance of a line."""
    try:
        year, value = text.replace(",", " ").split()
        parsed = int(year), float(value)
    except ValueError as error:
        raise UserError(
            f"{where}: expected a whole year and its W m-2, got {cut(repr(text), 80)}; change the line"
        ) from error
    if not (np.isfinite(parsed[1]) and parsed[1] > 0):
        raise UserError(f"{where}: expected W m-2 above 0, got {parsed[1]:g}; change the line")
    return parsed


def insolation(
    times: Times,
    calendar: str,
    step_seconds: int,
    latitude: Real,
    longitude: Real,
    irradiance: Irradiance | None = None,
) -> NDArray[np.float32]:
    """Return (T, H, W), J m-2: insolation accumulated over the step that ends at each time.

    S (d̄/d)² ∫ max(0, sin φ sin δ + cos φ cos δ cos h) dt, integrated exactly over h in pieces of at most 3 h, in which
    the orbit is held constant. S is `SOLAR_CONSTANT`, or that of a table at the end of the step. `latitude` (H,) and
    `longitude` (W,) in degrees; times are UTC.
    """
    pieces = max(1, -(-step_seconds // _PIECE))
    length = step_seconds / pieces
    total = np.zeros((len(times), len(latitude), len(longitude)))
    phi, lam = np.deg2rad(latitude), np.deg2rad(longitude)
    ends = seconds(times)
    constant = np.full(len(times), SOLAR_CONSTANT) if irradiance is None else irradiance.at(times)
    for piece in range(pieces):
        middle = ends - step_seconds + (piece + 0.5) * length
        declination, equation, distance = orbit(from_seconds(np.rint(middle).astype(np.int64), calendar))
        of_day = 2 * np.pi * ((middle / 86400) % 1.0) - np.pi
        half = np.pi * length / 86400
        for t in range(len(times)):
            hour_W = of_day[t] + equation[t] + lam
            along_H = np.sin(phi) * np.sin(declination[t])
            across_H = np.cos(phi) * np.cos(declination[t])
            lit = _lit(along_H, across_H, hour_W + half) - _lit(along_H, across_H, hour_W - half)
            total[t] += constant[t] * distance[t] * lit * (86400 / (2 * np.pi))
    return total.astype(np.float32)


def _lit(along_H: Real, across_H: Real, hour_W: Real) -> Real:
    """Return (H, W): ∫ from −π to h of max(0, along + across · cos h′) dh′, continued over whole days."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.clip(-along_H / across_H, -1, 1)
    sunset_H = np.where(across_H > 1e-12, np.arccos(np.nan_to_num(ratio)), np.where(along_H > 0, np.pi, 0.0))
    days_W = np.floor((hour_W + np.pi) / (2 * np.pi))
    hour_W = hour_W - 2 * np.pi * days_W
    lit_HW = np.clip(hour_W[None, :], -sunset_H[:, None], sunset_H[:, None])
    half_day_H = along_H * sunset_H + across_H * np.sin(sunset_H)
    part_HW = along_H[:, None] * lit_HW + across_H[:, None] * np.sin(lit_HW) + half_day_H[:, None]
    return np.asarray(part_HW + days_W[None, :] * 2 * half_day_H[:, None])
