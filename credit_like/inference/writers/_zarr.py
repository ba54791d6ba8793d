"""The zarr store of a forecast."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import zarr

from credit_like.inference.layout import Layout
from credit_like.inference.writers._base import Fields, Writer, replace_text


class ZarrWriter(Writer):
    """One store, written a region at a time; all levels of a lead share a file."""

    def __init__(self, layout: Layout, folder: Path, chunk_bytes: int) -> None:
        super().__init__(layout, folder, chunk_bytes)
        self.path = folder / "forecast.zarr"
        self.partial = folder / "forecast.zarr.part"
        self._arrays: dict[str, Any] = {}

    def open(self) -> None:
        if self.path.exists() or self.partial.exists():
            return
        fresh = self.folder / f"forecast.zarr.{os.getpid()}.new.part"
        shutil.rmtree(fresh, ignore_errors=True)
        layout = self.layout
        dataset = layout.coordinates()
        encoding: dict[str, dict[str, Any]] = {}
        for name in layout.chosen:
            # Only the metadata are written now; dask stands for "no values yet".
            empty = dask.array.empty(layout.shape(name), chunks=-1, dtype=np.float32)
            dataset[name] = (layout.variable_dims(name), empty, layout.attrs_of(name))
            encoding[name] = {"chunks": self.chunks(name), "_FillValue": np.float32("nan")}
            if shards := self._shards(name):
                encoding[name]["shards"] = shards
        dataset.to_zarr(fresh, mode="w", compute=False, consolidated=False, zarr_format=3, encoding=encoding)
        _consolidate(fresh)
        try:
            os.rename(fresh, self.partial)
        except OSError:
            if not (self.partial.exists() or self.path.exists()):
                raise
            shutil.rmtree(fresh, ignore_errors=True)  # another process was faster

    def _shards(self, name: str) -> tuple[int, ...] | None:
        """All levels of a lead in one file, where they are more than one chunk."""
        chunks, field = self.chunks(name), self.layout.field_shape(name)
        if len(field) == 2 or chunks[-3] == field[0]:
            return None
        # A shard must be a whole number of chunks.
        return (*chunks[:-3], -(-field[0] // chunks[-3]) * chunks[-3], *field[-2:])

    def _store(self, name: str, init: int, member: int, leads: slice, values: Fields) -> None:
        where = (init, member) if self.layout.members > 1 else (init,)
        self._array(name)[(*where, leads)] = values

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            self._arrays[name] = zarr.open_array(self.partial / name, mode="r+")
        return self._arrays[name]

    def finish(self) -> bool:
        if not super().finish():
            return False
        if not self.path.exists():
            for leftover in self.partial.rglob("*.partial"):  # of a killed process, under a name that is never read
                leftover.unlink(missing_ok=True)
            try:
                os.rename(self.partial, self.path)
            except FileNotFoundError:  # another process was faster
                assert self.path.exists()
        self.sweep()
        return True


def _consolidate(path: Path) -> None:
    """Copy the metadata of all arrays into that of the group, in the form that zarr and xarray look for there.

    So that opening a store takes one read. (zarr's own function for this warns that other programs may not know the
    form; such programs ignore it.)
    """
    group = json.loads((path / "zarr.json").read_text())
    arrays = {file.parent.name: json.loads(file.read_text()) for file in sorted(path.glob("*/zarr.json"))}
    group["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": arrays}
    replace_text(path / "zarr.json", json.dumps(group, indent=2))
