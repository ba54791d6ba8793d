"""Map projections of the sphere, and fields sampled on them.

A projection maps latitude and longitude (degrees) to plane coordinates and back, on a sphere of radius 1. Fields are drawn
as an image: each of its points is mapped back to the sphere and interpolated there, so that no cell has to be cut at an
edge of the map.

Snyder (1987): Map Projections, a Working Manual, USGS 1395; Robinson (1974): Int. Yearbook of Cartography 14, 145-155.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.registry import did_you_mean

Array = NDArray[np.float64]

# Length of the parallels, and their distance from the equator, every 5 degrees of latitude (Robinson 1974).
_PARALLELS = (1.0, 0.9986, 0.9954, 0.99, 0.9822, 0.973, 0.96, 0.9427, 0.9216, 0.8962, 0.8679, 0.835, 0.7986, 0.7597,
              0.7186, 0.6732, 0.6213, 0.5722, 0.5322)  # fmt: skip
_DISTANCES = (0.0, 0.062, 0.124, 0.186, 0.248, 0.31, 0.372, 0.434, 0.4958, 0.5571, 0.6176, 0.6769, 0.7346, 0.7903,
              0.8435, 0.8936, 0.9394, 0.9761, 1.0)  # fmt: skip
_EDGE = 1 - 1e-9  # of a half turn: points on the seam stay on their side


@dataclass(frozen=True)
class Projection(ABC):
    """A map of the sphere about a point; longitudes that are passed in may have any offset of 360 degrees."""

    centre: tuple[float, float] = (0.0, 0.0)
    """Latitude and longitude in the middle of the map."""
    is_round: ClassVar[bool] = False

    @abstractmethod
    def forward(self, latitude: Array, longitude: Array) -> tuple[Array, Array]:
        """Return x and y, NaN where a point is not on the map."""

    @abstractmethod
    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return latitude and longitude, NaN beyond the edge of the map."""

    @abstractmethod
    def outline(self) -> tuple[Array, Array]:
        """Return x and y of the edge of the map, a closed curve."""

    def from_centre(self, longitude: Array) -> Array:
        """Return longitudes relative to the centre, -180 to 180."""
        return (np.asarray(longitude, np.float64) - self.centre[1] + 180) % 360 - 180

    def bounds(self) -> tuple[float, float, float, float]:
        """Return the smallest and largest x, and the smallest and largest y."""
        x, y = self.outline()
        return float(x.min()), float(x.max()), float(y.min()), float(y.max())


@dataclass(frozen=True)
class PlateCarree(Projection):
    """Longitude and latitude as they are, of the globe or of a region (west, east, south, north)."""

    region: tuple[float, float, float, float] | None = None

    def _edges(self) -> tuple[float, float, float, float]:
        return self.region or (-180.0, 180.0, -90.0, 90.0)

    def forward(self, latitude: Array, longitude: Array) -> tuple[Array, Array]:
        west, east, south, north = self._edges()
        x, y = self.from_centre(longitude), np.asarray(latitude, np.float64)
        there = (x >= west) & (x <= east) & (y >= south) & (y <= north)
        return np.where(there, x, np.nan), np.where(there, y, np.nan)

    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        return y, x + self.centre[1]

    def outline(self) -> tuple[Array, Array]:
        west, east, south, north = self._edges()
        return np.array([west, east, east, west, west]), np.array([south, south, north, north, south])


@dataclass(frozen=True)
class Robinson(Projection):
    """The globe as an oval, a compromise between true shapes and true areas."""

    def forward(self, latitude: Array, longitude: Array) -> tuple[Array, Array]:
        length, distance = _robinson(np.abs(latitude))
        return 0.8487 * length * np.deg2rad(self.from_centre(longitude)), 1.3523 * distance * np.sign(latitude)

    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        degrees = np.linspace(0, 90, 361)
        latitude = np.interp(np.abs(y) / 1.3523, _robinson(degrees)[1], degrees, right=np.nan)
        turn = np.rad2deg(x / 0.8487 / _robinson(latitude)[0])
        there = np.abs(turn) <= 180
        return np.where(there, latitude * np.sign(y), np.nan), np.where(there, turn + self.centre[1], np.nan)

    def outline(self) -> tuple[Array, Array]:
        latitude = np.linspace(-90, 90, 181)
        east, y = self.forward(latitude, np.full_like(latitude, self.centre[1] + 180 * _EDGE))
        return np.concatenate([east, -east[::-1], east[:1]]), np.concatenate([y, y[::-1], y[:1]])


def _robinson(latitude: Array) -> tuple[Array, Array]:
    nodes = np.arange(0, 91, 5)
    return CubicSpline(nodes, _PARALLELS)(latitude), CubicSpline(nodes, _DISTANCES)(latitude)


@dataclass(frozen=True)
class Orthographic(Projection):
    """The hemisphere as seen from far away."""

    centre: tuple[float, float] = (30.0, 0.0)
    is_round: ClassVar[bool] = True

    def forward(self, latitude: Array, longitude: Array) -> tuple[Array, Array]:
        north, east, middle = np.deg2rad(latitude), np.deg2rad(self.from_centre(longitude)), np.deg2rad(self.centre[0])
        visible = np.sin(middle) * np.sin(north) + np.cos(middle) * np.cos(north) * np.cos(east) >= 0
        x = np.cos(north) * np.sin(east)
        y = np.cos(middle) * np.sin(north) - np.sin(middle) * np.cos(north) * np.cos(east)
        return np.where(visible, x, np.nan), np.where(visible, y, np.nan)

    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        inside = x**2 + y**2 <= 1
        near = np.sqrt(np.where(inside, 1 - x**2 - y**2, np.nan))  # towards the eye
        middle = np.deg2rad(self.centre[0])
        latitude = np.rad2deg(np.arcsin(np.clip(near * np.sin(middle) + y * np.cos(middle), -1, 1)))
        return latitude, np.rad2deg(np.arctan2(x, near * np.cos(middle) - y * np.sin(middle))) + self.centre[1]

    def outline(self) -> tuple[Array, Array]:
        turn = np.linspace(0, 2 * np.pi, 361)
        return np.cos(turn), np.sin(turn)


@dataclass(frozen=True)
class Polar(Projection):
    """Stereographic projection about the pole nearest to the centre, down to 20 degrees of latitude."""

    centre: tuple[float, float] = (90.0, 0.0)
    is_round: ClassVar[bool] = True
    lowest: ClassVar[float] = 20.0

    def forward(self, latitude: Array, longitude: Array) -> tuple[Array, Array]:
        side = np.sign(self.centre[0])
        r = np.where(latitude * side >= self.lowest, _radius(latitude * side), np.nan)
        east = np.deg2rad(self.from_centre(longitude))
        return r * np.sin(east), -side * r * np.cos(east)

    def inverse(self, x: Array, y: Array) -> tuple[Array, Array]:
        side, r = np.sign(self.centre[0]), np.hypot(x, y)
        latitude = side * (90 - 2 * np.rad2deg(np.arctan(r)))
        inside = r <= _radius(self.lowest)
        longitude = np.rad2deg(np.arctan2(x, -side * y)) + self.centre[1]
        return np.where(inside, latitude, np.nan), np.where(inside, longitude, np.nan)

    def outline(self) -> tuple[Array, Array]:
        turn, r = np.linspace(0, 2 * np.pi, 361), _radius(self.lowest)
        return r * np.cos(turn), r * np.sin(turn)


def _radius(latitude: float | Array) -> Array:
    return np.asarray(np.tan(np.pi / 4 - np.deg2rad(latitude) / 2))


PROJECTIONS = ("robinson", "plate-carree", "orthographic", "north-polar", "south-polar")


def projection_of(name: str | None, grid: Grid, centre: tuple[float, float] | None = None) -> Projection:
    """Return a projection by name for the fields of a grid; by default Robinson's for a globe, else plate carrée.

    `centre` is latitude and longitude; a latitude matters to the orthographic projection alone. Raises UserError for a
    name that is not known.
    """
    west, east, south, north = _edges(grid)
    is_global = grid.is_periodic and north - south > 120
    name = name or ("robinson" if is_global else "plate-carree")
    latitude, longitude = centre if centre is not None else (30.0, 0.0)
    if name == "robinson":
        return Robinson((0.0, longitude))
    if name == "orthographic":
        return Orthographic((latitude, longitude))
    if name in ("north-polar", "south-polar"):
        return Polar((90.0 if name == "north-polar" else -90.0, longitude))
    if name != "plate-carree":
        raise UserError(
            f"--projection: expected one of {', '.join(PROJECTIONS)}, got {name!r}{did_you_mean(name, PROJECTIONS)}; "
            "change it"
        )
    if is_global:
        return PlateCarree((0.0, longitude))
    middle = (west + east) / 2
    return PlateCarree((0.0, middle), (west - middle, east - middle, south, north))


def _edges(grid: Grid) -> tuple[float, float, float, float]:
    """Return west, east, south and north of the grid's cells, in degrees; east may exceed 360."""
    longitude = unrolled(grid)
    half = abs(longitude[1] - longitude[0]) / 2 if len(longitude) > 1 else 0.5
    rows = np.sort(grid.latitude)
    low, high = (rows[1] - rows[0]) / 2, (rows[-1] - rows[-2]) / 2
    return longitude.min() - half, longitude.max() + half, max(-90.0, rows[0] - low), min(90.0, rows[-1] + high)


def unrolled(grid: Grid) -> Array:
    """Return longitudes that increase or decrease throughout."""
    return np.asarray(np.rad2deg(np.unwrap(np.deg2rad(grid.longitude))))


@dataclass(frozen=True)
class Sampling:
    """Where the points of an image lie on a grid: rows and columns around each, and the weights between them."""

    rows: tuple[NDArray[np.int64], NDArray[np.int64]]
    columns: tuple[NDArray[np.int64], NDArray[np.int64]]
    down: Array
    right: Array
    inside: NDArray[np.bool_]

    def __call__(self, field: Array) -> Array:
        """Interpolate a field (H, W) bilinearly; points next to missing values use the others, those nearest one are NaN."""
        total, weight = np.zeros(self.inside.shape), np.zeros(self.inside.shape)
        for row, vertical in zip(self.rows, (1 - self.down, self.down), strict=True):
            for column, horizontal in zip(self.columns, (1 - self.right, self.right), strict=True):
                value, part = field[row, column], vertical * horizontal
                there = np.isfinite(value)
                total += np.where(there, value, 0.0) * part
                weight += there * part
        nearest = field[np.where(self.down < 0.5, *self.rows), np.where(self.right < 0.5, *self.columns)]
        there = self.inside & np.isfinite(nearest) & (weight > 0)
        return np.where(there, total / np.where(there, weight, 1.0), np.nan)


def sampling(grid: Grid, latitude: Array, longitude: Array) -> Sampling:
    """Return where points (NaN: none) lie on a grid; points beyond its cells are outside."""
    west, east, south, north = _edges(grid)
    around = grid.is_periodic
    rows, columns = grid.latitude, unrolled(grid)
    turned = west + (np.nan_to_num(longitude) - west) % 360
    inside = np.isfinite(latitude) & (latitude >= south) & (latitude <= north) & (turned <= east + 1e-9)
    row = _position(rows, np.nan_to_num(latitude))
    if around:
        step = (columns[-1] - columns[0]) / (len(columns) - 1)
        column = (turned - columns[0]) / step % len(columns)
    else:
        column = _position(columns, turned)
    above, left = np.floor(row).astype(int), np.floor(column).astype(int)
    below, next_one = np.minimum(above + 1, len(rows) - 1), left + 1
    beyond = next_one % len(columns) if around else np.minimum(next_one, len(columns) - 1)
    return Sampling((above, below), (left % len(columns), beyond), row - above, column - left, inside)


def _position(axis: Array, value: Array) -> Array:
    """Return fractional positions on an axis that increases or decreases, those of its ends beyond them."""
    index = np.arange(len(axis), dtype=np.float64)
    if axis[-1] < axis[0]:
        axis, index = axis[::-1], index[::-1]
    return np.interp(value, axis, index)


def image_points(projection: Projection, columns: int) -> tuple[Array, Array]:
    """Return latitude and longitude (rows from north) of the points of an image `columns` wide."""
    west, east, south, north = projection.bounds()
    rows = max(1, round(columns * (north - south) / (east - west)))
    x = west + (np.arange(columns) + 0.5) * (east - west) / columns
    y = north - (np.arange(rows) + 0.5) * (north - south) / rows
    return projection.inverse(*np.meshgrid(x, y))


def projected_lines(projection: Projection, lines: Sequence[Array]) -> tuple[Array, Array]:
    """Return x and y of lines (n, 2) of longitude and latitude, with NaN between them and where they leave the map."""
    west, east, _, _ = projection.bounds()
    xs, ys = [], []
    for line in lines:
        x, y = projection.forward(line[:, 1], line[:, 0])
        apart = 1 + np.flatnonzero(np.abs(np.diff(x)) > (east - west) / 4)  # across the seam
        xs += [np.insert(x, apart, np.nan), np.array([np.nan])]
        ys += [np.insert(y, apart, np.nan), np.array([np.nan])]
    return (np.concatenate(xs), np.concatenate(ys)) if xs else (np.empty(0), np.empty(0))


def graticule(projection: Projection, step: float) -> list[Array]:
    """Return meridians and parallels every `step` degrees as lines of longitude and latitude."""
    points = int(180 / min(1.0, step / 5)) + 1
    along = np.linspace(-90, 90, points)
    seam = projection.centre[1] + np.linspace(-180, 180, 2 * points - 1) * _EDGE
    meridians = [np.stack([np.full_like(along, east), along], 1) for east in np.arange(-180, 180, step)]
    parallels = [np.stack([seam, np.full_like(seam, north)], 1) for north in np.arange(-90 + step, 90, step)]
    return meridians + parallels
