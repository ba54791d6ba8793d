"""Input of metrics: forecast, truth and climatology of one variable, and weighted means over regions.

Axes: M members, L leads, K levels (1 at the surface), H latitude rows, W longitudes, R regions.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError
from credit_like.grid import ROUNDING, Grid
from credit_like.schema.inference import Box

Array = NDArray[np.float64]

# Those regions of WeatherBench2 that depend on latitude only, ends included.
REGIONS: dict[str, tuple[float, float]] = {
    "global": (-90, 90),
    "tropics": (-20, 20),
    "northern-hemisphere": (20, 90),
    "southern-hemisphere": (-90, -20),
}


class Regions:
    """Area-weighted means over `global` (the whole grid), the latitude belts of WeatherBench2 and the user's boxes.

    Weights are the cell areas of `Grid.latitude_weights`; a point belongs to a region if its centre does. Regions
    without a grid point are omitted. `names` are in order; `weights` is (R, H, W).
    """

    def __init__(self, grid: Grid, boxes: Mapping[str, Box]) -> None:
        latitude, longitude = grid.latitude[:, None], grid.longitude[None] % 360
        # Coordinates and edges are decimal numbers: a point on an edge must be inside despite rounding.
        inside = {
            name: (latitude >= south - ROUNDING) & (latitude <= north + ROUNDING)
            for name, (south, north) in REGIONS.items()
        }
        inside["global"] = np.ones_like(latitude, bool)
        for name, box in boxes.items():
            width = box.east - box.west
            eastward = (longitude - box.west + ROUNDING) % 360 <= (
                width if width == 360 else width % 360
            ) + 2 * ROUNDING
            inside[name] = (latitude >= box.south - ROUNDING) & (latitude <= box.north + ROUNDING) & eastward
            if not inside[name].any():
                raise UserError(
                    f"evaluation.regions.{name}: expected a box with points of the grid, got none inside "
                    f"{box.south:g} to {box.north:g} N and {box.west:g} to {box.east:g} E, change its edges"
                )
        shape = (grid.height, grid.width)
        masks = {name: np.broadcast_to(mask, shape) for name, mask in inside.items() if mask.any()}
        self.names = list(masks)
        self.weights = grid.latitude_weights()[:, None] * np.stack(list(masks.values()))
        self._flat = self.weights.reshape(len(masks), -1).T

    def mean(self, x: Array) -> Array:
        """Reduce (…, H, W) to (…, R): weighted means over the points with data, NaN if a region has none."""
        flat = x.reshape(*x.shape[:-2], -1)
        valid = np.isfinite(flat)
        if valid.all():
            return np.asarray(flat @ self._flat / self._flat.sum(0))
        total = np.where(valid, flat, 0) @ self._flat
        weight = valid @ self._flat
        return np.asarray(np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0))


@dataclass
class Fields:
    """One variable of one forecast at several leads.

    `forecast` (M, L, K, H, W), `truth` and `climatology` (L, K, H, W). A point counts if all members and the truth have
    data; elsewhere all of them are NaN, so that every term of a score covers the same points.
    """

    forecast: Array
    truth: Array
    climatology: Array | None
    regions: Regions
    grid: Grid
    thresholds: tuple[Array, Array] | None = None
    """For precipitation: (dry probability, threshold of heavy rain), each (H, W)."""
    dry_limit: float = np.nan
    """For precipitation: the amount below which a step is dry, in the variable's units."""
    events: Array | None = None
    """Thresholds of events (T, K, H, W), in the variable's units; NaN where there is none."""
    valid: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.valid = np.isfinite(self.truth) & np.isfinite(self.forecast).all(0)
        if not self.valid.all():
            self.forecast = np.where(self.valid, self.forecast, np.nan)
            self.truth = np.where(self.valid, self.truth, np.nan)

    def lock(self) -> Fields:
        """Return itself, with arrays that cannot be written to, because all metrics and sources of forecasts share them."""
        self.forecast, self.truth, self.valid = map(_locked, (self.forecast, self.truth, self.valid))
        self.climatology = None if self.climatology is None else _locked(self.climatology)
        self.events = None if self.events is None else _locked(self.events)
        if self.thresholds is not None:
            self.thresholds = _locked(self.thresholds[0]), _locked(self.thresholds[1])
        # Copies, because grid and regions are those of the evaluation. In another process their arrays would lose a lock.
        self.regions, self.grid = copy(self.regions), copy(self.grid)
        self.regions.weights = _locked(self.regions.weights)
        for name in ("latitude", "longitude"):
            object.__setattr__(self.grid, name, _locked(getattr(self.grid, name)))
        return self

    def at_lead(self, lead: int) -> Fields:
        """Return the fields at one of the leads, by its position."""
        one = slice(lead, lead + 1)
        climatology = None if self.climatology is None else self.climatology[one]
        return replace(self, forecast=self.forecast[:, one], truth=self.truth[one], climatology=climatology).lock()

    @cached_property
    def ensemble_mean(self) -> Array:
        """Return (L, K, H, W): the mean over members, which is the forecast itself if there is one member."""
        return _locked(self.forecast.mean(0))

    @property
    def n_events(self) -> int:
        """Return the number of thresholds."""
        return 0 if self.events is None else len(self.events)

    @property
    def error(self) -> Array:
        """Return (L, K, H, W): ensemble mean minus truth."""
        return self.ensemble_mean - self.truth

    def anomaly(self, x: Array) -> Array:
        """Subtract the climatology of the valid time."""
        assert self.climatology is not None, "metrics that need a climatology say so"
        return x - self.climatology

    def mean(self, x: Array) -> Array:
        """Reduce (…, H, W) to (…, R), the means over the regions."""
        return self.regions.mean(x)


def _locked(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view of an array that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view
