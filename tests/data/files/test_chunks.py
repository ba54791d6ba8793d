"""Our chunk reader against zarr-python."""

import shutil

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xarray.core import indexing

from credit_like.data.files.chunks import ChunkedArray, layout_of

SHAPE = (13, 3, 10, 7)
CODECS_3 = {
    "default": "auto",
    "blosc": zarr.codecs.BloscCodec(cname="zstd", clevel=3, shuffle="bitshuffle"),
    "lz4": zarr.codecs.BloscCodec(cname="lz4"),
    "zstd": [zarr.codecs.ZstdCodec(level=1), zarr.codecs.Crc32cCodec()],
    "gzip": zarr.codecs.GzipCodec(),
    "none": None,
}


def build(path, codec="default", dtype="float32", shards=None, version=3, chunks=(2, 3, 4, 7), **more):
    values = np.random.default_rng(0).integers(-1000, 1000, SHAPE).astype(dtype)
    values[4:6] = 0  # chunks that are not written
    compressors = CODECS_3[codec] if version == 3 else "auto"
    group = zarr.create_group(path, zarr_format=version)
    array = group.create_array(
        "x", shape=SHAPE, chunks=chunks, shards=shards, dtype=dtype, compressors=compressors, fill_value=0, **more
    )
    array[:] = values
    return zarr.open_group(path, mode="r")["x"], values


def reader(path, array):
    layout = layout_of(array, path)
    assert layout is not None
    return ChunkedArray(layout)


@pytest.mark.parametrize("codec", CODECS_3)
@pytest.mark.parametrize("shards", [None, (4, 6, 8, 7)])
@pytest.mark.parametrize("dtype", ["float32", "int16", ">f4", "float64"])
def test_reads_what_zarr_reads(tmp_path, codec, shards, dtype):
    array, values = build(tmp_path / "a.zarr", codec, dtype, shards)
    got = reader(tmp_path / "a.zarr", array).box([(0, n) for n in SHAPE])
    np.testing.assert_array_equal(got, values)
    assert got.dtype == np.dtype(dtype).newbyteorder("=")


@pytest.mark.parametrize("codec", ["default", "none"])
def test_a_shard_that_is_replaced_is_read_by_its_own_index(tmp_path, codec):
    """As by times that are appended while the store is open: chunks then lie elsewhere in the file."""
    path = tmp_path / "a.zarr"
    array, values = build(path, codec, shards=(4, 6, 8, 7))
    rows = reader(path, array)
    rows.box([(0, n) for n in SHAPE])
    values = values + 7  # also where no chunk was written
    zarr.open_group(path, mode="r+")["x"][:] = values
    np.testing.assert_array_equal(rows.box([(0, n) for n in SHAPE]), values)


@pytest.mark.parametrize("dtype", ["float16", "int16", "float64", ">f4"])
def test_whole_chunks_are_converted_to_the_dtype_of_the_target(tmp_path, dtype):
    array, values = build(tmp_path / "a.zarr", dtype=dtype, chunks=(1, 3, 10, 7))
    out = np.full(SHAPE, np.nan, np.float32)
    assert reader(tmp_path / "a.zarr", array).box([(0, n) for n in SHAPE], out) is out
    np.testing.assert_array_equal(out, values.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "int16", ">f4"])
@pytest.mark.parametrize("separator", [".", "/"])
def test_version_2(tmp_path, dtype, separator):
    keys = {"name": "v2", "separator": separator}
    array, values = build(tmp_path / "a.zarr", dtype=dtype, version=2, chunk_key_encoding=keys)
    np.testing.assert_array_equal(reader(tmp_path / "a.zarr", array).box([(0, n) for n in SHAPE]), values)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = tmp_path_factory.mktemp("chunks") / "a.zarr"
    array, values = build(path, "blosc", shards=(4, 3, 8, 7))
    return reader(path, array), values


@st.composite
def keys(draw):
    key = []
    for size in SHAPE:
        if draw(st.booleans()):
            start, stop = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
            key.append(slice(start, stop, draw(st.integers(1, 4))))
        else:
            key.append(draw(st.integers(0, size - 1)))
    return tuple(key)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys())
def test_any_basic_index_is_numpys(shared, key):
    array, values = shared
    np.testing.assert_array_equal(array[indexing.BasicIndexer(key)], values[key])


def test_whole_chunks_are_decoded_in_place_and_rows_alone_touch_their_chunks(tmp_path, monkeypatch):
    array, values = build(tmp_path / "a.zarr", chunks=(1, 3, 5, 7))
    chunked = reader(tmp_path / "a.zarr", array)
    seen = []
    monkeypatch.setattr(chunked, "_coded", lambda chunk, old=chunked._coded: seen.append(chunk) or old(chunk))
    got = chunked.box([(7, 9), (0, 3), (5, 8), (0, 7)])
    np.testing.assert_array_equal(got, values[7:9, :, 5:8])
    assert seen == [(7, 0, 1, 0), (8, 0, 1, 0)]


def test_others_are_left_to_zarr(tmp_path):
    transposed, _ = build(tmp_path / "a.zarr", filters=[zarr.codecs.TransposeCodec(order=(1, 0, 2, 3))])
    assert layout_of(transposed, tmp_path / "a.zarr") is None
    group = zarr.create_group(tmp_path / "b.zarr")
    single = group.create_array("x", shape=(), dtype="f4")
    assert layout_of(single, tmp_path / "b.zarr") is None


@pytest.mark.parametrize("codec", ["blosc", "zstd", "gzip", "none", "default", "lz4"])
@pytest.mark.parametrize("keep", [0, 5, 20, 200])
def test_a_cut_chunk_is_an_error(tmp_path, codec, keep):
    array, _ = build(tmp_path / "a.zarr", codec)
    chunk = tmp_path / "a.zarr" / "x" / "c" / "0" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:keep])
    with pytest.raises((ValueError, RuntimeError, EOFError)):
        reader(tmp_path / "a.zarr", array).box([(0, 1), (0, 1), (0, 1), (0, 1)])


@pytest.mark.parametrize("keep", [0, 10, 300, -3])
def test_a_cut_shard_is_an_error(tmp_path, keep):
    array, _ = build(tmp_path / "a.zarr", "blosc", shards=(4, 3, 8, 7))
    shard = tmp_path / "a.zarr" / "x" / "c" / "0" / "0" / "0" / "0"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cut off"):
        reader(tmp_path / "a.zarr", array).box([(0, 1), (0, 1), (0, 1), (0, 1)])


@pytest.mark.parametrize("shards", [None, (4, 3, 8, 7)])
def test_a_store_that_is_gone_is_an_error_and_not_a_field_of_fill_values(tmp_path, shards):
    array, _ = build(tmp_path / "a.zarr", shards=shards)
    chunked = reader(tmp_path / "a.zarr", array)
    shutil.rmtree(tmp_path / "a.zarr")
    with pytest.raises(FileNotFoundError, match=r"is gone"):
        chunked.box([(0, 1), (0, 1), (0, 1), (0, 1)])
