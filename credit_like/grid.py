"""Latitude, longitude, area weights and rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Grid:
    """A latitude-longitude grid as the data have it; latitude may ascend or descend.

    `latitude` (H,) and `longitude` (W,) in degrees. Raises ValueError for a latitude outside ±90 or not monotonic.
    """

    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.latitude.ndim != 1 or self.longitude.ndim != 1:
            raise ValueError(f"expected 1-D latitude and longitude, got {self.latitude.ndim}-D and {self.longitude.ndim}-D")
        steps = np.diff(self.latitude)
        if not (np.all(steps > 0) or np.all(steps < 0)) or np.abs(self.latitude).max() > 90:
            raise ValueError("expected monotonic latitudes within ±90 degrees; sort or mask the source's rows")

    @property
    def height(self) -> int:
        return len(self.latitude)

    @property
    def width(self) -> int:
        return len(self.longitude)

    @property
    def is_global(self) -> bool:
        """Whether the longitudes go all the way round at even spacing and rows reach both poles to within a row."""
        spacing = np.diff(self.longitude)
        around = np.allclose(spacing, spacing[0]) and np.isclose(abs(spacing[0]) * self.width, 360.0)
        row = np.abs(np.diff(self.latitude)).max()
        return bool(around and 90 - self.latitude.max() < 1.01 * row and 90 + self.latitude.min() < 1.01 * row)

    def latitude_weights(self) -> NDArray[np.float64]:
        """Weights (H,) of the rows, of mean 1: w_i = sin b_{i+1} − sin b_i between cell bounds b.

        Bounds are the midpoints, and ±90° beyond the outermost rows of a global grid (as WeatherBench2 does); a regional
        grid ends half a row beyond its outermost rows instead.
        """
        latitude = np.deg2rad(self.latitude)
        middle = (latitude[1:] + latitude[:-1]) / 2
        if self.is_global:
            first, last = np.sign(latitude[0] - latitude[-1]) * np.array([np.pi / 2, -np.pi / 2])
        else:
            first, last = latitude[0] - (middle[0] - latitude[0]), latitude[-1] + (latitude[-1] - middle[-1])
        bounds = np.clip(np.concatenate([[first], middle, [last]]), -np.pi / 2, np.pi / 2)
        weights = np.abs(np.diff(np.sin(bounds)))
        return weights / weights.mean()
