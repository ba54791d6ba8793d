"""The zarr store of a forecast."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import xarray as xr
import zarr
from zarr.codecs import BloscCodec

from credit_like.errors import UserError, reading
from credit_like.inference.layout import ForecastLayout
from credit_like.inference.writers._base import Fields, ForecastKey, Writer
from credit_like.inference.writers.zarr import by_member as _by_member
from credit_like.outputs import process_name, sync

# A fifth smaller than uncompressed, like zstd, and as fast to write as uncompressed.
_COMPRESSOR = BloscCodec(cname="lz4", clevel=1, shuffle="shuffle", typesize=4)


class ZarrWriter(Writer):
    """Writer of one store, a region at a time; all levels of a lead share a file."""

    by_member = _by_member

    def __init__(self, layout: ForecastLayout, folder: Path, chunk_bytes: int) -> None:
        super().__init__(layout, folder, chunk_bytes)
        self.path = folder / "forecast.zarr"
        self.partial = folder / "forecast.zarr.part"
        self._arrays: dict[str, Any] = {}
        self._box: tuple[int, int] | None = None

    @property
    def box(self) -> tuple[int, int]:
        """Return the rows and columns of a chunk: those of the store if it exists, else the equal parts of a field."""
        if self._box is None:
            height, width = super().box
            rows, columns = self.layout.parts
            return -(-height // rows), -(-width // columns)
        return self._box

    def open(self) -> None:
        # Before the store is looked for: marks that are listed later may be of a store that another process creates meanwhile.
        marks = [*(self.folder / "done").glob("*")]
        # Of one listing, because another process may rename the one to the other at any time.
        if not {self.partial.name, self.path.name} & set(os.listdir(self.folder)):
            for mark in marks:
                mark.unlink(missing_ok=True)  # of a store that somebody has removed
            self._create()
        self._check()
        # It may be that of a run that divides fields otherwise.
        self._box = self._array(next(iter(self.layout.chosen))).chunks[-2:]

    def _check(self) -> None:
        """Raise UserError where files of the store's coordinates or of the metadata of its arrays were removed or damaged."""
        store = self.partial if self.partial.exists() else self.path
        try:
            self._check_store(store)
        except UserError:
            if store == self.path or self.partial.exists():
                raise
            self._check_store(self.path)  # another process has just renamed it

    def _check_store(self, store: Path) -> None:
        wanted = self.layout.coordinates()
        advice = f"remove {self.folder} and run `credit-like rollout` again"
        with reading("forecasts", store, advice):
            seconds = xr.coders.CFDatetimeCoder(time_unit="s")  # nanoseconds end in 2262
            there = xr.open_zarr(store, consolidated=True, chunks=None, decode_times=seconds, decode_timedelta=True)
            for name in self.layout.chosen:
                found, expected = zarr.open_array(store / name, mode="r").shape, self.layout.shape(name)
                if found != expected:
                    raise UserError(f"expected {name} of shape {expected} in {store}, got {found}; {advice}")
            for coordinate in wanted.coords:
                if coordinate not in there.coords or not _same(there[coordinate], wanted[coordinate]):
                    raise UserError(
                        f"expected the {coordinate} of this experiment's forecasts in {store}, got other values or none; {advice}"
                    )

    def _create(self) -> None:
        fresh = self.folder / f"forecast.zarr.{process_name()}.new.part"
        shutil.rmtree(fresh, ignore_errors=True)
        layout = self.layout
        dataset = layout.coordinates()
        encoding: dict[str, dict[str, Any]] = {}
        for name in layout.chosen:
            # Only the metadata are written now; the dask array has no values.
            empty = dask.array.empty(layout.shape(name), chunks=-1, dtype=np.float32)
            dataset[name] = (layout.variable_dims(name), empty, layout.attrs_of(name))
            encoding[name] = {
                "chunks": self.chunks(name),
                "compressors": _COMPRESSOR,
                "_FillValue": np.float32("nan"),
            }
            if shards := self._shards(name):
                encoding[name]["shards"] = shards
        dataset.to_zarr(fresh, mode="w", compute=False, consolidated=False, zarr_format=3, encoding=encoding)
        _consolidate(fresh)
        _flush(fresh)
        try:
            os.rename(fresh, self.partial)
        except OSError:
            if not (self.partial.exists() or self.path.exists()):
                raise
            shutil.rmtree(fresh, ignore_errors=True)  # another process was faster

    def _shards(self, name: str) -> tuple[int, ...] | None:
        """Return shards that hold all levels of a lead in one file, if they are more than one chunk."""
        chunks, field = self.chunks(name), self.layout.field_shape(name)
        if len(field) == 2 or chunks[-3] == field[0]:
            return None
        # A shard must be a whole number of chunks.
        return (*chunks[:-3], -(-field[0] // chunks[-3]) * chunks[-3], *chunks[-2:])

    def _store(self, name: str, places: Sequence[ForecastKey], leads: slice, values: Fields) -> None:
        for box, part in _boxes(places):
            where = box if self.layout.members > 1 else box[:1]
            shape = [s.stop - s.start for s in where]
            levels = [slice(None)] * (values.ndim - 4)
            region = (*where, leads, *levels, *self.part)
            self._array(name)[region] = values[part].reshape(*shape, *values.shape[1:])

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            try:
                self._arrays[name] = zarr.open_array(self.partial / name, mode="r+")
            except FileNotFoundError:  # the store is complete
                self._arrays[name] = zarr.open_array(self.path / name, mode="r+")
        return self._arrays[name]

    def complete(self, init: int) -> None:
        self.flush(init)
        super().complete(init)

    def complete_member(self, init: int, member: int) -> None:
        self.flush(init, member)
        super().complete_member(init, member)

    def flush(self, init: int, member: int | None = None) -> None:
        place = str(init) if member is None else f"{init}/{member}"
        store = self.partial if self.partial.exists() else self.path
        for name in self.layout.chosen:
            _flush(store / name / "c" / place)

    def finish(self) -> bool:
        if not super().finish():
            return False
        if not self.path.exists():
            try:
                # left by a killed process, under a name that is never read
                for leftover in self.partial.rglob("*.partial"):
                    leftover.unlink(missing_ok=True)
                self._check()  # of files that somebody has removed, zarr makes only those anew to which it writes
                os.rename(self.partial, self.path)
            except FileNotFoundError:  # another process was faster, perhaps during the search for leftovers
                if not self.path.exists():
                    raise
        self.sweep()
        return True


def _same(one: xr.DataArray, other: xr.DataArray) -> bool:
    """Return whether coordinates are the same, degrees and levels to a millionth: another machine may round them otherwise."""
    if one.dims != other.dims or one.shape != other.shape:
        return False
    if one.dtype.kind == "f":
        return bool(np.allclose(one, other, rtol=0, atol=1e-6))
    return bool(one.variable.equals(other.variable))


def _boxes(places: Sequence[ForecastKey]) -> Iterator[tuple[tuple[slice, slice], slice]]:
    """Yield (initial times, members) of each region that consecutive places fill, with the positions of those places."""
    start = 0
    while start < len(places):
        (init, first), members = places[start], 1
        while start + members < len(places) and places[start + members] == (init, first + members):
            members += 1
        end, inits = start + members, 1
        while [*places[end : end + members]] == [(init + inits, first + m) for m in range(members)]:
            end, inits = end + members, inits + 1
        yield (slice(init, init + inits), slice(first, first + members)), slice(start, end)
        start = end


def _flush(path: Path) -> None:
    """Flush all files in a folder to the disk: forecasts recorded as complete must be complete even after a power failure.

    Files that disappear meanwhile are drafts of another rank, which flushes what they become.
    """
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(FileNotFoundError):
                sync(os.path.join(folder, file))


def _consolidate(path: Path) -> None:
    """Copy the metadata of all arrays into that of the group, in the form that zarr and xarray expect there.

    Opening a store then takes one read. (zarr's own function for this warns that other programs may not know the form;
    such programs ignore it.)
    """
    group = json.loads((path / "zarr.json").read_text())
    arrays = {file.parent.name: json.loads(file.read_text()) for file in sorted(path.glob("*/zarr.json"))}
    group["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": arrays}
    (path / "zarr.json").write_text(json.dumps(group, indent=2))
