"""Reduced grids, whose rows have the fewer points the nearer they are to a pole, as regular ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Rows:
    """Linear interpolation along the rows of a reduced grid; a point with a missing neighbour is missing."""

    west: NDArray[np.int64]
    east: NDArray[np.int64]
    fraction: NDArray[np.float64]

    def __call__(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return (…, rows, columns) of values (…, points)."""
        west, east = values[..., self.west], values[..., self.east]
        return np.where(self.fraction == 0, west, west + self.fraction.astype(values.dtype) * (east - west))


def regular_rows(per_row: NDArray[np.int64], longitude: NDArray[np.float64]) -> tuple[NDArray[np.float64], Rows] | None:
    """Return the longitudes of the longest row, and the interpolation of every row to them.

    Returns None unless every row goes around the globe from the same longitude at even spacing.
    """
    starts = np.concatenate([[0], np.cumsum(per_row)])
    lines = [longitude[a:b] for a, b in itertools.pairwise(starts)]
    if int(starts[-1]) != len(longitude) or not all(
        len(line) and np.abs(line - lines[0][0] - 360.0 / len(line) * np.arange(len(line))).max() < 2e-3
        for line in lines
    ):
        return None
    width = int(per_row.max())
    place = np.arange(width) * per_row[:, None]  # in units of 1 / width of the row's spacing: exact
    west, rest = place // width, place % width
    first = starts[:-1, None]
    east = first + (west + 1) % per_row[:, None]
    return lines[0][0] + 360.0 / width * np.arange(width), Rows(first + west, east, rest / width)
