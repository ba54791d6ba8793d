"""netCDF files, version 3 or 4; version 4 also behind a URL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import fsspec
import netCDF4
import xarray as xr

from credit_like.data.sources._files import FileConfig, is_url, open_files
from credit_like.variables import Variable


class Config(FileConfig):
    type: Literal["netcdf"] = "netcdf"


def open_dataset(config: Config, variables: Sequence[Variable] | None = None) -> xr.Dataset:
    """The files of `config.path` as one lazy dataset, in the files' own names.

    Raises ValueError where nothing is there, or it is not netCDF.
    """

    # HDF5 would keep megabytes of decoded chunks for every variable of every open file, and shuffled reads never hit them
    def open_one(path: str) -> xr.Dataset:
        if is_url(path):
            file = fsspec.open(path, "rb", **config.storage_options).open()
            return xr.open_dataset(file, engine="h5netcdf", decode_cf=False)
        netCDF4.set_chunk_cache(0, 1, 0.0)
        return xr.open_dataset(path, engine="netcdf4", decode_cf=False)

    return open_files(config, open_one, "a netCDF file")
