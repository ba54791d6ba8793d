"""Arrays in files that xarray indexes lazily and that can also read a box into existing memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from xarray.backends import BackendArray
from xarray.core import indexing

Spans = Sequence[tuple[int, int]]
"""[start, stop) along every dimension."""


class DirectArray(BackendArray):
    """Base class of arrays that read boxes.

    Subclasses define `shape`, `dtype`, `chunks` (the unit of decoding) and `box`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the values inside the spans, written to `out` (of that shape) if given."""
        raise NotImplementedError

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self._basic)

    def _basic(self, key: tuple[Any, ...]) -> NDArray[Any]:
        """Return the values at integers and slices, with numpy's semantics."""
        spans: list[tuple[int, int]] = []
        after: list[slice | int] = []
        for part, size in zip(key, self.shape, strict=True):
            if isinstance(part, slice):
                start, stop, step = part.indices(size)
                wanted = range(start, stop, step)
                spans.append((min(wanted), max(wanted) + 1) if wanted else (0, 0))
                after.append(slice(None, None, step))
            else:
                spans.append((int(part) % size, int(part) % size + 1))
                after.append(0)
        return self.box(spans)[tuple(after)]


def direct(variable: xr.Variable) -> tuple[DirectArray, list[int]] | None:
    """Return the array behind a lazy variable and its offsets in it, or None if it is not a plain box of one."""
    data = variable._data
    while isinstance(data, indexing.CopyOnWriteArray | indexing.MemoryCachedArray):
        data = data.array
    if not isinstance(data, indexing.LazilyIndexedArray) or not isinstance(data.array, DirectArray):
        return None
    offsets = []
    for part, size in zip(data.key.tuple, data.array.shape, strict=True):
        if not isinstance(part, slice):
            return None
        start, stop, step = part.indices(size)
        if step != 1 or stop < start:
            return None
        offsets.append(start)
    return data.array, offsets


def chunk_along(variable: xr.Variable, dim: str) -> tuple[int, int] | None:
    """Return the size of the chunks of a lazy variable along a dimension and its offset in them, or None if that is not known.

    Unlike `direct`, this sees through decoding and regridding.
    """
    data: Any = variable._data
    axis, offset = variable.dims.index(dim), 0
    while not isinstance(data, DirectArray):
        if isinstance(data, indexing.LazilyIndexedArray):
            kept = [i for i, part in enumerate(data.key.tuple) if not isinstance(part, int | np.integer)]
            axis = kept[axis]
            part = data.key.tuple[axis]
            start, _, step = part.indices(data.array.shape[axis]) if isinstance(part, slice) else (0, 0, 0)
            if step != 1:
                return None
            offset += start
        source = getattr(data, "source", None)
        if isinstance(source, xr.Variable):
            found = chunk_along(source, dim)
            return None if found is None else (found[0], found[1] + offset)
        data = getattr(data, "array", None)
        if data is None:
            return None
    return data.chunks[axis], offset
