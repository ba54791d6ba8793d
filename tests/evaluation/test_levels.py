"""Variables on levels of any kind are written with the attributes of the data, and scored."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from world import make_context, make_data, make_experiment

from credit_like.data.declared import Scale, check_levels
from credit_like.evaluation.evaluate import evaluate
from credit_like.inference.forecast import write_forecasts

HYBRID = "atmosphere_hybrid_sigma_pressure_coordinate"
KINDS = {
    "hPa": ({"units": "hPa"}, {"units": "hPa", "standard_name": "air_pressure", "positive": "down"}),
    "Pa": ({"units": "Pa"}, {"units": "Pa", "standard_name": "air_pressure", "positive": "down"}),
    "height": ({"units": "m", "standard_name": "height"}, {"units": "m", "standard_name": "height", "positive": "up"}),
    "depth": (
        {"units": "m", "standard_name": "depth", "positive": "down", "long_name": "ocean depth"},
        {"units": "m", "standard_name": "depth", "positive": "down", "long_name": "ocean depth"},
    ),
    "hybrid": ({"units": "hPa", "standard_name": HYBRID, "positive": "down"}, {"units": "hPa", "positive": "down"}),
    "unknown": ({}, {"units": "1", "positive": "down"}),
}


def world(tmp_path, attrs):
    with xr.open_dataset(make_data(tmp_path / "hpa.nc")) as dataset:
        dataset.load()
    dataset["level"].attrs = attrs
    dataset.to_netcdf(tmp_path / "world.nc")
    return tmp_path / "world.nc"


@pytest.mark.parametrize(("given", "expected"), KINDS.values(), ids=KINDS)
def test_levels_of_every_kind_are_written_and_scored(tmp_path, caplog, given, expected):
    output = {"type": "netcdf", "path": str(tmp_path / "forecasts")}
    experiment = make_experiment(world(tmp_path, given), tmp_path, init="2000-01-09", lead="12h", output=output)
    context = make_context(experiment)
    path = write_forecasts(context, "step-7").path
    (file,) = path.glob("*.nc")
    with xr.open_dataset(file) as written:
        attrs = written["level"].attrs
        assert {key: attrs.get(key) for key in expected} == expected
        assert ("standard_name" in attrs) == ("standard_name" in expected)
        store, variables = context.store, context.variables
        results = evaluate(experiment, path, store, store, variables)
        assert not [record for record in caplog.records if "not scored" in record.message]
        rmse = results["u"].sel(source="model", metric="rmse", region="global")
        assert rmse["level"].values.tolist() == [500, 850]
        weights = xr.DataArray(store.grid.latitude_weights(), dims="latitude")
        time = written["u"].isel(prediction_timedelta=0)
        with xr.open_dataset(tmp_path / "world.nc") as truth:
            there = truth["u"].sel(time=np.datetime64("2000-01-09T06"))
            error = (time.squeeze() - there).drop_vars(("latitude", "longitude"), errors="ignore") ** 2
        by_hand = np.sqrt(error.weighted(weights).mean(("latitude", "longitude")))
        np.testing.assert_allclose(rmse.isel(lead_time=0).values, by_hand.values, rtol=1e-5)


def test_levels_that_are_not_the_truths_are_said(tmp_path, caplog):
    experiment = make_experiment(world(tmp_path, {"units": "m"}), tmp_path, init="2000-01-09", lead="6h")
    context = make_context(experiment)
    forecast = xr.open_zarr(write_forecasts(context, "step-7").path).load()
    forecast["level"].attrs["units"] = "Pa"
    results = evaluate(experiment, forecast, context.store, context.store, context.variables)
    assert "u" not in results
    assert "is not scored: its levels (500 Pa, ...) are not those of the truth (500, 850 m)" in caplog.text


def test_hybrid_levels_are_not_taken_for_pressures(tmp_path):
    given = {"units": "hPa", "standard_name": HYBRID}
    context = make_context(make_experiment(world(tmp_path, given), tmp_path))
    with pytest.raises(
        ValueError, match=rf"physics.level_pa: expected levels of pressure for u, got {HYBRID}; give the coef"
    ):
        check_levels(context.store, "u", Scale("physics.level_pa", 100.0))
