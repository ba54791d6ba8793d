"""Charts: truth, forecast and error of one variable side by side, on a map projection, in shades between round values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from numpy.typing import NDArray

from credit_like.errors import UserError
from credit_like.evaluation.projections import (
    Array,
    PlateCarree,
    Polar,
    Projection,
    graticule,
    image_points,
    projected_lines,
    projection_of,
    sampling,
)
from credit_like.grid import Grid
from credit_like.naming import exponent_of, latitude_text, longitude_text, scaled_units, with_units

_WIDE, _ROUND = 3.9, 2.7  # inches across a map
_LEFT, _RIGHT, _TOP, _BOTTOM, _BETWEEN = 0.55, 0.95, 0.68, 0.8, 0.34
_GAP, _AROUND = 0.14, 0.3  # inches between two maps, and for degrees around a pole
_IMAGE = 860  # points across the image of a map
_OUTSIDE = 0.3  # percent of the points at either end that the shades do not resolve
_SHADES = 16  # at most
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_EVEN_STEPS = (1.0, 2.0, 5.0, 10.0)  # whose halves are short numbers
ERROR_SCALES = ("lead", "common")


@dataclass(frozen=True)
class Style:
    """How maps are drawn; None means the default of `projection_of`."""

    projection: str | None = None
    centre: tuple[float, float] | None = None
    """Latitude and longitude in the middle of the map."""
    error_scale: str = "lead"
    """`lead`: the errors of each lead have their own shades; `common`: all leads have the same."""

    def __post_init__(self) -> None:
        if self.error_scale not in ERROR_SCALES:
            raise UserError(f"--error-scale: expected lead or common, got {self.error_scale!r}; change it")


@dataclass(frozen=True)
class Row:
    """One lead of a chart: truth and forecast (H, W) in the units of the variable."""

    truth: Array
    forecast: Array
    valid: str
    lead: str


@dataclass(frozen=True)
class Shades:
    """Colours between `levels`; values beyond the first or the last level have the colour of that end."""

    colours: str
    levels: Array

    @property
    def is_diverging(self) -> bool:
        return bool(np.allclose(self.levels, -self.levels[::-1], atol=0))

    @property
    def map(self) -> Colormap:
        return colormaps[self.colours]

    @property
    def norm(self) -> BoundaryNorm:
        return BoundaryNorm(self.levels, self.map.N, extend="both")


def chart(
    name: str,
    units: str,
    initial: str,
    rows: Sequence[Row],
    grid: Grid,
    coast: Sequence[Array],
    style: Style = Style(),
) -> Figure:
    """Return a figure with a row of maps (truth, forecast, error) for each lead.

    Truth and forecast share their shades at all leads. `coast` are lines (n, 2) of longitude and latitude.
    """
    exponent = exponent_of(np.array([(row.truth, row.forecast) for row in rows]))
    truth, forecast = (np.array([getattr(row, key) for row in rows]) / 10.0**exponent for key in ("truth", "forecast"))
    unit = scaled_units(units, exponent)
    fields, errors = field_shades(truth, np.stack([truth, forecast])), _error_shades(forecast - truth, style)
    page = _Page(projection_of(style.projection, grid, style.centre), grid, coast, len(rows))
    page.text(_LEFT, page.height - 0.22, with_units(name, units, exponent), fontsize=11, weight="bold", va="center")
    page.text(page.width - _RIGHT - page.gap, page.height - 0.22, f"forecast from {initial}", fontsize=9, ha="right",
              va="center")  # fmt: skip
    for i, row in enumerate(rows):
        error = forecast[i] - truth[i]
        titles = (
            f"truth, {row.valid}",
            f"forecast, {row.lead}",
            f"error, RMSE {_rmse(error, grid):.3g} {unit}".rstrip(),
        )
        page.map((i, 0), truth[i], fields, titles[0])
        page.map((i, 1), forecast[i], fields, titles[1])
        page.map((i, 2), error, errors[i], titles[2])
        x, y = page.corner((i, 3))
        page.bar((x - _GAP + 0.12, y, 0.1, page.down), errors[i], unit)
    page.bar((_LEFT + 0.25 * page.across, 0.42, 1.5 * page.across + page.gap, 0.1), fields, unit)
    return page.figure


class _Page:
    """A figure of maps with margins in inches."""

    def __init__(self, projection: Projection, grid: Grid, coast: Sequence[Array], rows: int) -> None:
        west, east, south, north = projection.bounds()
        self.projection, self.rows = projection, rows
        self.across = _ROUND if projection.is_round else _WIDE
        self.down = min(_WIDE, self.across * (north - south) / (east - west))
        around = _AROUND if isinstance(projection, Polar) else 0.0
        self.gap, self.between, self.top, self.bottom = (
            _GAP + 1.2 * around,
            _BETWEEN + around,
            _TOP + around / 2,
            _BOTTOM,
        )
        self.width = _LEFT + 3 * (self.across + self.gap) + _RIGHT
        self.height = self.top + rows * self.down + (rows - 1) * self.between + self.bottom
        self.figure = Figure(figsize=(self.width, self.height))
        FigureCanvasAgg(self.figure)
        self.sample = sampling(grid, *image_points(projection, _IMAGE))
        self.extent = (west, east, south, north)
        self.is_flat = isinstance(projection, PlateCarree)
        self.step = _degrees_apart(east - west) if self.is_flat else 30.0
        self.coast = projected_lines(projection, coast)
        self.net = projected_lines(projection, graticule(projection, self.step))

    def text(self, x: float, y: float, content: str, **style: Any) -> None:
        self.figure.text(x / self.width, y / self.height, content, **style)

    def corner(self, place: tuple[int, int]) -> tuple[float, float]:
        """Return the lower left corner, in inches, of the map in a row and column."""
        row, column = place
        return (
            _LEFT + column * (self.across + self.gap),
            self.height - self.top - self.down - row * (self.down + self.between),
        )

    def map(self, place: tuple[int, int], field: Array, shades: Shades, title: str) -> None:
        """Draw a field (H, W) with the coast, a net of meridians and parallels, and a title."""
        x, y = self.corner(place)
        box = (x / self.width, y / self.height, self.across / self.width, self.down / self.height)
        ax = self.figure.add_axes(box)
        west, east, south, north = self.extent
        ax.set_axis_off()
        edge = Polygon(np.stack(self.projection.outline(), 1), facecolor="0.85", edgecolor="none", zorder=-1)  # missing
        ax.add_patch(edge)
        image = self.sample(field)
        drawn = ax.imshow(image, extent=self.extent, aspect="auto", cmap=shades.map, norm=shades.norm)
        drawn.set_clip_path(edge)
        ax.plot(*self.net, color="0.35", linewidth=0.3, alpha=0.5)
        for width, colour in ((1.1, "w"), (0.5, "0.1")):  # visible on light and on dark shades
            ax.plot(*self.coast, color=colour, linewidth=width, alpha=0.5 if colour == "w" else 1.0)
        ax.plot(*self.projection.outline(), color="0.2", linewidth=0.7, clip_on=False)
        ax.set_xlim(west, east)
        ax.set_ylim(south, north)
        ax.set_title(title, fontsize=8.5, loc="left", pad=15 if isinstance(self.projection, Polar) else 5, y=1.0)
        self._degrees(ax, left=place[1] == 0, below=place[0] == self.rows - 1)

    def _degrees(self, ax: Axes, left: bool, below: bool) -> None:
        """Label parallels at the left edge and meridians below, or meridians around a pole."""
        west, east, south, _ = self.extent
        style: dict[str, Any] = {"fontsize": 6.5, "color": "0.25"}
        longitudes = np.arange(-180, 180, 2 * self.step if not self.projection.is_round else self.step)
        if isinstance(self.projection, Polar):
            for degrees in longitudes:
                side = np.sign(self.projection.centre[0])
                x, y = self.projection.forward(np.array(side * self.projection.lowest), np.array(degrees))
                ax.text(float(x) * 1.07, float(y) * 1.07, longitude_text(degrees), ha="center", va="center", **style)
        elif not self.projection.is_round:
            reach, pole = (-west, south) if self.is_flat else (180.0, -90.0)
            inside = longitudes[np.abs(self.projection.from_centre(longitudes)) < min(reach, 175.0)]
            edge = np.full(len(inside), pole)
            for degrees, x in zip(inside, self.projection.forward(edge, inside)[0], strict=True):
                if below and np.isfinite(x):
                    ax.text(x, south - 0.02 * (east - west), longitude_text(degrees), ha="center", va="top", **style)
            for degrees in np.arange(-90 + self.step, 90, self.step):
                seam = self.projection.centre[1] + (west if self.is_flat else -180.0) * (1 - 1e-9)
                x, y = self.projection.forward(np.array(degrees), np.array(seam))
                if left and np.isfinite(x):
                    ax.text(float(x) - 0.012 * (east - west), float(y), latitude_text(degrees), ha="right", va="center",
                            **style)  # fmt: skip

    def bar(self, box: tuple[float, float, float, float], shades: Shades, unit: str) -> None:
        """Add a colour bar in a box (left, bottom, width, height) in inches."""
        x, y, wide, high = box
        ax = self.figure.add_axes((x / self.width, y / self.height, wide / self.width, high / self.height))
        orientation = "horizontal" if wide > high else "vertical"
        bar = self.figure.colorbar(
            ScalarMappable(shades.norm, shades.map), cax=ax, orientation=orientation, ticks=shades.levels,
            extendfrac=0.04, format=lambda value, _: f"{value:g}".replace("-", "−"),
        )  # fmt: skip
        bar.outline.set_linewidth(0.5)
        bar.set_label(unit, fontsize=7.5, labelpad=3)
        ax.tick_params(labelsize=6.5, length=2, width=0.5)


def _degrees_apart(width: float) -> float:
    return next((step for step in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0) if width / step <= 9), 30.0)


def field_shades(truth: Array, fields: Array) -> Shades:
    """Choose colours by the values: diverging around 0 for winds and others of both signs, pale at 0 for rain.

    The truth decides between them, as a forecast of rain may be slightly negative; the range is that of all `fields`.
    """
    finite, real = fields[np.isfinite(fields)], truth[np.isfinite(truth)]
    if not finite.size:
        return Shades("viridis", np.array([0.0, 1.0]))
    low, high = (float(value) for value in np.percentile(finite, (_OUTSIDE, 100 - _OUTSIDE)))
    if low < 0 < high and min(-low, high) > 0.15 * max(-low, high):
        return Shades("PuOr_r", symmetric_levels(max(-low, high)))
    if real.size and high > 0 and real.min() >= -1e-3 * high and np.percentile(real, _OUTSIDE) <= 0.02 * high:
        return Shades("YlGnBu", round_levels(0, high)[1:])
    return Shades("viridis", round_levels(low, high))


def _error_shades(error: Array, style: Style) -> list[Shades]:
    """Return the shades of each lead's errors."""
    each = [np.abs(one[np.isfinite(one)]) for one in error]
    most = [float(np.percentile(values, 100 - _OUTSIDE)) if values.size else 0.0 for values in each]
    most = [max(most)] * len(most) if style.error_scale == "common" else most
    return [Shades("RdBu_r", symmetric_levels(one)) for one in most]


def round_levels(low: float, high: float) -> Array:
    """Return about a dozen round values that enclose a range; at least two."""
    if not high > low:
        high = low + max(abs(low) * 1e-6, 1e-12)
    step = _round_step((high - low) / _SHADES)
    first, last = np.floor(low / step + 1e-9), np.ceil(high / step - 1e-9)
    return np.asarray(step * np.arange(first, max(last, first + 2) + 1))


def symmetric_levels(most: float) -> Array:
    """Return round values on both sides of 0, which lies in the middle of a shade."""
    step = _round_step(2 * (most or 1.0) / _SHADES, _EVEN_STEPS)
    sides = max(1, int(np.ceil(most / step - 0.5)))
    return np.asarray(step * (np.arange(-sides, sides) + 0.5))


def _round_step(least: float, steps: Sequence[float] = _ROUND_STEPS) -> float:
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(step * power for step in steps if step * power >= least * (1 - 1e-9)))


def _rmse(error: NDArray[np.float64], grid: Grid) -> float:
    """Return the area mean over the points that both have, NaN without any."""
    weights = grid.latitude_weights()[:, None] * np.isfinite(error)
    return float(np.sqrt(np.nansum(weights * error**2) / weights.sum())) if weights.sum() else float("nan")
