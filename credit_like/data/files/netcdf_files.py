"""netCDF files with one owner each and one lock for all.

Neither netCDF-C nor HDF5 is thread-safe, and the netCDF4 package releases the GIL while it is inside them. A
`netCDF4.Dataset` that is dropped while open is closed by the thread that happens to collect garbage, without a lock,
while another thread may be reading or writing. This corrupts memory or the file being written. Therefore every file is
opened, read, written and closed here, under the lock that xarray uses for its own files, and no Dataset is ever dropped
open.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import logging
import math
import os
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import netCDF4
import numpy as np
import xarray as xr
from numpy.typing import NDArray
from xarray.backends import AbstractDataStore, NetCDF4DataStore
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK
from xarray.core import indexing

from credit_like.data.files.direct import DirectArray, Spans
from credit_like.errors import RunError
from credit_like.small_files import require_regular

_MOST_OPEN = 128  # files kept open for reading; a process is often limited to 1024 open files of all kinds
_UNPACKED_BYTES = 2**28  # that any file may take in memory
_MOST_COMPRESSED = 1100  # deflate makes no values smaller than by a factor of 1032
_NO_CACHE = (0, 1, 0.0)
_PAUSES = (0.01, 0.05, 0.2, 0.5, 1.0, 3.0)  # seconds between attempts to open a locked file
_DEFAULT_CACHE = netCDF4.get_chunk_cache()
_LOG = logging.getLogger(__name__)


class _Exclusive:
    """Re-entrant version of xarray's lock of HDF5 and netCDF-C.

    It is re-entrant because a finaliser or a signal handler may run in the thread that holds it. xarray's own functions
    take the underlying lock, which is not re-entrant, so variables that they read lazily must not be read while it is
    held.
    """

    def __init__(self) -> None:
        self._owner, self._depth = 0, 0

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            NETCDF4_PYTHON_LOCK.acquire()
            self._owner = threading.get_ident()
        self._depth += 1
        if self._depth == 1 and _dropped:
            try:
                _close_dropped()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            NETCDF4_PYTHON_LOCK.release()


_EXCLUSIVE = _Exclusive()
_numbers = itertools.count()
_open: OrderedDict[int, netCDF4.Dataset] = OrderedDict()  # by number of the File, most recently used last
_writing: dict[int, str] = {}  # path by number
_dropped: deque[int] = deque()  # numbers of collected Files; appending needs no lock
_kept: list[netCDF4.Dataset] = []  # must not be closed again, and therefore not be collected either


class File:
    """Owner of a netCDF file, for reading or for writing a new one; safe to use from several threads.

    A file for reading is opened on first use, and reopened after `close`, in a forked process, or when it was closed in
    favour of more recently used ones. It can be pickled. A file for writing is created at once, replacing any existing
    one; it belongs to this process and stays open until `close`. A File that is dropped while open is closed when the
    lock is next taken, at the latest at the end of the process.

    Without `chunk_cache`, HDF5 caches no decoded chunks: the cache takes megabytes per variable and does not help
    shuffled reads. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str | Path, mode: Literal["r", "w"] = "r", *, chunk_cache: bool = True) -> None:
        self._number = next(_numbers)
        self.path = str(path) if "://" in str(path) else os.path.abspath(path)
        self._mode, self._chunk_cache = mode, chunk_cache
        if mode == "w":
            with _EXCLUSIVE:
                self._open_now()
                _writing[self._number] = self.path

    @contextmanager
    def opened(self) -> Iterator[netCDF4.Dataset]:
        """Yield the open file while no other thread is inside the library, for use inside the `with` block only."""
        with _EXCLUSIVE:
            if self._number in _open:
                _open.move_to_end(self._number)
            elif self._mode == "r":
                self._open_now()
            else:
                raise ValueError(f"expected {self.path} to be open for writing, it is closed or of another process")
            yield _open[self._number]

    def read(self, name: str, spans: Spans) -> NDArray[Any]:
        """Return a box of a variable as it is stored."""
        with self.opened() as opened:
            variable = opened[name]
            variable.set_auto_maskandscale(False)
            variable.set_auto_chartostring(False)
            values: NDArray[Any] = variable[tuple(slice(start, stop) for start, stop in spans)]
            return values

    def close(self) -> None:
        """Close the file if this process has it open. Raises OSError or RuntimeError if its end cannot be written."""
        with _EXCLUSIVE:
            _close(self._number)

    def _open_now(self) -> None:
        readers = [number for number in _open if number not in _writing] if len(_open) >= _MOST_OPEN else []
        for number in readers[: len(_open) - _MOST_OPEN + 1]:
            _close(number)
        netCDF4.set_chunk_cache(*(_DEFAULT_CACHE if self._chunk_cache else _NO_CACHE))
        _open[self._number] = _opened(self.path, self._mode)

    def __del__(self) -> None:
        # this may run in any thread, perhaps inside the library, where only appending is safe
        _dropped.append(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._mode == "w":
            raise TypeError(f"expected a file to read, got {self.path}, which is being written; it cannot be pickled")
        return _reader, (self.path, self._chunk_cache)


def _opened(path: str, mode: Literal["r", "w"]) -> netCDF4.Dataset:
    """Open a file, waiting for a lock that a process forked a moment ago still holds.

    HDF5's lock of a file that was being written lasts until the child has redirected the descriptor that it inherited
    (`_detach`). The library's errors do not tell a lock from a damaged file or a lack of permission. A pipe is refused.
    """
    if mode == "r" and os.path.exists(path):
        require_regular(path)
    was_free = False
    for pause in _PAUSES:
        try:
            return netCDF4.Dataset(path, mode)
        except FileNotFoundError:
            raise
        except OSError:
            locked = _is_locked(path, mode)
            if was_free and not locked:
                if mode == "w":
                    _write_a_byte_beside(path)
                raise
            was_free = not locked  # a lock may have been released since: try once more
        if locked:
            time.sleep(pause)
    return netCDF4.Dataset(path, mode)


def _write_a_byte_beside(path: str) -> None:
    """Raise the OSError of the disk, with this path, if it takes no byte; the library calls a full disk a lack of permission."""
    try:
        with tempfile.TemporaryFile(buffering=0, dir=os.path.dirname(path) or ".") as file:
            file.write(b"\0")
    except FileNotFoundError:
        return
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _is_locked(path: str, mode: Literal["r", "w"]) -> bool:
    """Return whether another open file has a lock that HDF5's own would conflict with."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, (fcntl.LOCK_SH if mode == "r" else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


def _reader(path: str, chunk_cache: bool) -> File:
    return File(path, chunk_cache=chunk_cache)


def _close(number: int) -> None:
    """Close a file; the caller holds the lock."""
    _writing.pop(number, None)
    file = _open.pop(number, None)
    if file is None:
        return
    try:
        file.close()
    except (OSError, RuntimeError):
        _kept.append(file)  # the library counts it as open, so the collector would close it a second time
        raise


def _close_dropped() -> None:
    while _dropped:
        number = _dropped.popleft()
        try:
            _close(number)
        except (OSError, RuntimeError) as error:
            _LOG.warning("a netCDF file that was no longer used did not close: %s", error)


def _close_all() -> None:
    with _EXCLUSIVE:
        _dropped.extend(_open)
        _close_dropped()


def _forget() -> None:
    """Forget the parent's files in a forked process, because the file offsets and data are shared with the parent."""
    _kept.extend(_open.values())
    _detach(_writing.values())
    _open.clear()
    _writing.clear()
    _dropped.clear()
    _EXCLUSIVE.__exit__()


def _detach(paths: Iterable[str]) -> None:
    """Redirect the descriptors of files that the parent is writing to the null device.

    HDF5's lock of such a file lasts as long as any process has it open. Without this, no process could read the
    finished file as long as this one lives, and a flush at the end of this process could corrupt it.
    """
    wanted = {os.path.realpath(path) + end for path in paths for end in ("", " (deleted)")}
    if not wanted or not os.path.isdir("/proc/self/fd"):
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") in wanted:
                os.dup2(nowhere, int(descriptor))
    os.close(nowhere)


atexit.register(_close_all)
# A fork while another thread is inside the library would leave the child with a lock that is never released.
os.register_at_fork(before=_EXCLUSIVE.__enter__, after_in_parent=_EXCLUSIVE.__exit__, after_in_child=_forget)


@contextmanager
def reading(path: str | Path) -> Iterator[netCDF4.Dataset]:
    """Yield an open file for the duration of a `with` block, in which no other thread is inside the library.

    Raises OSError if it cannot be opened.
    """
    with closing(File(path)) as file, file.opened() as opened:
        yield opened


def load(path: str | Path, **decoding: Any) -> xr.Dataset:
    """Load a file into memory, as `xarray.load_dataset` with these options does.

    Raises OSError if it cannot be opened, ValueError if it would take far more memory than compression explains.
    """
    with reading(path) as file:
        unpacked = sum(math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in file.variables.values())
        limit = max(_UNPACKED_BYTES, _MOST_COMPRESSED * os.path.getsize(path))
        if unpacked > limit:
            raise ValueError(f"expected at most {limit:,} bytes of values, got a file that declares {unpacked:,}")
        dataset = xr.open_dataset(NetCDF4DataStore(file, lock=False), **decoding).load()
    dataset.set_close(None)
    return dataset


def save(dataset: xr.Dataset, path: str | Path, encoding: Mapping[str, Any] | None = None) -> None:
    """Write a file like `Dataset.to_netcdf`, but under the lock throughout.

    Raises OSError, or RunError with the library's message, if it cannot be written.
    """
    values = dataset.compute()  # lazy variables take the lock themselves
    with written(path), closing(File(path, "w")) as file, file.opened() as opened:
        store = NetCDF4DataStore(opened, mode="w", lock=False)
        values.dump_to_store(store, encoding=dict(encoding or {}))


@contextmanager
def written(path: str | Path) -> Iterator[None]:
    """Raise RunError that names the file for what the library raises where a disk or a limit of the system ends a write."""
    try:
        yield
    except RuntimeError as error:  # "NetCDF: HDF error" of a full disk
        raise RunError(
            f"{path} cannot be written ({error}); free some space on its disk, raise the limit of the size of files (ulimit -f), "
            "or write to another disk"
        ) from error


def open_lazily(path: str | Path, *, chunk_cache: bool = True) -> xr.Dataset:
    """Open a file with nothing decoded; fields are read on use, index and text variables at once.

    The dataset can be pickled and used in forked processes. Its `close` closes the file. Raises OSError if the file
    cannot be opened.
    """
    return lazily(File(path, chunk_cache=chunk_cache), lambda opened: NetCDF4DataStore(opened, lock=False))


class Owner(Protocol):
    """Interface to open, read and close one file while no other thread is inside the library."""

    def opened(self) -> AbstractContextManager[Any]:
        """Yield the open file."""

    def read(self, name: str, spans: Spans) -> NDArray[Any]:
        """Return a box of a variable as it is stored."""

    def close(self) -> None:
        """Close the file; the next use opens it again."""


def lazily(file: Owner, store: Callable[[Any], AbstractDataStore]) -> xr.Dataset:
    """Return the dataset of a file as `open_lazily` does; `store` makes xarray's of the open file."""
    with file.opened() as opened:
        dataset = xr.open_dataset(store(opened), decode_cf=False)
        fields: dict[Hashable, xr.Variable] = {}
        for name, variable in dataset.variables.items():
            if variable.dtype.kind in "iufS" and variable.ndim and name not in dataset.xindexes:
                chunks = variable.encoding.get("chunksizes") or (1,) * variable.ndim
                array = _Stored(file, str(name), variable.shape, variable.dtype, tuple(chunks))
                lazy = indexing.LazilyIndexedArray(array)
                fields[name] = xr.Variable(variable.dims, lazy, variable.attrs, variable.encoding)
            else:
                variable.load()
        dataset = dataset.assign(fields)
    dataset.set_close(file.close)
    return dataset


class _Stored(DirectArray):
    """One variable of a file, without decoding."""

    def __init__(
        self, file: Owner, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: tuple[int, ...]
    ) -> None:
        self.file, self.name = file, name
        self.shape, self.dtype, self.chunks = shape, dtype, chunks

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        values = self.file.read(self.name, spans)
        if out is None:
            return values
        out[...] = values
        return out
