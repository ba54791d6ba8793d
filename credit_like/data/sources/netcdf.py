"""netCDF files, version 3 or 4; version 4 also behind a URL."""

from __future__ import annotations

from typing import Any, Literal

import fsspec
import netCDF4
import numpy as np
import xarray as xr
from numpy.typing import NDArray
from xarray.backends import CachingFileManager
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK
from xarray.core import indexing

from credit_like.data.direct import DirectArray, Spans
from credit_like.data.sources._files import FileConfig, is_url, open_files


class Config(FileConfig):
    type: Literal["netcdf"] = "netcdf"


def open_dataset(config: Config) -> xr.Dataset:
    """The files of `config.path` as one lazy dataset, in the files' own names.

    Raises UserError where nothing is there, or it is not netCDF.
    """

    # HDF5 would keep megabytes of decoded chunks for every variable of every open file, and shuffled reads never hit them
    def open_one(path: str) -> xr.Dataset:
        if is_url(path):
            file = fsspec.open(path, "rb", **config.storage_options).open()
            return xr.open_dataset(file, engine="h5netcdf", decode_cf=False)
        netCDF4.set_chunk_cache(0, 1, 0.0)
        return _direct(xr.open_dataset(path, engine="netcdf4", decode_cf=False), path)

    return open_files(config, open_one, "a netCDF file")


def _direct(dataset: xr.Dataset, path: str) -> xr.Dataset:
    """The same, with data variables of numbers read past xarray's indexing."""
    opener: Any = netCDF4.Dataset
    manager: CachingFileManager[Any] = CachingFileManager(opener, path, mode="r", lock=NETCDF4_PYTHON_LOCK)
    for name, variable in dataset.data_vars.items():
        if variable.dtype.kind in "iuf" and variable.ndim and isinstance(name, str):
            chunks = variable.encoding.get("chunksizes") or (1,) * variable.ndim
            array = _Stored(manager, name, variable.shape, variable.dtype, tuple(chunks))
            dataset[name] = xr.Variable(variable.dims, indexing.LazilyIndexedArray(array), variable.attrs)
    return dataset


class _Stored(DirectArray):
    """One variable of a local file; the files used last stay open, as xarray's own do."""

    def __init__(
        self,
        manager: CachingFileManager[Any],
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: tuple[int, ...],
    ) -> None:
        self.manager, self.name = manager, name
        self.shape, self.dtype, self.chunks = shape, dtype, chunks

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        with NETCDF4_PYTHON_LOCK:
            variable = self.manager.acquire(needs_lock=False)[self.name]
            variable.set_auto_maskandscale(False)
            values: NDArray[Any] = variable[tuple(slice(start, stop) for start, stop in spans)]
        if out is None:
            return values
        out[...] = values
        return out
