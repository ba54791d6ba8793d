"""Conversion of an experiment's variables to a training store, verified against its source.

Layout: zarr v3, chunks (1, all levels, band of latitude, all longitudes), zstd, several times per shard. A sample then
reads one chunk per variable and band, a domain rank reads only its own bands, and a year of data is hundreds of files
rather than millions.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec

from credit_like.data.files.chunks import ChunkedArray, layout_of
from credit_like.data.statistics import Progress
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.variables import Variable, Variables

_DIMS = ("time", "level", "latitude", "longitude")


def rechunk(
    store: FieldStore,
    variables: Variables,
    path: Path,
    band: int | None = None,
    times_per_shard: int = 32,
    progress: Progress | None = None,
) -> None:
    """Write the store `path` of all variables that are read; an interrupted call continues where it stopped.

    Every shard is read back and compared bit for bit before it counts as written. Values have the experiment's names
    and units, in float32. Raises FileExistsError if `path` exists, ValueError if the values read back differ from those
    written.
    """
    if path.exists():
        raise FileExistsError(f"expected no file or folder at {path}, got one; remove it or choose another path")
    draft = path.with_name(f".{path.name}.part")
    log = draft / "verified.json"
    stored = [variable for variable in variables if not variable.spec.compute]
    band = min(band or store.grid.height, store.grid.height)
    if not log.exists():
        shutil.rmtree(draft, ignore_errors=True)
        _create(store, stored, draft, band, times_per_shard)
        _note(log, 0)
    group = zarr.open_group(draft, mode="r+")
    begin = int(json.loads(log.read_text())["times"])
    fixed = [variable for variable in stored if variable.role == "static"]
    moving = [variable for variable in stored if variable.role != "static"]
    for variable in fixed:
        _write(store, variable, group, draft, slice(0, 1))
    for start in range(begin, len(store), times_per_shard):
        span = slice(start, min(start + times_per_shard, len(store)))
        for variable in moving:
            _write(store, variable, group, draft, span)
        _note(log, span.stop)
        if progress is not None:
            progress(span.stop, len(store))
    log.unlink()
    draft.rename(path)


def _note(log: Path, times: int) -> None:
    draft = log.with_suffix(".draft")
    draft.write_text(json.dumps({"times": times}))
    draft.replace(log)


def _create(store: FieldStore, stored: Sequence[Variable], path: Path, band: int, times_per_shard: int) -> None:
    """Create the arrays without data, with coordinates and CF attributes."""
    group = zarr.create_group(path, attributes={"Conventions": "CF-1.11"})
    levels = {variable.levels for variable in stored if variable.levels}
    if len(levels) > 1:
        raise UserError(
            "expected the same levels for all variables of a training store, got several sets; make one store each"
        )
    units = "seconds since 1970-01-01"
    coordinates: dict[str, tuple[Any, dict[str, str]]] = {
        "time": (store.seconds, {"units": units, "calendar": store.calendar, "standard_name": "time"}),
        "latitude": (store.grid.latitude, {"units": "degrees_north", "standard_name": "latitude"}),
        "longitude": (store.grid.longitude, {"units": "degrees_east", "standard_name": "longitude"}),
    }
    if levels:
        coordinates["level"] = (np.array(next(iter(levels)), np.float64), {"axis": "Z"})
    for name, (values, attrs) in coordinates.items():
        array = group.create_array(name, data=np.asarray(values), chunks=values.shape, dimension_names=[name])
        array.attrs.update(attrs)
    height, width = store.grid.height, store.grid.width
    bands = -(-height // band)
    for variable in stored:
        dims = [
            d
            for d in _DIMS
            if not (d == "time" and variable.role == "static") and not (d == "level" and not variable.levels)
        ]
        sizes = {"time": len(store), "level": len(variable.levels), "latitude": height, "longitude": width}
        chunk = {"time": 1, "level": len(variable.levels), "latitude": band, "longitude": width}
        shard = {**chunk, "time": times_per_shard, "latitude": band * bands}
        array = group.create_array(
            variable.name,
            shape=tuple(sizes[d] for d in dims),
            chunks=tuple(chunk[d] for d in dims),
            shards=tuple(shard[d] for d in dims),
            dtype="float32",
            fill_value=np.nan,
            compressors=BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle"),
            dimension_names=dims,
        )
        array.attrs.update(store.attrs(variable))


def _write(store: FieldStore, variable: Variable, group: zarr.Group, draft: Path, span: slice) -> None:
    """Write some times of one variable, then read them back and compare."""
    values = store.read([variable], range(span.start, span.stop))
    if not variable.levels:
        values = values[:, 0]
    array = group[variable.name]
    assert isinstance(array, zarr.Array)
    if variable.role == "static":
        values, key = values[0], tuple(slice(0, n) for n in array.shape)
    else:
        key = (span, *(slice(0, n) for n in array.shape[1:]))
    array[key] = values
    layout = layout_of(array, draft)
    assert layout is not None
    again = ChunkedArray(layout).box([(part.start, part.stop) for part in key])
    if again.tobytes() != np.ascontiguousarray(values).tobytes() and not np.array_equal(again, values, equal_nan=True):
        raise UserError(
            f"expected what was written of {variable.name} at times {span.start} to {span.stop}, got other values"
        )
    _flush(draft / variable.name)


def _flush(folder: Path) -> None:
    """Flush the directory's entries to the disk before progress is recorded."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
