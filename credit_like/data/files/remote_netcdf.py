"""netCDF-4 files behind a URL: opened on first use, and again after they were closed or in a forked process.

h5py has one lock for all files and is inside it while a request waits for the server, so that one process reads one file at a
time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import xarray as xr
from fsspec.asyn import get_loop, sync
from numpy.typing import NDArray

from credit_like.data.files.direct import Spans
from credit_like.data.files.netcdf_files import lazily
from credit_like.data.files.object_cache import ObjectCache
from credit_like.data.files.remote_file import RemoteFile

_LOCK = threading.RLock()
# A fork while another thread reads would leave the child with a lock that is never released.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing objects of h5py in fsspec's thread, where it runs when that thread allocates.

    It would wait there for h5py's lock, while the thread that has the lock waits for an answer from fsspec's thread.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        if was_on:
            sync(get_loop(), asyncio.sleep, 0)  # a collection that had begun in that thread has ended
        yield
    finally:
        if was_on:
            gc.enable()


class _Owner:
    """Owner of a file behind a URL."""

    def __init__(self, url: str, storage_options: dict[str, Any], cache: ObjectCache | None) -> None:
        self._where = url, storage_options, cache
        self._file: Any = None
        self._pid = os.getpid()

    @contextmanager
    def opened(self) -> Iterator[Any]:
        import h5netcdf

        with _LOCK, _no_collection():
            if self._file is None or self._pid != os.getpid():
                self._file = h5netcdf.File(RemoteFile(*self._where), "r", decode_vlen_strings=True)
                self._pid = os.getpid()
            yield self._file

    def read(self, name: str, spans: Spans) -> NDArray[Any]:
        with self.opened() as opened:
            return np.asarray(opened[name][tuple(slice(*span) for span in spans)])

    def close(self) -> None:
        with _LOCK, _no_collection():
            file, self._file = self._file, None
            if file is not None:
                file.close()


def open_remote(url: str, storage_options: dict[str, Any], cache: ObjectCache | None) -> xr.Dataset:
    """Open a file with nothing decoded; fields are read on use, index and text variables at once.

    The `close` of the dataset closes the file; a later read opens it again. Raises RemoteError if the server fails, OSError if
    the file is not netCDF-4, ImportError if a package is missing.
    """
    from xarray.backends.h5netcdf_ import H5NetCDFStore

    return lazily(_Owner(url, storage_options, cache), lambda opened: H5NetCDFStore(opened, lock=False))
