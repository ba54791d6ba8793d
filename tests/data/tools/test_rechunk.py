import tracemalloc

import numpy as np
import pytest
import zarr

from credit_like.data.store import open_store
from credit_like.data.tools import rechunk as module
from credit_like.data.tools.rechunk import rechunk
from credit_like.variables import Variables


@pytest.fixture
def source(stored, dataset):
    ds = dataset()
    ds["u"][5, :, 2:4] = np.nan
    ds["t"].attrs["units"] = "degC"
    ds["sp"].attrs = {"units": "J m**-2", "period_hours": "3"}
    ds["level"].attrs = {"units": "hPa", "standard_name": "air_pressure", "positive": "down"}
    return stored(ds, prognostic={"level": ["u", {"name": "t", "units": "K"}], "surface": ["sp"]}, levels=[850, 100])


def reopened(data_section, path):
    data = data_section(path, levels=[850, 100], prognostic={"level": ["u", "t"], "surface": ["sp"]})
    variables = Variables(data)
    return variables, open_store(data, variables)


def test_the_same_fields_in_bands(source, tmp_path, data_section):
    _, _, variables, store = source
    seen = []
    rechunk(store, variables, tmp_path / "new.zarr", band=4, times_per_shard=16, progress=lambda *x: seen.append(x))
    assert seen == [(16, 40), (32, 40), (40, 40)]
    array = zarr.open_group(tmp_path / "new.zarr", mode="r")["u"]
    assert array.chunks == (1, 2, 4, 12)
    assert array.shards == (16, 2, 12, 12)
    assert not (tmp_path / "new.zarr" / "verified.json").exists()
    others, again = reopened(data_section, tmp_path / "new.zarr")
    for a, b in zip(variables, others, strict=True):
        np.testing.assert_array_equal(store.read([a], range(40)), again.read([b], range(40)))
    assert again.attrs(others["t"])["units"] == "K"
    assert again.level_attrs(others["t"]) == {"units": "hPa", "standard_name": "air_pressure", "positive": "down"}
    assert again.other_sums == store.other_sums == {"sp": 3 * 3600}
    np.testing.assert_array_equal(again.seconds, store.seconds)
    np.testing.assert_array_equal(again.grid.latitude, store.grid.latitude)
    with pytest.raises(FileExistsError):
        rechunk(store, variables, tmp_path / "new.zarr")


def test_a_band_reads_its_bytes_alone(source, tmp_path, data_section):
    """A domain rank of n reads at most 1/n of the bytes and one chunk."""
    from credit_like.data.files.chunks import ChunkedArray

    _, _, variables, store = source
    rechunk(store, variables, tmp_path / "new.zarr", band=1, times_per_shard=8)
    others, again = reopened(data_section, tmp_path / "new.zarr")
    sizes = []
    original = ChunkedArray._coded

    def counted(self, chunk):
        coded = original(self, chunk)
        sizes.append(len(coded or b""))
        return coded

    ChunkedArray._coded = counted
    try:
        again.read(others.outputs, range(4))
        whole, largest = sum(sizes), max(sizes)
        for rows in (slice(0, 3), slice(3, 6), slice(6, 9)):
            sizes.clear()
            again.read(others.outputs, range(4), rows)
            assert sum(sizes) <= whole / 3 + largest * len(others.outputs) * 4
            assert len(sizes) == 3 * len(others.outputs) * 4
    finally:
        ChunkedArray._coded = original


def test_stopped_it_goes_on(source, tmp_path, data_section, monkeypatch):
    _, _, variables, store = source
    real, calls = module._write, []

    def stop(*args):
        calls.append(args[-1].start)
        if len(calls) == 9:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(module, "_write", stop)
    with pytest.raises(KeyboardInterrupt):
        rechunk(store, variables, tmp_path / "new.zarr", times_per_shard=16)
    assert not (tmp_path / "new.zarr").exists()
    calls.append(None)
    rechunk(store, variables, tmp_path / "new.zarr", times_per_shard=16)
    assert calls[10:] == [0, 0, *[16] * 5, *[32] * 5]
    others, again = reopened(data_section, tmp_path / "new.zarr")
    np.testing.assert_array_equal(store.read(variables.outputs, range(40)), again.read(others.outputs, range(40)))


def stopped(monkeypatch, *arguments, **options):
    """Copy the first shards of a variable, and be interrupted before time 16."""
    real = module._write

    def stop(*args):
        if args[-1].start == 16:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            rechunk(*arguments, **options)


@pytest.mark.parametrize("record", ["", "[]", "null", '{"digest": 1}', '{"times": 16}'])
def test_stopped_it_begins_anew_where_its_record_is_damaged(source, tmp_path, data_section, monkeypatch, record):
    _, _, variables, store = source
    stopped(monkeypatch, store, variables, tmp_path / "new.zarr", times_per_shard=16)
    (log,) = tmp_path.rglob("verified.json")
    log.write_text(record)
    rechunk(store, variables, tmp_path / "new.zarr", times_per_shard=16)
    others, again = reopened(data_section, tmp_path / "new.zarr")
    np.testing.assert_array_equal(store.read(variables.outputs, range(40)), again.read(others.outputs, range(40)))


@pytest.mark.parametrize("change", ["units", "name", "times", "band"])
def test_stopped_it_begins_anew_where_something_else_is_copied(source, tmp_path, data_section, monkeypatch, change):
    _, _, variables, store = source
    stopped(monkeypatch, store, variables, tmp_path / "new.zarr", band=4, times_per_shard=16)
    t = {"name": "t", "units": "K"} if change != "units" else "t"
    u = {"name": "u", "var": "t"} if change == "name" else "u"
    of_file = data_section(tmp_path / "store.zarr", levels=[850, 100], prognostic={"level": [u, t], "surface": ["sp"]})
    others = Variables(of_file)
    other = open_store(of_file, others)
    times = np.arange(2, 40) if change == "times" else np.arange(40)
    band = 3 if change == "band" else 4
    rechunk(other, others, tmp_path / "new.zarr", band=band, times_per_shard=16, times=times)
    again_variables, again = reopened(data_section, tmp_path / "new.zarr")
    np.testing.assert_array_equal(again.seconds, other.seconds[times])
    for a, b in zip(others, again_variables, strict=True):
        np.testing.assert_array_equal(other.read([a], times), again.read([b], range(len(times))))
    assert zarr.open_group(tmp_path / "new.zarr", mode="r")["u"].chunks[2] == band


def test_a_write_that_went_wrong_is_found(source, tmp_path, monkeypatch):
    _, _, variables, store = source
    real = module.ChunkedArray.box
    monkeypatch.setattr(module.ChunkedArray, "box", lambda self, *args: real(self, *args) + np.float32(1))
    with pytest.raises(ValueError, match=r"expected what was written of orography"):
        rechunk(store, variables, tmp_path / "new.zarr")
    assert not (tmp_path / "new.zarr").exists()


def test_stopped_it_begins_anew_where_files_have_changed(source, tmp_path, data_section, monkeypatch):
    ds, data, variables, store = source
    stopped(monkeypatch, store, variables, tmp_path / "new.zarr", times_per_shard=16)
    ds["t"] = (ds["t"] + 1).assign_attrs(ds["t"].attrs)
    ds[["t"]].to_zarr(tmp_path / "store.zarr", mode="a", consolidated=False)
    changed = open_store(data, variables)
    rechunk(changed, variables, tmp_path / "new.zarr", times_per_shard=16)
    others, again = reopened(data_section, tmp_path / "new.zarr")
    np.testing.assert_array_equal(again.read(others.outputs, range(40)), changed.read(variables.outputs, range(40)))


def test_what_is_written_is_compared_one_time_after_the_other(tmp_path):
    values = np.random.default_rng(0).standard_normal((32, 64, 128)).astype(np.float32)
    values[3, 4, 5] = np.nan
    stored = zarr.create_array(tmp_path / "a.zarr", data=values, chunks=(1, 32, 128), shards=(32, 64, 128))
    layout = module.layout_of(stored, tmp_path / "a.zarr")
    key = (slice(0, 32), slice(0, 64), slice(0, 128))
    tracemalloc.start()
    try:
        assert module._is_written(module.ChunkedArray(layout), values, key)
        assert tracemalloc.get_traced_memory()[1] < values.nbytes / 4
    finally:
        tracemalloc.stop()
    values[31, 63, 127] += 1
    assert not module._is_written(module.ChunkedArray(layout), values, key)
    assert module._is_written(module.ChunkedArray(layout), values[:31], (slice(0, 31), *key[1:]))
