"""Zarr stores, version 2 or 3, on disk or behind a URL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import xarray as xr

from credit_like.data.sources._files import FileConfig, is_url, open_files
from credit_like.variables import Variable


class Config(FileConfig):
    type: Literal["zarr"] = "zarr"


def open_dataset(config: Config, variables: Sequence[Variable] | None = None) -> xr.Dataset:
    """The stores of `config.path` as one lazy dataset, in the stores' own names.

    Raises ValueError where nothing is there, or it is not a zarr store.
    """

    def open_one(path: str) -> xr.Dataset:
        options = dict(config.storage_options) if is_url(path) else None
        return xr.open_zarr(path, chunks=None, decode_cf=False, storage_options=options)

    return open_files(config, open_one, "a zarr store")
