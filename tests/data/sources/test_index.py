"""An indexed source gives what the opened files give, whatever happened to files and index in the meantime."""

from __future__ import annotations

import fcntl
import gc
import logging
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_like.data.files import netcdf_files
from credit_like.data.sources import _files, _index
from credit_like.data.sources.netcdf import Config, open_dataset
from credit_like.errors import UserError

FEW = 5


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CREDIT_LIKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_files, "INDEXED", FEW)
    return tmp_path / "cache"


@pytest.fixture
def looked(monkeypatch) -> list[str]:
    """The files that were opened."""
    opened: list[str] = []
    original = netcdf_files.open_lazily
    monkeypatch.setattr(
        netcdf_files,
        "open_lazily",
        lambda path, **options: opened.append(Path(path).name) or original(path, **options),
    )
    return opened


def write(path: Path, first: int, count: int = 2, calendar: str = "standard", scale: float | None = None) -> None:
    """Write `count` six-hourly times from number `first` on; every value tells its time."""
    numbers = np.arange(first, first + count, dtype=np.float64)
    values = numbers[:, None, None, None] + np.arange(24.0).reshape(1, 2, 3, 4) / 100
    dataset = xr.Dataset(
        {"t": (("time", "level", "lat", "lon"), values), "oro": (("lat", "lon"), np.arange(12.0).reshape(3, 4))},
        {
            "time": ("time", 6 * numbers, {"units": "hours since 2000-02-27", "calendar": calendar}),
            "level": ("level", [500.0, 850.0], {"units": "hPa"}),
            "lat": ("lat", [10.0, 0.0, -10.0], {"units": "degrees_north"}),
            "lon": ("lon", [0.0, 90.0, 180.0, 270.0], {"units": "degrees_east"}),
        },
    )
    encoding = (
        {"t": {"dtype": "float32"}}
        if scale is None
        else {"t": {"dtype": "int16", "scale_factor": scale, "_FillValue": -32768}}
    )
    netcdf_files.save(dataset, path, encoding)


def files(folder: Path, count: int = FEW + 2, **options) -> Config:
    folder.mkdir()
    for number in range(count):
        write(folder / f"{number:03d}.nc", 2 * number, **options)
    return Config(path=f"{folder}/*.nc")


def loaded(config: Config) -> xr.Dataset:
    with open_dataset(config) as dataset:
        return dataset.load()


def without_index(config: Config) -> xr.Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_files, "INDEXED", 10**9)
        return loaded(config)


@pytest.mark.parametrize("options", [{}, {"calendar": "noleap"}, {"scale": 0.01}], ids=str)
def test_an_indexed_source_is_the_same(tmp_path, cache, looked, options) -> None:
    config = files(tmp_path / "data", **options)
    expected = without_index(config)
    assert not cache.exists()
    xr.testing.assert_identical(loaded(config), expected)
    looked.clear()
    with open_dataset(config) as dataset:
        ends = ["000.nc", "006.nc"]  # whose constant fields are compared
        assert looked == ends
        assert dataset.sizes["time"] == 2 * (FEW + 2)
        np.testing.assert_array_equal(dataset["t"][5].values, expected["t"][5].values)
        assert looked == [*ends, "002.nc"]
        xr.testing.assert_identical(dataset.load(), expected)


def test_files_of_other_packing_fields_and_times_are_joined_as_ever(tmp_path) -> None:
    """Packed by other scales, overlapping in time, with fields of their own; read a second time from the index."""
    config = files(tmp_path / "data").model_copy(update={"duplicates": "first"})
    write(tmp_path / "data/003.nc", 6, scale=0.02)
    write(tmp_path / "data/004.nc", 7, count=3, scale=0.01)
    for number in range(FEW + 2):
        with netcdf_files.reading(tmp_path / f"data/{number:03d}.nc") as file:
            other = xr.Dataset(
                {"q": (("time", "lat", "lon"), np.full((2, 3, 4), number, np.float32))},
                {
                    "time": ("time", 6.0 * np.arange(2 * number, 2 * number + 2), {"units": file["time"].units}),
                    "lat": ("lat", file["lat"][:].data, {"units": "degrees_north"}),
                    "lon": ("lon", file["lon"][:].data, {"units": "degrees_east"}),
                },
            )
        netcdf_files.save(other, tmp_path / f"data/q{number:03d}.nc")
    expected = without_index(config)
    for _ in range(2):
        xr.testing.assert_identical(loaded(config), expected)


def test_what_is_refused_without_an_index_is_refused_with_one(tmp_path) -> None:
    config = files(tmp_path / "data")
    write(tmp_path / "data/004.nc", 7)
    for _ in range(2):
        with pytest.raises(UserError, match="each time in one file, got 2000-02-28T18:00:00"):
            loaded(config)
    write(tmp_path / "data/004.nc", 8, calendar="noleap")
    with pytest.raises(UserError, match="the same calendar"):
        loaded(config)
    (tmp_path / "data/004.nc").write_bytes(b"none")
    with pytest.raises(UserError, match=r"004\.nc, which does not open"):
        loaded(config)


def test_changed_added_and_removed_files_are_noticed(tmp_path, looked) -> None:
    config = files(tmp_path / "data")
    loaded(config)
    write(tmp_path / "data/007.nc", 20)
    looked.clear()
    with open_dataset(config) as dataset:
        assert looked == ["007.nc", "000.nc", "007.nc"]
        assert dataset.sizes["time"] == 2 * (FEW + 3)
    # Of the same size and, as after a copy, the same time of modification.
    path = tmp_path / "data/003.nc"
    before = path.stat()
    write(tmp_path / "data/new", 18)
    assert (tmp_path / "data/new").stat().st_size == before.st_size
    os.replace(tmp_path / "data/new", path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "data/005.nc").unlink()
    looked.clear()
    found = loaded(config)
    assert looked[0] == "003.nc"
    xr.testing.assert_identical(found, without_index(config))
    assert 10 not in (found["t"].values[:, 0, 0, 0]).round()


def test_a_file_that_changes_after_the_start_is_not_read_as_the_old_one(tmp_path) -> None:
    config = files(tmp_path / "data")
    loaded(config)
    with open_dataset(config) as dataset:
        write(tmp_path / "data/003.nc", 100)
        with pytest.raises(UserError, match=r"003\.nc as it was at the start"):
            dataset["t"][6].load()


def test_other_options_have_an_index_of_their_own(tmp_path) -> None:
    config = files(tmp_path / "data")
    loaded(config)
    other = config.model_copy(update={"region": _files.Region(south=-5)})
    for _ in range(2):
        found = loaded(other)
        assert found.sizes["latitude"] == 2
        xr.testing.assert_identical(found, without_index(other))


def test_a_damaged_index_is_made_anew(tmp_path, cache) -> None:
    config = files(tmp_path / "data")
    expected = loaded(config)
    (index,) = cache.glob("index-*.npz")
    content = index.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (b"", b"no archive", content[: len(content) // 2], bytes(flipped)):
        index.write_bytes(damaged)
        xr.testing.assert_identical(loaded(config), expected)
        assert _index._load(index)
    assert [path.name for path in cache.iterdir() if path.name.endswith(".npz")] == [index.name]


def test_without_a_folder_to_write_the_source_opens(tmp_path, monkeypatch, caplog) -> None:
    config = files(tmp_path / "data")
    (tmp_path / "a file").touch()
    monkeypatch.setenv("CREDIT_LIKE_CACHE", str(tmp_path / "a file" / "cache"))
    xr.testing.assert_identical(loaded(config), without_index(config))
    assert "set CREDIT_LIKE_CACHE" in caplog.text


def opened_by(config: Config, ready, answers) -> None:
    looked: list[str] = []
    original = netcdf_files.open_lazily
    netcdf_files.open_lazily = lambda path, **options: looked.append(path) or original(path, **options)
    ready.wait()
    with open_dataset(config) as dataset:
        answers.put((len(looked), dataset["t"].values.sum()))


def test_processes_that_start_together_make_one_index(tmp_path, cache) -> None:
    config = files(tmp_path / "data")
    context = multiprocessing.get_context("fork")
    ready, answers = context.Barrier(3), context.Queue()
    processes = [context.Process(target=opened_by, args=(config, ready, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=900) for _ in processes]
    for process in processes:
        process.join()
    # All but one open only the first file and the last.
    assert sorted(count for count, _ in found) == [2, 2, FEW + 4]
    assert len({total for _, total in found}) == 1
    assert len(list(cache.glob("*.npz"))) == 1


def test_a_process_that_never_makes_its_index_is_not_waited_for_for_ever(tmp_path, cache, monkeypatch, caplog) -> None:
    """As one that a scheduler has suspended."""
    caplog.set_level(logging.INFO)
    config, asked = files(tmp_path / "data"), []

    def held_by_another(file, operation):
        assert operation & fcntl.LOCK_NB, "this would wait for ever"
        asked.append(file.name)
        raise BlockingIOError

    monkeypatch.setattr(_index.fcntl, "lockf", held_by_another)
    monkeypatch.setattr(_index, "_WAIT", 0.0)
    assert loaded(config).identical(without_index(config))
    assert len(set(asked)) == 1
    assert "another process makes the index" in caplog.text


def test_few_files_stay_in_memory_and_threads_may_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_files, "_RECENT", 2)
    config = files(tmp_path / "data")
    expected = loaded(config)
    with open_dataset(config) as dataset:
        with ThreadPoolExecutor(4) as threads:
            order = np.random.default_rng(0).integers(0, 2 * (FEW + 2), 40)
            for time, values in zip(order, threads.map(lambda t: dataset["t"][t].values, order), strict=True):
                np.testing.assert_array_equal(values, expected["t"][time].values)
        gc.collect()  # of the files of `expected`
        mine = [
            one
            for one in gc.get_objects()
            if type(one) is _files._File and one._dataset is not None and one.path.startswith(str(tmp_path))
        ]
        assert len(mine) <= 2
