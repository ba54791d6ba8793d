"""Conservative regridding of input fields: the mean of the overlapping source cells over each target cell.

Between two latitude-longitude grids the overlap of cells is a product of an overlap in sin φ and one in λ, so that two small
matrices are all the weights there are:

    y_ij = Σ_kl A_ik B_jl x_kl m_kl / Σ_kl A_ik B_jl m_kl,   A_ik = |[sin φ]_i ∩ [sin φ]_k|,  B_jl = |[λ]_j ∩ [λ]_l|

with m = 1 where the source has data (first-order conservative, normalised by the area that has data; Jones 1999,
doi:10.1175/1520-0493(1999)127<2204:FASOCR>2.0.CO;2). Weights from elsewhere come as a file with `row`, `col` and `S`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.sparse as sparse
import xarray as xr
from numpy.typing import NDArray
from xarray.backends import BackendArray
from xarray.core import indexing

from credit_like.data.files.netcdf_files import reading
from credit_like.errors import UserError, reason
from credit_like.grid import Grid, turn


@dataclass(frozen=True, eq=False)
class Separable:
    """Weights between latitude-longitude grids, as (target rows, source rows) and (target columns, source columns)."""

    grid: Grid
    rows: sparse.csr_array
    columns: sparse.csr_array

    def apply(self, field_NHW: NDArray[Any], wanted: slice) -> NDArray[np.float64]:
        """Return the wanted rows on the target grid, from fields given at `source_rows(wanted)`."""
        part = self.rows[wanted][:, self.source_rows(wanted)]
        return np.stack(
            [_mean(part @ there @ self.columns.T, part @ has @ self.columns.T) for there, has in _with(field_NHW)]
        )

    def source_rows(self, wanted: slice) -> slice:
        """Return the source rows that the wanted target rows depend on."""
        there = self.rows[wanted].indices
        return slice(int(there.min()), int(there.max()) + 1) if len(there) else slice(0, 1)


@dataclass(frozen=True, eq=False)
class Stored:
    """Weights between any grids, as a matrix (target points, source points)."""

    grid: Grid
    matrix: sparse.csr_array
    source_shape: tuple[int, int]
    source_axes: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
    """Latitudes of the source's rows and longitudes of its columns, where the file has them and they are a grid of these."""

    def apply(self, field_NHW: NDArray[Any], wanted: slice) -> NDArray[np.float64]:
        width = self.grid.width
        part = self.matrix[wanted.start * width : wanted.stop * width]
        shape = (wanted.stop - wanted.start, width)
        return np.stack(
            [_mean(part @ there.ravel(), part @ has.ravel()).reshape(shape) for there, has in _with(field_NHW)]
        )

    def source_rows(self, _wanted: slice) -> slice:
        return slice(0, self.source_shape[0])


Weights = Separable | Stored


def _with(field_NHW: NDArray[Any]) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield (values with 0 at missing points, whether there is a value) of one field after the other."""
    for field in field_NHW:
        has = np.isfinite(field)
        yield np.where(has, field, 0).astype(np.float64), has.astype(np.float64)


def _mean(total: NDArray[np.float64], area: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean, NaN if a cell has no source cell with data (to rounding)."""
    enough = area > 1e-9 * area.max(initial=0)
    return np.divide(total, area, out=np.full(total.shape, np.nan), where=enough)


def conservative(source: Grid, target: Grid) -> Separable:
    """Return the weights of the formula above; those of the last few pairs of grids are kept."""
    return _conservative(*(axis.tobytes() for grid in (source, target) for axis in (grid.latitude, grid.longitude)))


@lru_cache(maxsize=8)
def _conservative(*axes: bytes) -> Separable:
    """Return the weights for latitude and longitude of the source, and those of the target, as bytes."""
    rows_there, columns_there, rows_here, columns_here = (np.frombuffer(axis, np.float64).copy() for axis in axes)
    source, target = Grid(rows_there, columns_there), Grid(rows_here, columns_here)
    south_north = [np.sort(np.sin(np.deg2rad(b)), axis=1) for b in map(_row_bounds, (target, source))]
    rows = _overlap(*south_north)
    here, there = map(_column_bounds, (target, source))
    columns = sum(_overlap(here, there + circle) for circle in (-720.0, -360.0, 0.0, 360.0, 720.0))
    return Separable(target, sparse.csr_array(rows), sparse.csr_array(columns))


def _overlap(here: NDArray[np.float64], there: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (target, source) overlaps in length of intervals (n, 2)."""
    low = np.maximum(here[:, None, 0], there[None, :, 0])
    high = np.minimum(here[:, None, 1], there[None, :, 1])
    return np.clip(high - low, 0, None)


def _row_bounds(grid: Grid) -> NDArray[np.float64]:
    """Return (H, 2) degrees: midpoints between rows; at the ends the poles of a global grid, else half a row further."""
    middle = (grid.latitude[1:] + grid.latitude[:-1]) / 2
    outer = 2 * grid.latitude[[0, -1]] - middle[[0, -1]]
    if grid.is_global:
        outer = np.sign(grid.latitude[[0, -1]]) * 90
    edges = np.clip(np.concatenate([outer[:1], middle, outer[1:]]), -90, 90)
    return np.stack([edges[:-1], edges[1:]], 1)


def _column_bounds(grid: Grid) -> NDArray[np.float64]:
    """Return (W, 2) degrees, eastward: midpoints between columns, periodic where the grid goes around the globe."""
    longitude = np.rad2deg(np.unwrap(np.deg2rad(grid.longitude)))
    middle = (longitude[1:] + longitude[:-1]) / 2
    if grid.is_periodic:
        circle = 360.0 * np.sign(longitude[-1] - longitude[0])
        outer = (longitude[-1] - circle + longitude[0]) / 2, (longitude[-1] + circle + longitude[0]) / 2
    else:
        outer = 2 * longitude[0] - middle[0], 2 * longitude[-1] - middle[-1]
    edges = np.concatenate([[outer[0]], middle, [outer[1]]])
    return np.sort(np.stack([edges[:-1], edges[1:]], 1), axis=1)


def regular(degrees: float) -> Grid:
    """Return a global grid with rows at the poles, north first, and a column at Greenwich."""
    rows, columns = 180 / degrees, 360 / degrees
    if abs(rows - round(rows)) > 1e-6 or rows < 2:
        raise UserError(f"expected regrid.degrees that divide 180, got {degrees:g}")
    return Grid(np.linspace(90, -90, round(rows) + 1), np.asarray(np.arange(round(columns)) * degrees, np.float64))


def read_weights(path: str) -> Stored:
    """Read weights in the format of ESMF and xESMF; those of the last few files are kept, which may be large.

    Reads `row`, `col` (from 1), `S`, the target's `yc_b`, `xc_b`, `dst_grid_dims`, and of the source `src_grid_dims` and, if they
    are there, `yc_a` and `xc_a`. Raises UserError if the file has another format or the target is not a latitude-longitude grid.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise UserError(_no_weights(path, error)) from error
    return _read_weights(path, found.st_size, found.st_mtime_ns)


def _no_weights(path: str, error: OSError) -> str:
    return f"expected a netCDF file of regridding weights, got {path}: {reason(error)}; change the path"


@lru_cache(maxsize=4)
def _read_weights(path: str, _size: int, _changed: int) -> Stored:
    try:
        with reading(path) as file:
            names = ("row", "col", "S", "yc_b", "xc_b", "dst_grid_dims", "src_grid_dims")
            if absent := [name for name in names if name not in file.variables]:
                raise UserError(
                    f"expected a file of regridding weights with {', '.join(names)}, got {path} without {absent[0]}"
                )
            row, col, factor = (np.asarray(file[name][:]) for name in ("row", "col", "S"))
            y, x = (_in_degrees(file[name]) for name in ("yc_b", "xc_b"))
            to, of = (np.asarray(file[name][:]).ravel() for name in ("dst_grid_dims", "src_grid_dims"))
            there = [_in_degrees(file[name]) for name in ("yc_a", "xc_a") if name in file.variables]
    except OSError as error:
        raise UserError(_no_weights(path, error)) from error
    for name, dims in (("dst_grid_dims", to), ("src_grid_dims", of)):
        if len(dims) != 2:
            raise UserError(
                f"expected weights between grids of rows and columns in {path}, got {name} of length {len(dims)}; make them for "
                "grids with two dimensions"
            )
    shape, source_shape = (int(to[1]), int(to[0])), (int(of[1]), int(of[0]))
    size = (shape[0] * shape[1], source_shape[0] * source_shape[1])
    if y.size != size[0] or x.size != size[0] or row.max(initial=1) > size[0] or col.max(initial=1) > size[1]:
        raise UserError(
            f"expected weights from {source_shape[0]} × {source_shape[1]} to {shape[0]} × {shape[1]} points in {path}, got others; "
            "make the file anew"
        )
    latitude, longitude = y.reshape(shape), x.reshape(shape)
    # NaN makes every comparison false, so that these say what a regular grid is and not what none is.
    if not (np.ptp(latitude, axis=1).max() <= 1e-6 and np.ptp(longitude, axis=0).max() <= 1e-6):
        raise UserError(f"expected weights onto a latitude-longitude grid in {path}, got a curvilinear one, or NaN")
    matrix = sparse.csr_array((factor, (row - 1, col - 1)), shape=size)
    grid = Grid(np.asarray(latitude[:, 0], np.float64), np.asarray(longitude[0], np.float64))
    return Stored(grid, matrix, source_shape, _source_axes(there, source_shape))


def _in_degrees(variable: Any) -> NDArray[np.float64]:
    values = np.asarray(variable[:], np.float64)
    return np.rad2deg(values) if str(getattr(variable, "units", "")).startswith("rad") else values


def _source_axes(
    there: list[NDArray[np.float64]], shape: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the latitudes of rows and the longitudes of columns, None where these are not given or are curvilinear."""
    if len(there) < 2 or any(values.size != shape[0] * shape[1] for values in there):
        return None
    latitude, longitude = (values.reshape(shape) for values in there)
    if not (np.ptp(latitude, axis=1).max() <= 1e-6 and np.abs(turn(longitude - longitude[:1])).max() <= 1e-6):
        return None
    return latitude[:, 0], longitude[0]


def refuse_other_source(weights: Stored, dataset: xr.Dataset, path: str, where: str) -> None:
    """Raise UserError where rows or columns of a dataset are not those for which the weights in `where` were made."""
    if weights.source_axes is None:
        return
    for name, wanted in zip(("latitude", "longitude"), weights.source_axes, strict=True):
        if name not in dataset.coords or dataset[name].dims != (name,):
            continue
        got = dataset[name].values.astype(np.float64)
        attrs = dataset[name].attrs
        is_numbered = "units" not in attrs and np.array_equal(got, np.arange(len(got)))  # rows or columns
        if is_numbered or not str(attrs.get("units", "degrees")).startswith("degree"):  # or metres of a projection
            continue
        apart = got - wanted if name == "latitude" else turn(got - wanted)
        if not np.abs(apart).max() <= 1e-3:
            shown = "some that are NaN" if np.isnan(got).any() else f"{got[0]:g} to {got[-1]:g}"
            raise UserError(
                f"expected the {name}s from {wanted[0]:g} to {wanted[-1]:g} of {where} in {path}, got {shown}; "
                "turn or sort the files, or make weights for them"
            )


def regrid(dataset: xr.Dataset, weights: Weights) -> xr.Dataset:
    """Regrid all variables on latitude and longitude lazily with these weights; leave others unchanged."""
    coordinates = {"latitude": weights.grid.latitude, "longitude": weights.grid.longitude}
    result: dict[str, Any] = {}
    for name, variable in dataset.data_vars.items():
        if {"latitude", "longitude"} <= set(variable.dims):
            lazy = indexing.LazilyIndexedArray(_Regridded(variable.variable, weights))
            dims = (*(d for d in variable.dims if d not in coordinates), "latitude", "longitude")
            result[str(name)] = xr.Variable(dims, lazy, variable.attrs)
        elif not set(coordinates) & set(variable.dims):
            result[str(name)] = variable.variable
    others = {n: c for n, c in dataset.coords.items() if not set(coordinates) & set(c.dims)}
    return xr.Dataset(result, {**others, **coordinates}, dataset.attrs)


class _Regridded(BackendArray):
    """A variable with latitude and longitude last, on another grid; it reads only the source rows that it needs."""

    def __init__(self, source: xr.Variable, weights: Weights) -> None:
        self.source, self.weights = source, weights
        self.lead = tuple(dim for dim in source.dims if dim not in ("latitude", "longitude"))
        self.shape = (*(source.sizes[dim] for dim in self.lead), weights.grid.height, weights.grid.width)
        self.dtype = np.dtype(np.float64 if source.dtype == np.float64 else np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self._read)

    def _read(self, key: tuple[Any, ...]) -> NDArray[Any]:
        """Return the values at integers and slices of any step."""
        rows = key[-2]
        at = [rows] if isinstance(rows, int | np.integer) else range(*rows.indices(self.shape[-2]))
        if not len(at):
            return np.empty(self.shape, self.dtype)[key]
        wanted = slice(int(min(at)), int(max(at)) + 1)
        parts = {**dict(zip(self.lead, key, strict=False)), "latitude": self.weights.source_rows(wanted)}
        read = self.source[tuple(parts.get(str(dim), slice(None)) for dim in self.source.dims)]
        order = [dim for dim in self.lead if dim in read.dims]
        values = read.transpose(*order, "latitude", "longitude").values
        fields = self.weights.apply(values.reshape(-1, *values.shape[-2:]), wanted)
        whole = fields.reshape(*values.shape[:-2], *fields.shape[-2:]).astype(self.dtype)
        here = rows - wanted.start if isinstance(rows, int | np.integer) else [i - wanted.start for i in at]
        return np.asarray(whole[..., here, :][..., key[-1]])
