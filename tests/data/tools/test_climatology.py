"""The climatology of the streamed pass, against the one that evaluation fits from the whole period."""

import logging
import shutil

import numpy as np
import pytest
import xarray as xr
import zarr

from credit_like.data.statistics import fit_statistics
from credit_like.data.store import open_store
from credit_like.data.tools import preprocess as module
from credit_like.data.tools.climatology import SlotMeans, nearest_day, slots_of, window_weights
from credit_like.data.tools.preprocess import preprocess, scan_piece
from credit_like.data.tools.rechunk import rechunk
from credit_like.evaluation import climatology as evaluation
from credit_like.evaluation.climatology import fit_climatology, load_climatology
from credit_like.variables import Variables

YEARS = {
    "train": [["2001-01-01", "2002-12-31"], ["2003-06-01", "2003-12-31"]],
    "valid": ["2003-01-01", "2003-05-30"],
    "test": ["2004-01-01", "2004-02-20"],
}


@pytest.fixture(scope="module")
def years(tmp_path_factory, dataset, data_section):
    """Three years and a bit, a time every 12 hours of day; some values missing."""
    path = tmp_path_factory.mktemp("years") / "years.nc"
    ds = dataset(steps=2 * 1146, hours=12, height=3, width=4)[["u", "sp", "rain"]]
    ds["sp"][5, 1, 1] = np.nan
    ds["rain"][..., 0, 0] = np.nan
    ds.to_netcdf(path)
    data = data_section(
        path, source={"type": "netcdf", "path": str(path)}, timestep="12h", prognostic={"level": ["u"], "surface": ["sp"]},
        dynamic_forcing={}, static={}, **YEARS,
    )  # fmt: skip
    variables = Variables(data)
    return data, variables, open_store(data, variables)


@pytest.mark.slow
def test_as_fitted_from_the_whole_period_and_loaded_for_other_times(years, tmp_path, monkeypatch):
    data, variables, store = years
    monkeypatch.setattr(module, "_PIECES", 8)
    statistics, _ = preprocess(store, variables, data, tmp_path / "out", climatology_days=61)
    plain = fit_statistics(store, variables, data)
    for name in ("mean", "std", "change_std"):
        np.testing.assert_allclose(statistics.dataset[name], plain.dataset[name], rtol=1e-10)
    np.testing.assert_array_equal(statistics.dataset["missing_position"], plain.dataset["missing_position"])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "audit.csv", "audit.png", "climatology.zarr", "statistics.nc",
    ]  # fmt: skip
    period = store.period(data.train)
    wanted = np.array(["2004-01-01", "2004-02-10T12", "2004-02-29", "2008-12-31T12", "2001-07-04"], "datetime64[s]")
    expected = fit_climatology(store, variables.outputs, period, wanted)
    path = tmp_path / "out" / "climatology.zarr"
    got = load_climatology(path, store, variables.outputs, period, wanted)
    assert got.provenance == expected.provenance
    for variable in variables.outputs:
        here, there = (x.at(variable.name, wanted) for x in (got, expected))
        np.testing.assert_allclose(here, there, rtol=2e-6)
        assert np.isnan(here).any() == (variable.name == "rain")
    assert load_climatology(path, store, variables.outputs, period[1:], wanted) is None
    assert load_climatology(path, store, variables.outputs, period, wanted, 31) is None
    evening = np.array(["2004-01-01T18"], "datetime64[s]")
    assert load_climatology(path, store, variables.outputs, period, evening) is None
    assert load_climatology(path / "absent", store, variables.outputs, period, wanted) is None
    with xr.open_zarr(path, consolidated=False) as opened:
        assert opened["u"].dims == ("hour", "dayofyear", "level", "latitude", "longitude")
        assert opened["hour"].values.tolist() == [0, 12]
        assert len(opened["dayofyear"]) == 365


def test_stopped_it_goes_on(years, tmp_path, monkeypatch):
    data, variables, store = years
    monkeypatch.setattr(module, "_PIECES", 8)
    seen = []

    def stop(piece):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(piece.file)
        return scan_piece(piece)

    monkeypatch.setattr(module, "scan_piece", stop)
    with pytest.raises(KeyboardInterrupt):
        preprocess(store, variables, data, tmp_path / "out", climatology_days=61)
    monkeypatch.setattr(module, "scan_piece", lambda piece: seen.append(piece.file) or scan_piece(piece))
    preprocess(store, variables, data, tmp_path / "out", climatology_days=61)
    assert len(seen) == len(set(seen)) == 8


@pytest.mark.slow
@pytest.mark.long
def test_slots_of_a_day_that_do_not_fit_into_memory_are_in_files(years, tmp_path, monkeypatch):
    """Whatever the grid, a piece holds no more slots in memory than its limit; the result is the same."""
    data, variables, store = years
    monkeypatch.setattr(module, "_PIECES", 8)
    preprocess(store, variables, data, tmp_path / "memory", climatology_days=61)
    made = []

    class Noted(SlotMeans):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    one_day = 2 * SlotMeans.bytes_per_slot(4, 3, 4)
    monkeypatch.setattr(module, "SlotMeans", Noted)
    monkeypatch.setattr(module, "_SLOT_BYTES", one_day - 1)
    preprocess(store, variables, data, tmp_path / "files", climatology_days=61)
    assert len(made) == 365
    assert all(
        isinstance(array, np.memmap) for means in made for array in (means.mean, means.count) if len(means.at) == 2
    )
    assert sorted(p.name for p in (tmp_path / "files").iterdir()) == [
        "audit.csv", "audit.png", "climatology.zarr", "statistics.nc",
    ]  # fmt: skip
    one, other = (
        xr.open_zarr(tmp_path / name / "climatology.zarr", consolidated=False).load() for name in ("memory", "files")
    )
    xr.testing.assert_identical(one, other)


def test_slots_in_files_are_those_in_memory(tmp_path):
    fields = np.random.default_rng(0).standard_normal((9, 2, 3, 4)).astype("f4")
    fields[3, 1, 2] = np.nan
    for stem in (None, tmp_path / "files"):
        means = SlotMeans([(1, 0), (2, 0)], 2, 3, 4, stem)
        for number, field in enumerate(fields):
            means.add((1 + number % 2, 0), field)
        means.save(tmp_path / ("memory" if stem is None else "files"))
    for name in ("mean", "count"):
        one, other = (np.load(tmp_path / f"{where}.{name}.npy") for where in ("memory", "files"))
        np.testing.assert_array_equal(one, other)
    assert len(list(tmp_path.iterdir())) == 4


def test_means_of_slots_with_holes():
    random = np.random.default_rng(0)
    fields = (1e5 + random.standard_normal((50, 2, 3, 4))).astype("f4")
    fields[random.random(fields.shape) < 0.3] = np.nan
    means = SlotMeans([(1, 0), (2, 0)], 2, 3, 4)
    for field in fields:
        means.add((2, 0), field)
    np.testing.assert_array_equal(means.count[1], np.isfinite(fields).sum(0))
    np.testing.assert_allclose(means.mean[1], np.nanmean(fields.astype("f8"), axis=0), rtol=2e-7)
    assert not means.count[0].any()


def test_weights_fall_from_the_day_and_wrap_round_the_year():
    seen = [(day, 0) for day in range(1, 366)]
    weights = window_weights(seen, [(1, 0)], 61)[0]
    assert weights[0] == 1
    np.testing.assert_allclose(weights[1:31], 1 - np.arange(1, 31) / 30)
    assert weights[364 - 10] == pytest.approx(1 - 12 / 30)  # 366 − 355 + 1 days before
    assert slots_of(np.array(["2000-12-31T18"], "datetime64[s]")) == [(366, 18 * 3600)]


@pytest.mark.parametrize(("calendar", "last"), [("360_day", 360), ("noleap", 365), ("365_day", 365), ("standard", 366)])
def test_the_window_goes_round_the_year_of_the_calendar(calendar, last):
    """By the distance on a circle of as many days as the year has."""
    seen = [(day, 0) for day in range(1, last + 1)]
    for asked in (1, 100, last):
        angle = 2 * np.pi * (np.arange(1, last + 1) - asked) / last
        apart = np.arccos(np.cos(angle)) * last / (2 * np.pi)
        weights = window_weights(seen, [(asked, 0)], 61, calendar)[0]
        np.testing.assert_allclose(weights, np.clip(1 - apart / 30, 0, 1), atol=1e-6)


def test_the_last_day_of_a_leap_year_is_that_of_other_years():
    days = np.arange(1, 366)
    assert days[nearest_day(366, days)] == 365
    weights = window_weights([(day, 0) for day in days], [(366, 0)], 61)[0]
    assert weights.argmax() == 364


@pytest.fixture
def preprocessed(stored, dataset, tmp_path):
    """(dataset, data section, variables, store, load): `load(store)` of a climatology whose surface pressure is in Pa."""
    ds = dataset()
    ds["sp"].attrs["units"] = "Pa"
    ds, data, variables, store = stored(ds)
    preprocess(store, variables, data, tmp_path / "out", climatology_days=5)
    wanted = np.array(["2001-01-09"], "datetime64[s]")

    def load(store):
        found = store.variables.outputs
        return load_climatology(
            tmp_path / "out" / "climatology.zarr", store, found, store.period(data.train), wanted, 5
        )

    return ds, data, variables, store, load


def opened(data, **changes):
    data = type(data).model_validate(data.model_dump(mode="json") | changes)
    return open_store(data, Variables(data))


def test_a_climatology_of_other_data_or_units_is_not_used(preprocessed, tmp_path, caplog):
    ds, data, _, store, load = preprocessed
    caplog.set_level(logging.INFO)
    assert load(store) is not None
    assert "is not used" not in caplog.text
    in_hpa = {"level": ["u", "t"], "surface": [{"name": "sp", "units": "hPa"}]}
    assert load(opened(data, prognostic=in_hpa)) is None
    assert "is not used, and the climatology is computed from the data: expected sp in 'hPa', got 'Pa'" in caplog.text
    other = {"level": ["u", {"name": "t", "var": "u"}], "surface": ["sp"]}
    assert load(opened(data, prognostic=other)) is None
    (1.01 * ds).assign(sp=ds["sp"]).to_zarr(tmp_path / "other.zarr", consolidated=False)
    assert load(opened(data, source={"type": "zarr", "path": str(tmp_path / "other.zarr")})) is None
    assert caplog.text.count("of the experiment's data, got that of another source or name") == 2
    assert load(opened(data, source={"type": "zarr", "path": data.source[0].path, "cache": "1GB"})) is not None


def test_a_climatology_that_is_replaced_while_it_is_read_is_read_again(preprocessed, tmp_path, monkeypatch):
    """`preprocess --climatology` puts another one in its place; zarr takes chunks that are not there for missing values."""
    _, _, _, store, load = preprocessed
    path, unfit, seen = tmp_path / "out" / "climatology.zarr", evaluation._unfit, []
    shutil.copytree(path, tmp_path / "new.zarr")
    expected = load(store).fields["sp"]

    def removed_once_opened(opened, *arguments):
        reason = unfit(opened, *arguments)
        if not seen:
            shutil.rmtree(path)
        seen.append(reason)
        return reason

    def replaced_before_the_comparison(folder, identity=evaluation.folder_identity):
        if not folder.exists():
            (tmp_path / "new.zarr").rename(folder)
        return identity(folder)

    monkeypatch.setattr(evaluation, "_unfit", removed_once_opened)
    monkeypatch.setattr(evaluation, "folder_identity", replaced_before_the_comparison)
    np.testing.assert_array_equal(load(store).fields["sp"], expected)
    assert seen == ["", ""]


def test_a_climatology_is_that_of_a_copy_of_its_data_too(preprocessed, tmp_path):
    _, data, variables, store, load = preprocessed
    rechunk(store, variables, tmp_path / "copy.zarr")
    copy = opened(data, source={"type": "zarr", "path": str(tmp_path / "copy.zarr")})
    np.testing.assert_array_equal(load(copy).fields["sp"], load(store).fields["sp"])


def test_a_climatology_of_an_earlier_release_is_compared_by_its_units(preprocessed, tmp_path):
    _, data, _, store, load = preprocessed
    for name in ("u", "t", "sp", "rain"):
        del zarr.open_array(tmp_path / "out" / "climatology.zarr" / name).attrs["credit_like_origin"]
    shutil.copytree(data.source[0].path, tmp_path / "moved.zarr")
    moved = {"type": "zarr", "path": str(tmp_path / "moved.zarr")}
    assert load(store) is not None
    assert load(opened(data, source=moved)) is not None
    in_hpa = {"level": ["u", "t"], "surface": [{"name": "sp", "units": "hPa"}]}
    assert load(opened(data, source=moved, prognostic=in_hpa)) is None
