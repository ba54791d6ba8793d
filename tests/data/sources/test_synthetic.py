"""The embedded dataset as a source: its shape and attributes, its cache, and that makers at the same time agree."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from pydantic import ValidationError

from credit_like.data.sources import synthetic
from credit_like.data.sources.synthetic import VARIABLES, Config, cache_path, open_dataset
from credit_like.errors import UserError

CONFIG = Config(longitudes=32, latitudes=16, steps=10, start=dt.date(2001, 2, 3))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def dataset(cache: Path, monkeypatch: pytest.MonkeyPatch) -> xr.Dataset:
    monkeypatch.setenv("CREDIT_LIKE_CACHE", str(cache))
    return open_dataset(CONFIG)


def test_is_canonical(dataset: xr.Dataset) -> None:
    assert list(dataset.data_vars) == list(VARIABLES)
    assert dataset.u.dims == ("time", "level", "latitude", "longitude")
    assert dict(dataset.sizes) == {"time": 10, "level": 2, "latitude": 16, "longitude": 32}
    assert (np.diff(dataset.latitude) < 0).all()
    np.testing.assert_allclose(dataset.longitude, np.arange(32) * 11.25)
    assert dataset.time.values[0] == np.datetime64("2001-02-03")
    assert (np.diff(dataset.time) == np.timedelta64(6, "h")).all()
    for name, variable in dataset.data_vars.items():
        assert variable.dtype == "float32"
        assert np.isfinite(variable).all(), name
        assert {"units", "long_name", "standard_name"} <= set(variable.attrs)


def test_values_are_physical(dataset: xr.Dataset) -> None:
    assert float(np.abs(dataset.u).max()) < 120
    assert (dataset.precipitation >= 0).all()
    assert (dataset.column_water >= 0).all()
    assert set(np.unique(dataset.land_sea_mask)) == {0, 1}
    lower, upper = dataset.height.sel(level=2).mean(), dataset.height.sel(level=1).mean()
    assert upper > lower > 0


def test_cache_holds_what_is_generated(dataset: xr.Dataset) -> None:
    xr.testing.assert_identical(dataset.load(), synthetic.generate(CONFIG))


def test_made_once(dataset: xr.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "generate", lambda config: pytest.fail("made again"))
    open_dataset(CONFIG)
    assert cache_path(CONFIG) != cache_path(CONFIG.model_copy(update={"seed": 1}))


def test_makers_at_the_same_time_agree_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: xr.Dataset
) -> None:
    path = tmp_path / "store.zarr"
    made = dataset.load()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: synthetic._store(made, path), range(3)))
    assert [p.name for p in tmp_path.iterdir()] == ["store.zarr"]
    xr.testing.assert_identical(xr.open_zarr(path, chunks=None, consolidated=False)[list(VARIABLES)].load(), made)


def test_a_failed_write_leaves_no_store(tmp_path: Path, dataset: xr.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_zarr", full_disk)
    with pytest.raises(OSError, match="No space"):
        synthetic._store(dataset, tmp_path / "store.zarr")
    assert not list(tmp_path.iterdir())


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(ValidationError, match="change them to 32 and 64"):
        Config(longitudes=60, latitudes=32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 10**12},
        {"steps": 2**15 + 1},
        {"longitudes": 512, "latitudes": 256, "steps": 2**9 + 1},
        {"start": dt.date(2261, 12, 31), "steps": 5},
        {"start": dt.date(2400, 1, 1)},
        {"start": dt.date(1600, 1, 1)},
    ],
)
def test_more_steps_than_can_be_held_are_refused(wrong) -> None:
    with pytest.raises(ValidationError, match="steps on a grid of"):
        Config(**wrong)


def test_as_many_steps_as_can_be_held_are_accepted() -> None:
    Config(steps=2**15)
    Config(longitudes=512, latitudes=256, steps=2**9)
    Config(start=dt.date(2261, 12, 31), steps=4)


def test_without_a_folder_for_the_cache_the_variable_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CREDIT_LIKE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"file/cache, got: .*; set CREDIT_LIKE_CACHE to a writable folder"):
        open_dataset(CONFIG)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("CREDIT_LIKE_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(UserError, match="expected a home folder, got none; set CREDIT_LIKE_CACHE"):
        open_dataset(CONFIG)
