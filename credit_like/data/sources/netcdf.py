"""netCDF files, version 3 or 4; version 4 also behind a URL."""

from __future__ import annotations

from collections import deque
from typing import Literal

import fsspec
import xarray as xr

from credit_like.data.files import netcdf_files
from credit_like.data.sources._files import INDEXED, FileConfig, is_url, open_files


class Config(FileConfig):
    type: Literal["netcdf"] = "netcdf"


def open_dataset(config: Config) -> xr.Dataset:
    """Open the files of `config.path` as one lazy dataset, in the files' own names; its `close` closes them.

    Raises UserError if there is no file or it is not netCDF.
    """

    local: deque[xr.Dataset] = deque()

    def open_one(path: str) -> xr.Dataset:
        if is_url(path):
            file = fsspec.open(path, "rb", **config.storage_options).open()
            return xr.open_dataset(file, engine="h5netcdf", decode_cf=False)
        opened = netcdf_files.open_lazily(path, chunk_cache=False)
        local.append(opened)
        if len(local) > INDEXED:
            local.popleft().close()  # what is still in use is opened again when it is read
        return opened

    def close() -> None:
        for one in local:
            one.close()

    dataset = open_files(config, open_one, "a netCDF file", index=True)
    dataset.set_close(close)
    return dataset
