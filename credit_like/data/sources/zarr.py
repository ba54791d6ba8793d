"""Zarr stores, version 2 or 3, on disk or behind a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import xarray as xr
import zarr
from xarray.core import indexing

from credit_like.data.files.chunks import ChunkedArray, layout_of
from credit_like.data.files.find import is_url
from credit_like.data.files.remote import RemoteStore
from credit_like.data.sources._cache import Cache, remote
from credit_like.data.sources._files import FileConfig, open_files


class Config(FileConfig):
    type: Literal["zarr"] = "zarr"
    cache: Cache | None = None
    """Local copies of what is read from a URL. Default: none; every read goes to the server."""


def open_dataset(config: Config) -> xr.Dataset:
    """Open the stores of `config.path` as one lazy dataset, in the stores' own names.

    Raises UserError if there is no store or it is not zarr.
    """

    def open_one(path: str) -> xr.Dataset:
        if is_url(path):
            store = remote(path, config.storage_options, config.cache)
            with store.opening():
                return _opened(store)
        dataset = _opened(path)
        return _direct(dataset, Path(path)) if Path(path).is_dir() else dataset

    return open_files(config, open_one, "a zarr store")


def _opened(store: str | RemoteStore) -> xr.Dataset:
    """Open a store lazily, with nothing decoded."""
    try:
        return xr.open_zarr(store, consolidated=True, chunks=None, decode_cf=False)
    except (KeyError, ValueError):  # no consolidated metadata, or no store at all
        return xr.open_zarr(store, consolidated=False, chunks=None, decode_cf=False)


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
