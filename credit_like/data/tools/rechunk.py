"""Conversion of an experiment's variables to a training store, verified against its source.

Layout: zarr v3, chunks (1, all levels, band of latitude, all longitudes), zstd, several times per shard. A sample then
reads one chunk per variable and band, a domain rank reads only its own bands, and a year of data is hundreds of files
rather than millions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec

from credit_like.data.files.chunks import ChunkedArray, layout_of
from credit_like.data.locate import ORIGIN
from credit_like.data.statistics import Progress
from credit_like.data.store import FieldStore
from credit_like.data.tools.stamps import digest_of_files
from credit_like.errors import UserError
from credit_like.lock import FileLock
from credit_like.outputs import sync
from credit_like.variables import Variable, Variables

_DIMS = ("time", "level", "latitude", "longitude")
_LOG = logging.getLogger(__name__)


def rechunk(
    store: FieldStore,
    variables: Variables,
    path: Path,
    band: int | None = None,
    times_per_shard: int = 32,
    progress: Progress | None = None,
    times: NDArray[np.int64] | None = None,
) -> None:
    """Write the store `path` of all variables that are read; an interrupted call continues where it stopped.

    `times` are the positions to write, by default all. Every shard is read back and compared with what was read before it
    counts as written. Values have the experiment's names and units, in float32. What an interrupted call left of other
    sources, files that have changed, variables, times or chunks is begun anew. Raises FileExistsError if `path` exists,
    ValueError if the values read back differ from those written, Locked while another process writes the same store.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock"), path, "name another path", temporary=True):
        if path.exists():
            raise FileExistsError(f"expected no file or folder at {path}, got one; remove it or choose another path")
        draft = path.with_name(f".{path.name}.part")
        log = draft / "verified.json"
        stored = [variable for variable in variables if not variable.spec.compute]
        band = min(band or store.grid.height, store.grid.height)
        times = np.arange(len(store)) if times is None else times
        digest = _digest(store, variables, times, band, times_per_shard)
        begin = _written(log, digest)
        if begin is None:
            if draft.exists():
                _LOG.info("%s: starting over, because the unfinished copy has different data or chunks", path)
            shutil.rmtree(draft, ignore_errors=True)
            _create(store, stored, draft, times, band, times_per_shard)
            begin = 0
            _note(log, digest, begin)
        group = zarr.open_group(draft, mode="r+")
        fixed = [variable for variable in stored if variable.role == "static"]
        moving = [variable for variable in stored if variable.role != "static"]
        for variable in fixed:
            _write(store, variable, group, draft, times, slice(0, 1))
        for start in range(begin, len(times), times_per_shard):
            span = slice(start, min(start + times_per_shard, len(times)))
            for variable in moving:
                _write(store, variable, group, draft, times, span)
            _note(log, digest, span.stop)
            if progress is not None:
                progress(span.stop, len(times))
        log.unlink()
        draft.rename(path)


def _digest(store: FieldStore, variables: Variables, times: NDArray[np.int64], band: int, times_per_shard: int) -> str:
    """Return a hash of everything on which the contents of the store depend; of the files, their sizes and times."""
    stored = [variable for variable in variables if not variable.spec.compute]

    def source(variable: Variable) -> Any:
        found = store.source_of(variable)
        if found is None:
            return None
        config, name = found
        return [config.model_dump(mode="json") if hasattr(config, "model_dump") else config.type, name]

    told = {
        "files": digest_of_files(store, variables),
        "variables": [
            [v.name, v.role, v.levels, v.spec.model_dump(mode="json"), source(v), store.attrs(v), store.level_attrs(v)]
            for v in stored
        ],
        "grid": [store.grid.latitude.tolist(), store.grid.longitude.tolist()],
        "calendar": store.calendar,
        "times": store.seconds[times].tolist(),
        "chunks": [band, times_per_shard],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _written(log: Path, digest: str) -> int | None:
    """Return how many times an interrupted call has written of the same store, or None if there is none of it.

    A record that a power failure left empty counts as none.
    """
    if not log.exists():
        return None
    try:
        noted = json.loads(log.read_text())
        return int(noted["times"]) if noted["digest"] == digest else None
    except (ValueError, KeyError, TypeError):
        return None


def _note(log: Path, digest: str, times: int) -> None:
    draft = log.with_suffix(".draft")
    draft.write_text(json.dumps({"times": times, "digest": digest}))
    draft.replace(log)


def _create(
    store: FieldStore,
    stored: Sequence[Variable],
    path: Path,
    times: NDArray[np.int64],
    band: int,
    times_per_shard: int,
) -> None:
    """Create the arrays without data, with coordinates and CF attributes."""
    group = zarr.create_group(path, attributes={"Conventions": "CF-1.11"})
    on_levels = [variable for variable in stored if variable.levels]
    levels = {variable.levels for variable in on_levels}
    if len(levels) > 1:
        raise UserError(
            "expected the same levels for all variables of a training store, got several sets; make one store each"
        )
    units = "seconds since 1970-01-01"
    coordinates: dict[str, tuple[Any, dict[str, str]]] = {
        "time": (store.seconds[times], {"units": units, "calendar": store.calendar, "standard_name": "time"}),
        "latitude": (store.grid.latitude, {"units": "degrees_north", "standard_name": "latitude"}),
        "longitude": (store.grid.longitude, {"units": "degrees_east", "standard_name": "longitude"}),
    }
    if levels:
        coordinates["level"] = (
            np.array(next(iter(levels)), np.float64),
            {**store.level_attrs(on_levels[0]), "axis": "Z"},
        )
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
        sizes = {"time": len(times), "level": len(variable.levels), "latitude": height, "longitude": width}
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
        array.attrs.update(store.attrs(variable) | store.sum_attrs(variable))
        # By this a climatology of the copied data is known as one of the copy.
        array.attrs[ORIGIN] = store.origin(variable)


def _write(
    store: FieldStore, variable: Variable, group: zarr.Group, draft: Path, times: NDArray[np.int64], span: slice
) -> None:
    """Write some of the `times` of one variable, then read them back and compare."""
    values = store.read([variable], times[span])
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
    if not _is_written(ChunkedArray(layout), values, key):
        raise UserError(
            f"expected what was written of {variable.name} at times {span.start} to {span.stop}, got other values"
        )
    sync(draft / variable.name)


def _is_written(array: ChunkedArray, values: NDArray[np.float32], key: tuple[slice, ...]) -> bool:
    """Return whether the values equal a part of an array, comparing one chunk of times after the other."""
    start, size = key[0].start, array.chunks[0]
    spans = [(part.start, part.stop) for part in key[1:]]
    return all(
        np.array_equal(array.box([(start + at, start + at + len(part)), *spans]), part, equal_nan=True)
        for at in range(0, len(values), size)
        for part in [values[at : at + size]]
    )
