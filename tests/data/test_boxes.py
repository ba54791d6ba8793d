"""A rank reads the chunks that its box of rows and columns touches, and no other."""

from __future__ import annotations

from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr

from credit_like.data.files.chunks import ChunkedArray
from credit_like.data.store import open_store
from credit_like.variables import Variables

HEIGHT, WIDTH, ROWS, COLUMNS = 36, 64, 9, 16
"""Four by four chunks of 9 rows and 16 columns."""
FIELDS = 4 * 5
"""u and t on two levels, and sp, at four times."""
BOXES = [
    (slice(0, 9), slice(16, 32), 1),
    (slice(0, 18), slice(0, 32), 4),
    (slice(18, 36), slice(32, 64), 4),
    (slice(8, 10), slice(0, 64), 8),
    (slice(12, 24), slice(21, 43), 4),
    (slice(35, 36), slice(0, 1), 1),
]
"""Rows and columns, and the number of chunks that they touch in each field."""


@pytest.fixture(scope="module")
def fields(dataset):
    return dataset(steps=8, height=HEIGHT, width=WIDTH)[["u", "t", "sp"]]


def opened(data_section, path, kind):
    section = data_section(
        path,
        source={"type": kind, "path": str(path)},
        prognostic={"level": ["u", "t"], "surface": ["sp"]},
        diagnostic={},
        dynamic_forcing={},
        static={},
        train=["2001-01-01", "2001-01-01T18"],
        valid=["2001-01-02", "2001-01-02T06"],
        test=["2001-01-02", "2001-01-02T18"],
    )
    variables = Variables(section)
    return variables.outputs, open_store(section, variables)


def chunks_of(fields):
    return {name: (1,) * (array.ndim - 2) + (ROWS, COLUMNS) for name, array in fields.data_vars.items()}


@pytest.mark.parametrize("units", [None, "degC"], ids=["in place", "converted"])
def test_zarr_chunks(fields, tmp_path, data_section, monkeypatch, units):
    if units:
        fields = fields.assign(t=fields["t"].assign_attrs(units=units))
    encoding = {name: {"chunks": chunks} for name, chunks in chunks_of(fields).items()}
    fields.to_zarr(tmp_path / "a.zarr", encoding=encoding, consolidated=False)
    variables, store = opened(data_section, tmp_path / "a.zarr", "zarr")
    read = []
    original = ChunkedArray._coded
    monkeypatch.setattr(ChunkedArray, "_coded", lambda array, chunk: read.append(chunk) or original(array, chunk))
    whole = store.read(variables, range(4))
    assert len(read) == 16 * FIELDS
    for rows, columns, touched in BOXES:
        read.clear()
        box = store.read(variables, range(4), rows, columns=columns)
        np.testing.assert_array_equal(box, whole[..., rows, columns])
        assert len(read) == touched * FIELDS


def test_zarr_chunks_that_zarr_python_reads(fields, tmp_path, data_section, monkeypatch):
    """Chunks with a codec that is not read directly."""
    encoding = {n: {"chunks": chunks, "compressors": numcodecs.BZ2(1)} for n, chunks in chunks_of(fields).items()}
    fields.to_zarr(tmp_path / "a.zarr", zarr_format=2, encoding=encoding, consolidated=False)
    variables, store = opened(data_section, tmp_path / "a.zarr", "zarr")
    whole, read = store.read(variables, range(4)), []
    original = zarr.storage.LocalStore.get

    async def get(self, key, *arguments, **options):
        read.append(key)
        return await original(self, key, *arguments, **options)

    monkeypatch.setattr(zarr.storage.LocalStore, "get", get)
    for rows, columns, touched in BOXES:
        read.clear()
        box = store.read(variables, range(4), rows, columns=columns)
        np.testing.assert_array_equal(box, whole[..., rows, columns])
        assert len([key for key in read if not key.endswith((".zarray", ".zattrs"))]) == touched * FIELDS


def _read_by_this_process() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the bytes that a process reads are counted by Linux")
def test_netcdf_chunks(fields, tmp_path, data_section):
    encoding = {name: {"chunksizes": chunks, "zlib": True} for name, chunks in chunks_of(fields).items()}
    fields.to_netcdf(tmp_path / "a.nc", encoding=encoding)
    variables, store = opened(data_section, tmp_path / "a.nc", "netcdf")
    store.read(variables, range(4))  # opens the file
    before = _read_by_this_process()
    whole = store.read(variables, range(4))
    of_all = _read_by_this_process() - before
    for rows, columns, touched in BOXES:
        before = _read_by_this_process()
        box = store.read(variables, range(4), rows, columns=columns)
        assert (_read_by_this_process() - before) <= (touched + 0.5) / 16 * of_all
        np.testing.assert_array_equal(box, whole[..., rows, columns])
