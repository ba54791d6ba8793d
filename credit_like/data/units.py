"""Conversion between the units of weather data.

A unit string is a product of powers (`kg m-2 s-1`, `m**2 s**-2`, `W/m^2`); each symbol is a factor times powers of kg,
m, s, K.
"""

from __future__ import annotations

import math
import re

from credit_like.errors import UserError
from credit_like.naming import DIMENSIONLESS

# symbol: (factor, offset to the base unit, exponents of kg, m, s, K)
_SYMBOLS: dict[str, tuple[float, float, tuple[int, int, int, int]]] = {
    "1": (1, 0, (0, 0, 0, 0)),
    "%": (0.01, 0, (0, 0, 0, 0)),
    "percent": (0.01, 0, (0, 0, 0, 0)),
    "kg": (1, 0, (1, 0, 0, 0)),
    "g": (1e-3, 0, (1, 0, 0, 0)),
    "mg": (1e-6, 0, (1, 0, 0, 0)),
    "m": (1, 0, (0, 1, 0, 0)),
    "gpm": (1, 0, (0, 1, 0, 0)),
    "mm": (1e-3, 0, (0, 1, 0, 0)),
    "cm": (1e-2, 0, (0, 1, 0, 0)),
    "km": (1e3, 0, (0, 1, 0, 0)),
    "dam": (10, 0, (0, 1, 0, 0)),
    "s": (1, 0, (0, 0, 1, 0)),
    "min": (60, 0, (0, 0, 1, 0)),
    "h": (3600, 0, (0, 0, 1, 0)),
    "hr": (3600, 0, (0, 0, 1, 0)),
    "hour": (3600, 0, (0, 0, 1, 0)),
    "d": (86400, 0, (0, 0, 1, 0)),
    "day": (86400, 0, (0, 0, 1, 0)),
    "K": (1, 0, (0, 0, 0, 1)),
    "degC": (1, 273.15, (0, 0, 0, 1)),
    "C": (1, 273.15, (0, 0, 0, 1)),
    "celsius": (1, 273.15, (0, 0, 0, 1)),
    "Celsius": (1, 273.15, (0, 0, 0, 1)),
    "degrees_C": (1, 273.15, (0, 0, 0, 1)),
    "degF": (5 / 9, 459.67 * 5 / 9, (0, 0, 0, 1)),
    "Pa": (1, 0, (1, -1, -2, 0)),
    "hPa": (100, 0, (1, -1, -2, 0)),
    "kPa": (1e3, 0, (1, -1, -2, 0)),
    "mb": (100, 0, (1, -1, -2, 0)),
    "mbar": (100, 0, (1, -1, -2, 0)),
    "millibar": (100, 0, (1, -1, -2, 0)),
    "millibars": (100, 0, (1, -1, -2, 0)),
    "J": (1, 0, (1, 2, -2, 0)),
    "kJ": (1e3, 0, (1, 2, -2, 0)),
    "MJ": (1e6, 0, (1, 2, -2, 0)),
    "W": (1, 0, (1, 2, -3, 0)),
    "knot": (1852 / 3600, 0, (0, 1, -1, 0)),
    "knots": (1852 / 3600, 0, (0, 1, -1, 0)),
    "kt": (1852 / 3600, 0, (0, 1, -1, 0)),
}
_WORDS = {
    "kelvin": "K",
    "degk": "K",
    "degree_kelvin": "K",
    "°c": "degC",
    "deg c": "degC",
    "deg_c": "degC",
    "degree_c": "degC",
    "degree_celsius": "degC",
    "degrees_celsius": "degC",
    "degree celsius": "degC",
    "degrees celsius": "degC",
    "°f": "degF",
    "degree_fahrenheit": "degF",
    "degrees_fahrenheit": "degF",
    "pascal": "Pa",
    "meter": "m",
    "metre": "m",
    "meters": "m",
    "metres": "m",
    **dict.fromkeys((*DIMENSIONLESS, "fraction", "(0-1)", "0 - 1"), "1"),
}
_TOKEN = re.compile(r"([A-Za-z%_]+|1)(?:\*\*|\^)?([+-]?\d+)?")
_WATER_DEPTH = 1e-3  # m of liquid water per kg m-2
_MASS_PER_AREA, _DEPTH = (1, -2), (0, 1)  # exponents of kg and m


def _parse(text: str) -> tuple[float, float, tuple[int, ...]]:
    text = _WORDS.get(text.strip().lower(), text.strip())
    factor, offset, powers = 1.0, 0.0, [0, 0, 0, 0]
    sign = 1
    for part in re.split(r"(/)|[\s.·]+|(?<!\*)\*(?!\*)", text):
        if not part:
            continue
        if part == "/":
            sign = -1
            continue
        match = _TOKEN.fullmatch(part)
        symbol = _WORDS.get(match[1].lower(), match[1]) if match else ""
        if match is None or symbol not in _SYMBOLS:
            raise UserError(f"expected units made of {', '.join(_SYMBOLS)}, got {text!r}")
        scale, shift, exponents = _SYMBOLS[symbol]
        power = sign * int(match[2] or 1)
        factor *= scale**power
        offset = shift if text == part else 0.0
        powers = [total + power * exponent for total, exponent in zip(powers, exponents, strict=True)]
    return factor, offset, tuple(powers)


def same_dimensions(one: str, other: str) -> bool:
    """Return whether two units are of the same dimensions; unknown ones are of none. A mass per area is not a depth here."""
    try:
        return _parse(one)[2] == _parse(other)[2]
    except UserError:
        return False


def same(one: str, other: str) -> bool | None:
    """Return whether two units are the same, however they are written; None where one of them is missing or unknown."""
    if one.strip() == other.strip():
        return True
    try:
        found = between(one, other)
    except UserError:
        return False
    return None if found is None else math.isclose(found[0], 1) and math.isclose(found[1], 0, abs_tol=1e-9)


def between(source: str, target: str) -> tuple[float, float] | None:
    """Return `conversion(source, target)`, or None where one of them is missing or unknown.

    Raises UserError for units of different dimensions.
    """
    for text in (source, target):
        try:
            _parse(text)
        except UserError:
            return None
    return conversion(source, target) if source.strip() and target.strip() else None


def conversion(source: str, target: str) -> tuple[float, float]:
    """Return (a, b) of target = a · source + b.

    A mass of water per area counts as a depth of liquid water (1 kg m-2 = 1 mm). Raises UserError for an unknown unit
    and for units of different dimensions.
    """
    if source.strip() == target.strip():
        return 1.0, 0.0
    (f0, o0, p0), (f1, o1, p1) = _parse(source), _parse(target)
    if p0 != p1:
        dimensions = (p0[:2], p1[:2]) if p0[2:] == p1[2:] else None
        if dimensions == (_MASS_PER_AREA, _DEPTH):
            f0 *= _WATER_DEPTH
        elif dimensions == (_DEPTH, _MASS_PER_AREA):
            f0 /= _WATER_DEPTH
        else:
            raise UserError(f"expected units that {source!r} converts to, got {target!r}")
    return f0 / f1, (o0 - o1) / f1
