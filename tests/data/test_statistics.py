"""One streamed pass against numpy on everything at once."""

import logging
import os

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_like.data import statistics as module
from credit_like.data.statistics import Moments, Statistics, fit_statistics, moments_of
from credit_like.errors import UserError

TRAIN = slice(0, 24)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=20), min_size=1, max_size=8), st.floats(-1e8, 1e8))
def test_moments_merge_to_those_of_the_whole(parts, mean):
    """In any grouping, NaN left out, also far from zero."""
    total = Moments.zero(1)
    for part in parts:
        own = Moments.zero(1)
        own.add(0, *moments_of(np.array([*part, np.nan]) + mean))
        total = total.merge(own)
    values = np.concatenate([np.array(part) for part in parts]) + mean
    assert total.count[0] == len(values)
    if len(values):
        np.testing.assert_allclose(total.mean[0], values.mean(), rtol=1e-12, atol=1e-6)
        np.testing.assert_allclose(total.std[0], values.std(), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("block_bytes", [1, 20_000, 2**30])
def test_equal_to_numpy_whatever_the_blocks(stored, monkeypatch, block_bytes):
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    ds, data, variables, store = stored()
    seen = []
    statistics = fit_statistics(store, variables, data, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (40, 40)
    for variable in variables:
        mean, std, change_std = statistics.select([variable])
        if variable.spec.compute:
            fields = store.read([variable], range(24)).astype(np.float64)[:, 0]
        elif variable.role == "static":
            fields = ds[variable.name].values[None].astype(np.float64)
        else:
            fields = ds[variable.name].values[TRAIN].astype(np.float64)
        levels = [fields[:, list(ds.level.values).index(level)] for level in variable.levels] or [fields]
        for i, field in enumerate(levels):
            np.testing.assert_allclose(mean[i], field.mean(), rtol=1e-12)
            np.testing.assert_allclose(std[i], field.std(), rtol=1e-10)
            if variable.role == "static":
                assert np.isnan(change_std[i])
            else:
                np.testing.assert_allclose(change_std[i], np.diff(field, axis=0).std(), rtol=1e-10)
    assert statistics.missing_times == set()
    assert statistics.mask(variables.outputs).all()


def test_disjoint_training_periods_have_no_change_between_them(stored, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 30_000)
    ds, data, variables, store = stored(train=[["2001-01-01", "2001-01-02T18"], ["2001-01-04", "2001-01-05T06"]])
    statistics = fit_statistics(store, variables, data)
    values = ds["sp"].values.astype(np.float64)
    parts = [values[0:8], values[12:18]]
    mean, std, change_std = statistics.select([variables["sp"]])
    np.testing.assert_allclose(
        [mean[0], std[0]], [np.concatenate(parts).mean(), np.concatenate(parts).std()], rtol=1e-10
    )
    changes = np.concatenate([np.diff(part, axis=0) for part in parts])
    np.testing.assert_allclose(change_std[0], changes.std(), rtol=1e-10)


def test_gaps_in_time_have_no_change_across_them(stored, dataset):
    ds = dataset().isel(time=[*range(9), *range(12, 40)])
    _, data, variables, store = stored(ds)
    _, _, change_std = fit_statistics(store, variables, data).select([variables["sp"]])
    values = ds["sp"].values[:21].astype(np.float64)
    changes = np.concatenate([np.diff(values[:9], axis=0), np.diff(values[9:], axis=0)])
    np.testing.assert_allclose(change_std[0], changes.std(), rtol=1e-10)


@pytest.fixture
def holed(stored, dataset):
    """A corner never has data; u is missing at step 5, rain at 30, part of sp at 7."""
    ds = dataset()
    for name in ("u", "t", "sp", "rain"):
        ds[name][..., :3, :2] = np.nan
    ds["u"][5] = np.nan
    ds["rain"][30] = np.nan
    ds["sp"][7, 4, 4] = np.nan
    return stored(ds)


def test_missing_points_and_fields(holed, caplog, tmp_path):
    ds, data, variables, store = holed
    with caplog.at_level(logging.WARNING):
        statistics = fit_statistics(store, variables, data)
    assert "3 times with missing fields" in caplog.text
    assert statistics.missing_times == {5, 7, 30}
    assert dict(statistics.missing()) == {
        "2001-01-02T06:00:00": "u@500 u@850",
        "2001-01-02T18:00:00": "sp",
        "2001-01-08T12:00:00": "rain",
    }
    mask = statistics.mask(variables.outputs)
    assert not mask[:, :3, :2].any()
    assert mask.sum() == mask.size - 6 * len(mask)
    assert statistics.mask(variables.role("dynamic_forcing")).all()
    mean, std, change_std = statistics.select([variables["sp"]])
    values = ds["sp"].values[TRAIN].astype(np.float64)
    np.testing.assert_allclose([mean[0], std[0]], [np.nanmean(values), np.nanstd(values)], rtol=1e-10)
    np.testing.assert_allclose(change_std[0], np.nanstd(np.diff(values, axis=0)), rtol=1e-10)

    statistics.save(tmp_path / "statistics.nc")
    again = Statistics.load(tmp_path / "statistics.nc")
    assert again.missing_times == {5, 7, 30}
    np.testing.assert_array_equal(again.mask(variables.outputs), mask)
    for before, after in zip(statistics.select(variables.outputs), again.select(variables.outputs), strict=True):
        np.testing.assert_array_equal(before, after)
    assert "2001-01-01T00:00:00" in again.dataset.attrs["training_period"]
    assert [path.name for path in tmp_path.glob("*statistics*")] == ["statistics.nc"]


def test_missing_times_are_found_again_on_another_axis(holed, tmp_path, data_section):
    from credit_like.data.store import open_store
    from credit_like.variables import Variables

    ds, data, variables, store = holed
    fit_statistics(store, variables, data).save(tmp_path / "statistics.nc")
    ds.isel(time=slice(4, None)).to_netcdf(tmp_path / "later.nc")
    data = data_section("", source={"type": "netcdf", "path": str(tmp_path / "later.nc")})
    later = open_store(data, Variables(data))
    assert Statistics.load(tmp_path / "statistics.nc", later).missing_times == {1, 3, 26}


def test_no_missing_times_survive_a_file_too(stored, tmp_path):
    _, data, variables, store = stored()
    fit_statistics(store, variables, data).save(tmp_path / "statistics.nc")
    assert Statistics.load(tmp_path / "statistics.nc", store).missing_times == set()


def test_a_constant_prediction_is_refused_and_a_constant_forcing_told(stored, dataset, caplog):
    ds = dataset()
    ds["rain"][:] = 0.25
    _, data, variables, store = stored(ds)
    with pytest.raises(ValueError, match=r"expected predicted variables that vary .*, got rain constant"):
        fit_statistics(store, variables, data)


@pytest.mark.parametrize("where", [(3, 2, 1), ...])
def test_fill_values_that_are_not_declared_are_refused(stored, dataset, where):
    ds = dataset()
    ds["rain"].values[where] = 9.96921e36
    ds["rain"].encoding["_FillValue"] = None
    _, data, variables, store = stored(ds)
    with pytest.raises(
        ValueError, match=r"expected values of rain below 1e\+20, .* declare them as the variable's _FillValue"
    ):
        fit_statistics(store, variables, data)


def test_a_constant_forcing_is_divided_by_one(stored, dataset, caplog):
    ds = dataset()
    ds["sst"][:] = 290.0
    ds["lsm"][:] = 1.0
    _, data, variables, store = stored(ds)
    statistics = fit_statistics(store, variables, data)
    assert "sst, lsm" in caplog.text
    assert statistics.select([variables["sst"], variables["lsm"]])[1].tolist() == [1, 1]


def test_errors_say_what_to_do(stored, dataset, tmp_path):
    ds = dataset()
    ds["u"][:24] = np.nan
    _, data, variables, store = stored(ds)
    with pytest.raises(ValueError, match=r"expected data of u@500, u@850 in the training period"):
        fit_statistics(store, variables, data)
    xr.Dataset({"x": 1}).to_netcdf(tmp_path / "other.nc")
    with pytest.raises(ValueError, match=r"expected statistics in .*other.nc"):
        Statistics.load(tmp_path / "other.nc")
    (tmp_path / "text.nc").write_text("x")
    with pytest.raises(ValueError, match="expected a netCDF file"):
        Statistics.load(tmp_path / "text.nc")


def test_a_channel_that_is_not_there(stored, data_section):
    from credit_like.variables import Variables

    _, data, variables, store = stored()
    statistics = fit_statistics(store, variables, data)
    other = Variables(data_section("", levels=[500, 1000]))
    with pytest.raises(ValueError, match="expected statistics of 'u@1000'"):
        statistics.select(other.outputs)


def test_the_real_analyses():
    from pathlib import Path

    folder = os.environ.get("CREDIT_LIKE_DATA")
    if not folder or not Path(folder, "storm96").is_dir():
        pytest.skip("CREDIT_LIKE_DATA is not set, or has no storm96")
    from credit_like.data.store import open_store
    from credit_like.schema.load import load_experiment
    from credit_like.variables import Variables

    data = load_experiment("config/storm96.yml").data
    variables = Variables(data)
    store = open_store(data, variables)
    statistics = fit_statistics(store, variables, data)
    assert len(store) == 64
    assert statistics.missing_times == {17, 36, 37}
    assert (~statistics.mask(variables.outputs)).sum((1, 2)).tolist() == [224] * 6
    _, _, change_std = statistics.select(variables.outputs)
    np.testing.assert_allclose(change_std, [468, 3.26, 3.84, 4.34, 5.29, 7.02], rtol=0.03)


def test_statistics_of_another_grid_are_refused(stored, dataset, tmp_path):
    _, data, variables, store = stored(dataset())
    fitted = fit_statistics(store, variables, data).dataset
    fitted.to_netcdf(tmp_path / "same.nc")
    Statistics.load(tmp_path / "same.nc", store)
    counted = fitted.assign_coords(longitude=fitted.longitude - 360 - 1e-6)
    counted.to_netcdf(tmp_path / "counted.nc")  # from another meridian
    assert Statistics.load(tmp_path / "counted.nc", store).dataset.sizes == fitted.sizes
    moved = fitted.assign_coords(longitude=fitted.longitude + 1)
    for name, changed in (("fewer", fitted.isel(latitude=slice(0, 2))), ("moved", moved)):
        changed.to_netcdf(tmp_path / f"{name}.nc")
        with pytest.raises(UserError, match="expected statistics of the data's"):
            Statistics.load(tmp_path / f"{name}.nc", store)
    content = (tmp_path / "same.nc").read_bytes()
    for kept in (0, 100, len(content) // 2, len(content) - 100):
        (tmp_path / "cut.nc").write_bytes(content[:kept])
        with pytest.raises(UserError, match=r"cut\.nc"):
            Statistics.load(tmp_path / "cut.nc", store)


@pytest.mark.parametrize(
    ("changes", "message", "used"),
    [
        ({}, None, None),
        (
            {"timestep": "12h"},
            r"the time step 12:00:00, got those of 6:00:00 in .*statistics.nc; run `credit-like pre",
            None,
        ),
        (
            {"train": ["2001-01-02", "2001-01-06T18"]},
            r"the training period \[2001-01-02T00:00:00, .*got those of \[2001-01-01T00:00:00, .*remove the file",
            None,
        ),
        (
            {"prognostic": {"level": ["u", {"name": "t", "units": "degC"}], "surface": ["sp"]}},
            "statistics of t@500 in 'degC', got those in 'K' in .*; run `credit-like preprocess` again, or remove",
            "statistics of t@500 in 'degC', got those in 'K' in .*; undo the change",
        ),
        ({"prognostic": {"level": ["u", {"name": "t", "units": "kelvin"}], "surface": ["sp"]}}, None, None),
    ],
)
def test_statistics_of_other_data_are_refused(stored, dataset, tmp_path, data_section, changes, message, used):
    """Weights of the run go with its statistics, whatever the times are now; not so units."""
    from credit_like.data.store import open_store
    from credit_like.variables import Variables

    ds = dataset()
    ds["t"].attrs["units"] = "K"
    _, data, variables, store = stored(ds)
    path = tmp_path / "statistics.nc"
    fit_statistics(store, variables, data).save(path)
    other = data_section(data.source[0].path, **changes)
    others = Variables(other)
    again = open_store(other, others)
    for is_used, expected in ((False, message), (True, used)):
        if expected is None:
            Statistics.load(path, again).refuse_other_data(again, others, other, path, is_used)
        else:
            with pytest.raises(UserError, match=expected):
                Statistics.load(path, again).refuse_other_data(again, others, other, path, is_used)
    named = other.model_copy(update={"statistics": str(path)})
    if used is None:  # times of a file that the experiment names are the user's choice
        Statistics.load(path, again).refuse_other_data(again, others, named, path, is_used=False)
    else:
        with pytest.raises(UserError, match=r"in .*; run .* again, or name another file in data.statistics"):
            Statistics.load(path, again).refuse_other_data(again, others, named, path, is_used=False)
    old = xr.load_dataset(path).drop_vars("units")
    del old.attrs["training_period"]
    if message and "time step" in message:  # as from a source's own statistics, which are of no training period
        with pytest.raises(UserError, match="the time step 12:00:00, got those of 6:00:00"):
            Statistics(old).refuse_other_data(again, others, other, path, is_used=False)
        del old.attrs["timestep"]
    Statistics(old).refuse_other_data(again, others, other, path, is_used=False)
