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
    """Buffers the leads that share a chunk and writes them as one region; no chunk spans initial times or members."""

    def __init__(self, layout: Layout, folder: Path, chunk_bytes: int) -> None:
        super().__init__(layout, folder)
        self.path = folder / "forecast.zarr"
        self.partial = folder / "forecast.zarr.part"
        self.chunk_bytes = chunk_bytes
        self._buffers: dict[tuple[str, int, int], list[Fields]] = {}
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
            chunks, shards = self._chunks(name)
            # Only the metadata are written now; dask stands for "no values yet".
            empty = dask.array.empty(layout.shape(name), chunks=-1, dtype=np.float32)
            dataset[name] = (layout.variable_dims(name), empty, layout.attrs_of(name))
            encoding[name] = {"chunks": chunks, "_FillValue": np.float32("nan")} | (
                {"shards": shards} if shards else {}
            )
        dataset.to_zarr(fresh, mode="w", compute=False, consolidated=False, zarr_format=3, encoding=encoding)
        _consolidate(fresh)
        try:
            os.rename(fresh, self.partial)
        except OSError:
            if not (self.partial.exists() or self.path.exists()):
                raise
            shutil.rmtree(fresh, ignore_errors=True)  # another process was faster

    def _chunks(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Chunks of whole fields, then as many levels, then as many leads as fit; all levels of a lead share a file."""
        layout = self.layout
        shape = layout.field_shape(name)
        n_levels, field = (shape[0] if len(shape) == 3 else 1), 4 * shape[-2] * shape[-1]
        levels = min(n_levels, max(1, self.chunk_bytes // field))
        leads = min(len(layout.leads), max(1, self.chunk_bytes // (field * n_levels))) if levels == n_levels else 1
        front = (1,) * (len(layout.dims) - 1)
        chunk = (*front, leads, *([levels] if len(shape) == 3 else []), *shape[-2:])
        if levels == n_levels:
            return chunk, None
        # A shard must be a whole number of chunks.
        return chunk, (*front, 1, -(-n_levels // levels) * levels, *shape[-2:])

    def write(self, init: int, member: int, lead: int, fields: dict[str, Fields]) -> None:
        for name, field in fields.items():
            per_chunk = self._chunks(name)[0][len(self.layout.dims) - 1]
            buffer = self._buffers.setdefault((name, init, member), [])
            buffer.append(field)
            if len(buffer) == per_chunk or lead == len(self.layout.leads) - 1:
                where = (init, member) if self.layout.members > 1 else (init,)
                self._array(name)[(*where, slice(lead + 1 - len(buffer), lead + 1))] = np.stack(buffer)
                del self._buffers[name, init, member]

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
