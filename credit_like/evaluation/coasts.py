"""Coastlines of maps: of the data's own land-sea mask, else Natural Earth's."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import contourpy
import numpy as np
from numpy.typing import NDArray

from credit_like.data.store import FieldStore


def land_mask(store: FieldStore) -> NDArray[np.float32] | None:
    """Return the static land-sea mask (H, W), 1 on land, or None if there is none."""
    start = 0
    for variable in store.variables.role("static"):
        if "land" in variable.name.lower() or variable.name.lower() in ("lsm", "mask"):
            return store.static()[start]
        start += len(variable)
    return None


def own_coast(store: FieldStore) -> list[NDArray[np.float64]] | None:
    """Return the coast of the data's own land-sea mask as lines (n, 2) of longitude and latitude, or None without one."""
    land = land_mask(store)
    if land is None or not land.min() < 0.5 < land.max():
        return None
    grid = store.grid
    step = float(np.diff(grid.longitude).mean())
    # If the mask goes round the globe, repeat its first column to close the lines at the seam.
    around = np.isclose(step * grid.width, 360, atol=step / 2)
    longitude = np.append(grid.longitude, grid.longitude[-1] + step) if around else grid.longitude
    mask = np.concatenate([land, land[:, :1]], 1) if around else land
    lines = contourpy.contour_generator(longitude, grid.latitude, np.nan_to_num(mask)).lines(0.5)
    return [np.asarray(line, np.float64) for line in lines]


def coastlines(store: FieldStore) -> list[NDArray[np.float64]]:
    """Return the lines of `own_coast`, or Natural Earth's at 1:110 million."""
    own = own_coast(store)
    return natural_earth() if own is None else own


@cache
def natural_earth() -> list[NDArray[np.float64]]:
    """Return the coastlines that reports contain, as lines (n, 2) of longitude and latitude."""
    text = (resources.files("credit_like.evaluation") / "page" / "coastlines.js").read_text(encoding="utf-8")
    values = json.loads(text[text.index("[") : text.rindex("]") + 1])
    return [np.array(line, np.float64).reshape(-1, 2) / 10 for line in values]
