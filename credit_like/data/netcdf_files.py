"""netCDF files: one owner for each, one lock for all.

Neither netCDF-C nor HDF5 is thread-safe, and the netCDF4 package releases the GIL while it is inside them. A
`netCDF4.Dataset` that is dropped open is closed by whichever thread collects garbage, without a lock, while another
thread may be reading or writing: memory is corrupted, or the file being written. Therefore every file is opened, read,
written and closed here, under the lock that xarray takes for its own files as well, and no Dataset is ever dropped open.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import netCDF4
import numpy as np
import xarray as xr
from numpy.typing import NDArray
from xarray.backends import NetCDF4DataStore
from xarray.backends.netCDF4_ import NETCDF4_PYTHON_LOCK
from xarray.core import indexing

from credit_like.data.direct import DirectArray, Spans

_MOST_OPEN = 128  # files kept open for reading; a process may often have no more than 1024 of all kinds
_NO_CACHE = (0, 1, 0.0)
_DEFAULT_CACHE = netCDF4.get_chunk_cache()
_LOG = logging.getLogger(__name__)


class _Exclusive:
    """xarray's lock of HDF5 and netCDF-C, which the thread that holds it may take again.

    Again, because a finaliser or a signal handler may run in a thread that holds it. xarray's own functions take the
    lock without that: what they read lazily must not be read while it is held.
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
_open: OrderedDict[int, netCDF4.Dataset] = OrderedDict()  # by number of the File, used last at the end
_writing: dict[int, str] = {}  # path by number
_dropped: deque[int] = deque()  # numbers of Files that were collected; appending needs no lock
_kept: list[netCDF4.Dataset] = []  # must not be closed, and therefore not be collected either


class File:
    """Owns a netCDF file, to read or to make; safe to use from several threads.

    A file to read is opened when it is first used, and again after `close`, in a forked process, or when many others
    were used since. It may be pickled. A file to make is made at once, in place of any other; it belongs to this
    process, and stays open until `close`. A File that is dropped open is closed when the lock is next taken, at the
    latest at the end of the process.

    Without `chunk_cache`, HDF5 keeps no decoded chunks: megabytes for every variable, of no use to shuffled reads.
    Raises OSError where the file cannot be opened.
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
        """The open file, while no other thread is inside the library; to be used inside the `with` block only."""
        with _EXCLUSIVE:
            if self._number in _open:
                _open.move_to_end(self._number)
            elif self._mode == "r":
                self._open_now()
            else:
                raise ValueError(f"expected {self.path} to be open for writing, it is closed or of another process")
            yield _open[self._number]

    def close(self) -> None:
        """Close the file if this process has it open. Raises OSError or RuntimeError where its end cannot be written."""
        with _EXCLUSIVE:
            _close(self._number)

    def _open_now(self) -> None:
        readers = [number for number in _open if number not in _writing] if len(_open) >= _MOST_OPEN else []
        for number in readers[: len(_open) - _MOST_OPEN + 1]:
            _close(number)
        netCDF4.set_chunk_cache(*(_DEFAULT_CACHE if self._chunk_cache else _NO_CACHE))
        _open[self._number] = netCDF4.Dataset(self.path, self._mode)

    def __del__(self) -> None:
        _dropped.append(self._number)  # any thread, perhaps inside the library: no more than this is safe

    def __reduce__(self) -> tuple[Any, ...]:
        if self._mode == "w":
            raise TypeError(f"expected a file to read, got {self.path}, which is being written; it cannot be pickled")
        return _reader, (self.path, self._chunk_cache)


def _reader(path: str, chunk_cache: bool) -> File:
    return File(path, chunk_cache=chunk_cache)


def _close(number: int) -> None:
    """Under the lock."""
    _writing.pop(number, None)
    file = _open.pop(number, None)
    if file is None:
        return
    try:
        file.close()
    except (OSError, RuntimeError):
        _kept.append(file)  # it still counts as open: the collector would close it a second time
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
    """In a forked process: files of the parent are neither read nor closed, they share their offsets and their end."""
    _kept.extend(_open.values())
    _detach(_writing.values())
    _open.clear()
    _writing.clear()
    _dropped.clear()
    _EXCLUSIVE.__exit__()


def _detach(paths: Iterable[str]) -> None:
    """Let the descriptors of files that the parent is writing lead nowhere.

    HDF5's lock of such a file lasts as long as any process has it open, so nobody could read it, once it is whole, while
    this process lives. Nor can a flush at the end of this process spoil the file.
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
# A fork while another thread is inside the library would leave the child with a lock that nobody releases.
os.register_at_fork(before=_EXCLUSIVE.__enter__, after_in_parent=_EXCLUSIVE.__exit__, after_in_child=_forget)


@contextmanager
def reading(path: str | Path) -> Iterator[netCDF4.Dataset]:
    """A file for the time of a `with` block; no other thread is inside the library meanwhile.

    Raises OSError where it cannot be opened.
    """
    with closing(File(path)) as file, file.opened() as opened:
        yield opened


def load(path: str | Path, **decoding: Any) -> xr.Dataset:
    """Return a file in memory, as `xarray.load_dataset` with these options does.

    Raises OSError where it cannot be opened.
    """
    with reading(path) as file:
        dataset = xr.open_dataset(NetCDF4DataStore(file, lock=False), **decoding).load()
    dataset.set_close(None)
    return dataset


def save(dataset: xr.Dataset, path: str | Path, encoding: Mapping[str, Any] | None = None) -> None:
    """Write a file as `Dataset.to_netcdf` does, which takes the lock only for a part of that.

    Raises OSError or RuntimeError where it cannot be written.
    """
    values = dataset.compute()  # what is read lazily takes the lock itself
    with closing(File(path, "w")) as file, file.opened() as opened:
        store = NetCDF4DataStore(opened, mode="w", lock=False)
        values.dump_to_store(store, encoding=dict(encoding or {}))


def open_lazily(path: str | Path, *, chunk_cache: bool = True) -> xr.Dataset:
    """Return a file with nothing decoded; fields are read when they are used, index and text variables at once.

    The dataset may be pickled and used in forked processes. Its `close` closes the file. Raises OSError where the file
    cannot be opened.
    """
    file = File(path, chunk_cache=chunk_cache)
    with file.opened() as opened:
        dataset = xr.open_dataset(NetCDF4DataStore(opened, lock=False), decode_cf=False)
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
    """One variable of a file, as it is stored."""

    def __init__(
        self, file: File, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: tuple[int, ...]
    ) -> None:
        self.file, self.name = file, name
        self.shape, self.dtype, self.chunks = shape, dtype, chunks

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        with self.file.opened() as opened:
            variable = opened[self.name]
            variable.set_auto_maskandscale(False)
            variable.set_auto_chartostring(False)
            values: NDArray[Any] = variable[tuple(slice(start, stop) for start, stop in spans)]
        if out is None:
            return values
        out[...] = values
        return out
