"""The largest of several errors, for comparisons of numbers in different layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import SupportsFloat


def largest(errors: Iterable[SupportsFloat]) -> float:
    """Return the largest error; infinity if one of them is not a number, which Python's `max` may pass over."""
    values = [float(error) for error in errors]
    return math.inf if any(map(math.isnan, values)) else max(values)


def worst(errors: Iterable[tuple[SupportsFloat, str]]) -> tuple[float, str]:
    """Return the largest error with its name; one that is not a number is infinite."""
    return max((largest([error]), name) for error, name in errors)
