"""netCDF files, version 3 or 4; version 4 also behind a URL."""

from __future__ import annotations

from collections import deque
from typing import Literal

import xarray as xr

from credit_like.data.files import netcdf_files
from credit_like.data.files.find import is_url
from credit_like.data.files.remote_netcdf import open_remote
from credit_like.data.sources._cache import Cache, copies
from credit_like.data.sources._files import INDEXED, FileConfig, open_files


class Config(FileConfig):
    type: Literal["netcdf"] = "netcdf"
    cache: Cache | None = None
    """Local copies of what is read from a URL. Default: none; every read goes to the server."""


def open_dataset(config: Config) -> xr.Dataset:
    """Open the files of `config.path` as one lazy dataset, in the files' own names; its `close` closes them.

    Raises UserError if there is no file or it is not netCDF.
    """

    recent: deque[xr.Dataset] = deque()
    cache = copies(config.cache)

    def open_one(path: str) -> xr.Dataset:
        if is_url(path):
            opened = open_remote(path, config.storage_options, cache)
        else:
            opened = netcdf_files.open_lazily(path, chunk_cache=False)
        recent.append(opened)
        if len(recent) > INDEXED:
            recent.popleft().close()  # what is still in use is opened again when it is read
        return opened

    def close() -> None:
        for one in recent:
            one.close()

    dataset = open_files(config, open_one, "a netCDF file", index=True)
    dataset.set_close(close)
    return dataset
