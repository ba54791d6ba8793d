"""The form in which tables and figures show units, levels, leads and positions."""

from __future__ import annotations

import re

import numpy as np
import xarray as xr
from numpy.typing import NDArray

DIMENSIONLESS = ("", "1", "(0 - 1)", "0-1", "dimensionless", "unitless", "none", "~", "-")
"""Units of numbers without any."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FACTOR = re.compile(r"([A-Za-zµ°%]+)(?:\*\*|\^)?([-+]?\d+)?")
_HECTOPASCAL = {
    "hpa": 1.0,
    "mbar": 1.0,
    "millibar": 1.0,
    "millibars": 1.0,
    "mb": 1.0,
    "kpa": 10.0,
    "pa": 0.01,
    "pascal": 0.01,
}


def units_text(units: str, power: int = 1) -> str:
    """Return units as print has them: `m s⁻¹` for `m s**-1`, `m s-1` and `m/s`; nothing for dimensionless ones.

    power: of what is shown; `m² s⁻²` for 2 and `m/s`.
    """
    text = units.strip()
    if text in DIMENSIONLESS:
        return ""
    factors = []
    for number, part in enumerate(re.split(r"\s*/\s*", text)):
        for word in part.replace("·", " ").replace(".", " ").split():
            match = _FACTOR.fullmatch(word)
            if match is None:
                return text if power == 1 else f"({text})" + str(power).translate(_SUPERSCRIPTS)
            exponent = int(match[2] or 1) * (-power if number else power)
            factors.append(match[1] + (str(exponent).translate(_SUPERSCRIPTS) if exponent != 1 else ""))
    return " ".join(factors)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 forecast`, `2 forecasts`, `2 processes`, `2 batches`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def level_text(level: float, units: str) -> str:
    """Return a level with its units, pressures in hPa: `850 hPa`, `2 m`, or `level 3` where the units are unknown."""
    if (factor := _HECTOPASCAL.get(units.strip().lower())) is not None:
        return f"{level * factor:g} hPa"
    shown = units_text(units)
    return f"{level:g} {shown}" if shown and shown != "level" else f"level {level:g}"


def channel_text(name: str, level_units: str) -> str:
    """Return `u 850 hPa` for the channel `u@85000` on a level coordinate in Pa."""
    variable, _, level = name.partition("@")
    return f"{variable} {level_text(float(level), level_units)}" if level else variable


def level_units_of(results: xr.Dataset) -> str:
    """Return the units of the level coordinate of scores, empty where they are unknown."""
    return str(results["level"].attrs.get("units", "")) if "level" in results.coords else ""


def times_text(results: xr.Dataset) -> str:
    """Return over how many initial times scores are means: `21 initial times`, or `12 to 21` if not all leads have as many."""
    most = int(results["initial_times"])
    fewest = int(results["initial_times_of_lead"].min()) if "initial_times_of_lead" in results else most
    return f"{fewest} to {most} initial times" if fewest < most else counted(most, "initial time")


def region_text(results: xr.Dataset, region: str) -> str:
    """Return the name of a region of scores, of which `global` is all of a grid that may be regional."""
    return "whole regional grid" if region == "global" and results.attrs.get("grid") == "regional" else region


def exponent_of(values: NDArray[np.float64]) -> int:
    """Return the power of ten, in steps of three, to write values with; 0 where the largest is 0.01 to 99 999."""
    finite = np.abs(values[np.isfinite(values)])
    largest = float(finite.max()) if finite.size else 0.0
    if largest == 0 or 1e-2 <= largest < 1e5:
        return 0
    return 3 * int(np.floor(np.log10(largest) / 3))


def exponent_text(exponent: int) -> str:
    """Return `10⁻⁵`."""
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def scaled_units(units: str, exponent: int) -> str:
    """Return `10⁻³ kg kg⁻¹`: the units of values that were divided by a power of ten."""
    return " ".join(part for part in (exponent_text(exponent) if exponent else "", units_text(units)) if part)


def with_units(name: str, units: str, exponent: int = 0) -> str:
    """Return `q 850 hPa (10⁻³ kg kg⁻¹)`."""
    shown = scaled_units(units, exponent)
    return f"{name} ({shown})" if shown else name


def hours_text(lead: np.timedelta64) -> str:
    """Return a lead in hours, the one unit of tables and figures: `72 h`."""
    return f"{lead / np.timedelta64(1, 'h'):g} h"


def longitude_text(degrees: float) -> str:
    """Return `80°W` for 280 and for −80."""
    east = (degrees + 180) % 360 - 180
    if np.isclose(abs(east), 180) or np.isclose(east, 0):
        return f"{abs(east):g}°"
    return f"{abs(east):g}°{'E' if east > 0 else 'W'}"


def latitude_text(degrees: float) -> str:
    """Return `30°N`."""
    return "0°" if np.isclose(degrees, 0) else f"{abs(degrees):g}°{'N' if degrees > 0 else 'S'}"


def weights_text(checkpoint: str, weights: str) -> str:
    """Return the name of the weights (`ema` or `raw`) of a checkpoint, by which forecasts and their scores refer to them."""
    return f"{checkpoint}, {weights} weights"
