"""Latitude-longitude grids and their area weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError

ROUNDING = 1e-4
"""Degrees by which coordinates may miss the decimals that they stand for: sums of steps, and numbers in single precision."""


@dataclass(frozen=True, eq=False)
class Grid:
    """A latitude-longitude grid as stored in the data; latitude may ascend or descend.

    `latitude` (H,) and `longitude` (W,) are in degrees. Raises UserError for coordinates that are not finite or not
    1-D, for a latitude outside ±90 or not monotonic, and for longitudes that repeat. Latitudes that differ from ±90 by
    rounding are ±90.
    """

    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name in ("latitude", "longitude"):
            values = np.asarray(getattr(self, name), np.float64)
            object.__setattr__(self, name, values)
            if values.ndim != 1 or not len(values):
                raise UserError(f"expected a 1-D {name} with at least one value, got shape {values.shape}")
            if not np.isfinite(values).all():
                raise UserError(
                    f"expected finite values of {name}, got {np.count_nonzero(~np.isfinite(values))} that are not"
                )
        is_pole = np.abs(np.abs(self.latitude) - 90) < ROUNDING
        object.__setattr__(self, "latitude", np.where(is_pole, np.copysign(90.0, self.latitude), self.latitude))
        steps = np.diff(self.latitude)
        if not (np.all(steps > 0) or np.all(steps < 0)):
            raise UserError("expected latitudes that ascend or descend throughout, got others; sort the source's rows")
        if np.abs(self.latitude).max() > 90:
            raise UserError(
                f"expected latitudes within ±90 degrees, got {self.latitude.min():g} to {self.latitude.max():g}"
            )
        if np.any(turn(np.diff(self.longitude)) == 0):
            raise UserError("expected each longitude once, got neighbours that are equal")
        first, last = self.longitude[0], self.longitude[-1]
        # The circle would have a column twice, and not close.
        if self.width > 2 and abs(abs(last - first) - 360) < ROUNDING:
            raise UserError(
                f"expected each longitude once, got {first:g} and {last:g}, which are the same; write the files without the last "
                "column, with xarray `dataset.isel(longitude=slice(-1))`"
            )

    @property
    def height(self) -> int:
        """Number of rows, H."""
        return len(self.latitude)

    @property
    def width(self) -> int:
        """Number of columns, W."""
        return len(self.longitude)

    @property
    def is_periodic(self) -> bool:
        """Whether the longitudes cover the full circle at even spacing."""
        if self.width < 2:
            return False
        spacing = turn(np.diff(self.longitude, append=self.longitude[:1]))
        # The last one closes the circle; rounding may have added up in it.
        return bool(np.allclose(spacing[:-1], spacing[0], rtol=1e-3) and np.isclose(spacing[-1], spacing[0], rtol=0.25))

    @property
    def is_global(self) -> bool:
        """Whether the longitudes cover the full circle and the rows reach both poles to within one row."""
        if self.height < 2 or not self.is_periodic:
            return False
        row = 1.01 * np.abs(np.diff(self.latitude)).max()
        return bool(90 - self.latitude.max() < row and 90 + self.latitude.min() < row)

    def latitude_weights(self) -> NDArray[np.float64]:
        """Return the area weights (H,) of the rows, of mean 1: w_i = |sin b_{i+1} − sin b_i| with cell bounds b.

        The bounds are the midpoints between rows, and ±90° beyond the outermost rows of a global grid (WeatherBench 2,
        Rasp et al., JAMES 16, 2024, doi:10.1029/2023MS004019); a regional grid ends half a row beyond its outermost
        rows.
        """
        if self.height == 1:
            return np.ones(1)
        latitude = np.deg2rad(self.latitude)
        middle = (latitude[1:] + latitude[:-1]) / 2
        if self.is_global:
            first, last = np.sign(latitude[0] - latitude[-1]) * np.array([np.pi / 2, -np.pi / 2])
        else:
            first, last = 2 * latitude[0] - middle[0], 2 * latitude[-1] - middle[-1]
        bounds = np.clip(np.concatenate([[first], middle, [last]]), -np.pi / 2, np.pi / 2)
        weights = np.abs(np.diff(np.sin(bounds)))
        return np.asarray(weights / weights.mean())


def turn(degrees: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the angles wrapped to [−180, 180), so that a step across the date line is small."""
    return (degrees + 180.0) % 360.0 - 180.0
