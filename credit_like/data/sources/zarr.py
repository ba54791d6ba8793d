"""Zarr stores, version 2 or 3, on disk or behind a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import xarray as xr
import zarr
from xarray.core import indexing

from credit_like.data.files.chunks import ChunkedArray, layout_of
from credit_like.data.sources._files import FileConfig, is_url, open_files


class Config(FileConfig):
    type: Literal["zarr"] = "zarr"


def open_dataset(config: Config) -> xr.Dataset:
    """Open the stores of `config.path` as one lazy dataset, in the stores' own names.

    Raises UserError if there is no store or it is not zarr.
    """

    def open_one(path: str) -> xr.Dataset:
        options = dict(config.storage_options) if is_url(path) else None
        opening: dict[str, Any] = {"chunks": None, "decode_cf": False, "storage_options": options}
        try:
            dataset = xr.open_zarr(path, consolidated=True, **opening)
        except (KeyError, ValueError):  # no consolidated metadata, or no store at all
            dataset = xr.open_zarr(path, consolidated=False, **opening)
        return dataset if is_url(path) or not Path(path).is_dir() else _direct(dataset, Path(path))

    return open_files(config, open_one, "a zarr store")


def _direct(dataset: xr.Dataset, folder: Path) -> xr.Dataset:
    """Replace the data variables by ones that read their chunks directly, where possible."""
    group = zarr.open_group(folder, mode="r")
    for name, variable in dataset.data_vars.items():
        array = group[str(name)]
        layout = layout_of(array, folder) if isinstance(array, zarr.Array) else None
        if layout is not None:
            lazy = indexing.LazilyIndexedArray(ChunkedArray(layout))
            dataset[name] = xr.Variable(variable.dims, lazy, variable.attrs)
    return dataset
