"""The grid and the times that sources have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like.data.locate import Problems, Source
from credit_like.data.sources._conventions import same_circle, same_points
from credit_like.data.times import Times, calendar_of, from_seconds, seconds, to_text
from credit_like.errors import UserError
from credit_like.grid import Grid, turn


def common_grid(
    sources: Sequence[Source], datasets: Sequence[xr.Dataset], used: Sequence[int], problems: Problems
) -> Grid | None:
    """Return the grid of the first of the `used` sources that has one.

    Sources without a grid, or with another one, are added to `problems`.
    """
    grids = {}
    for i in used:
        try:
            grid = Grid(*(datasets[i][name].values.astype(np.float64) for name in ("latitude", "longitude")))
            _refuse_uneven_columns(grid.longitude)
            grids[i] = grid
        except UserError as error:
            problems.append((sources[i].place, f"{sources[i].where}: {error}"))
    if not grids:
        return None
    reference, first = next(iter(grids.items()))
    for i, grid in grids.items():
        for name in ("latitude", "longitude"):
            mine, theirs = getattr(grid, name), getattr(first, name)
            if not same_points(name, mine, theirs):
                told = _other_grid(name, sources[i].where, sources[reference].where, mine, theirs)
                problems.append((sources[i].place, told))
                break
    return first


def _refuse_uneven_columns(longitude: NDArray[np.float64]) -> None:
    """Raise UserError for longitudes that are not evenly spaced: means over an area weight the rows of a grid alone."""
    steps = turn(np.diff(longitude))
    if len(steps) > 1 and not np.allclose(steps, np.median(steps), rtol=0.02):
        raise UserError(
            f"expected longitudes at even spacing, got steps from {steps.min():g} to {steps.max():g} degrees; regrid the files, "
            "for example with `regrid` of the source"
        )


def _other_grid(name: str, where: str, other: str, mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> str:
    told = [f"{len(values)} from {values[0]:g} to {values[-1]:g}" for values in (theirs, mine)]
    cure = "bring the sources to one grid"
    if name == "longitude" and same_circle(mine, theirs):
        cure = "set region: {west: 0, east: 360} in both sources"
    return f"expected the {name}s of {other} ({told[0]}) in {where}, got {told[1]}; {cure}"


def common_times(
    sources: Sequence[Source], datasets: Sequence[xr.Dataset], used: Sequence[int], step: int, problems: Problems
) -> tuple[Times, list[NDArray[np.int64] | None]] | None:
    """Return the times that the `used` sources share, thinned to the step, and their positions in each source.

    Adds to `problems` what keeps the sources from having one time axis; returns None where there is none.
    """
    axes = {i: datasets[i]["time"].values for i in used}
    for i in [i for i, axis in axes.items() if not len(axis)]:
        problems.append((sources[i].place, f"expected times in {sources[i].where}, got an empty time axis"))
        del axes[i]
    if not axes:
        return None
    first = next(iter(axes))
    calendar = calendar_of(axes[first])
    since: dict[int, NDArray[np.int64]] = {}
    for i, axis in axes.items():
        if calendar_of(axis) != calendar:
            other = f"{calendar_of(axis)} in {sources[i].where}"
            told = f"expected one calendar, got {calendar} in {sources[first].where} and {other}"
            problems.append((sources[i].place, told))
            continue
        since[i] = seconds(axis)
        back = np.flatnonzero(np.diff(since[i]) <= 0)
        if len(back):
            what = "twice" if since[i][back[0] + 1] == since[i][back[0]] else "out of order"
            told = f"expected increasing times in {sources[i].where}, got {to_text(axis[back[0] + 1])} {what}"
            problems.append((sources[i].place, told))
            since[i] = np.unique(since[i])
    common = since[first]
    for axis in since.values():
        common = np.intersect1d(common, axis, assume_unique=True)
    if not len(common):
        spans = "; ".join(f"{sources[i].where}: {to_text(axes[i][0])} to {to_text(axes[i][-1])}" for i in since)
        problems.append((("data", "source"), f"expected times that all sources share, got none ({spans})"))
        return None
    try:
        common = _thin(common, step, sources[first].where)
    except UserError as error:
        problems.append((("data", "timestep"), str(error)))
        return None
    positions: list[NDArray[np.int64] | None] = []
    for i in range(len(sources)):
        same = i not in since or (len(common) == len(since[i]) and bool(np.all(common == since[i])))
        positions.append(None if same else np.searchsorted(since[i], common))
    return from_seconds(common, calendar), positions


def _thin(axis: NDArray[np.int64], step: int, where: str) -> NDArray[np.int64]:
    """Return times that are whole steps apart: from midnight of the first day if it has any, else from the first time.

    Raises UserError for steps that are no multiple of the spacing.
    """
    if len(axis) == 1:
        return axis
    spacing = int(np.diff(axis).min())
    if spacing == step:
        return axis
    if step % spacing:
        hours = f"{spacing / 3600:g} h"
        got = f"{step / 3600:g} h"
        raise UserError(
            f"expected a multiple of {hours}, the spacing of the times in {where}, got {got}; change data.timestep"
        )
    midnight = axis[0] - axis[0] % 86400
    kept = axis[(axis - midnight) % step == 0]
    return kept if len(kept) else axis[(axis - axis[0]) % step == 0]
