"""netCDF files, version 3 or 4; version 4 also behind a URL."""

from __future__ import annotations

from typing import Literal

import fsspec
import xarray as xr

from credit_like.data.files import netcdf_files
from credit_like.data.sources._files import FileConfig, is_url, open_files


class Config(FileConfig):
    type: Literal["netcdf"] = "netcdf"


def open_dataset(config: Config) -> xr.Dataset:
    """Open the files of `config.path` as one lazy dataset, in the files' own names; its `close` closes them.

    Raises UserError if there is no file or it is not netCDF.
    """

    local: list[xr.Dataset] = []

    def open_one(path: str) -> xr.Dataset:
        if is_url(path):
            file = fsspec.open(path, "rb", **config.storage_options).open()
            return xr.open_dataset(file, engine="h5netcdf", decode_cf=False)
        local.append(netcdf_files.open_lazily(path, chunk_cache=False))
        return local[-1]

    def close() -> None:
        for one in local:
            one.close()

    dataset = open_files(config, open_one, "a netCDF file")
    dataset.set_close(close)
    return dataset
