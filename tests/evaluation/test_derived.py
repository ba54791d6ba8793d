"""Scores of derived fields: of the model's forecasts, of the truth, and of other archives."""

import numpy as np
import pytest
import xarray as xr

from credit_like.check import checked_experiment
from credit_like.data.statistics import fit_statistics
from credit_like.data.store import open_store
from credit_like.errors import UserError
from credit_like.evaluation.derived import scored_variables, training_store
from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.needs import open_truth
from credit_like.evaluation.report import write_report
from credit_like.inference.forecast import forecast_path, write_forecasts
from credit_like.schema.errors import ExperimentError
from credit_like.schema.load import dump_experiment
from credit_like.variables import Variables
from tests.derived import everything, make_experiment, make_world

NAMES = ["geopotential", "mean_sea_level_pressure", "temperature_pl", "vorticity", "total_column_water"]
INFERENCE = {"init": ["2000-01-06", "2000-01-07"], "lead": "6h"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def written(experiment):
    """Write forecasts, with a model that shifts every field a little, and return them."""
    from world import make_context

    context = make_context(experiment)
    assert write_forecasts(context, "step-1").finished
    return xr.open_zarr(forecast_path(experiment)).load()


def scores(experiment, forecasts):
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    truth = open_truth(experiment, store)
    scored = scored_variables(variables, truth)
    return evaluate(experiment, forecasts, truth, training_store(store, truth), scored), truth, scored


def test_files_have_the_derived_fields(world, tmp_path):
    inference = {**INFERENCE, "derive": everything(world), "output": {"type": "zarr", "variables": ["u"]}}
    files = written(make_experiment(world, tmp_path, inference=inference))
    assert set(NAMES) | {"u", "u_pl"} <= set(files.data_vars)
    assert "temperature" not in files
    height = files["geopotential"]
    assert height.dims == ("time", "prediction_timedelta", "level_geopotential", "latitude", "longitude")
    assert height["level_geopotential"].values.tolist() == [850, 250, 500]
    assert height["level_geopotential"].attrs["units"] == "hPa"
    assert height.attrs["units"] == "m2 s-2"
    assert np.isfinite(files["vorticity"]).all()


def test_the_wind_vector_on_pressure_levels(world, tmp_path):
    """The squared error of a vector is the sum of those of its components (WeatherBench2)."""
    derive = [{"pressure_levels": [850, 500], "model_levels": str(world / "levels.yml")}]
    experiment = make_experiment(
        world, tmp_path, inference=INFERENCE, evaluation={"derive": derive, "metrics": ["rmse", "bias"]}
    )
    results, _, _ = scores(experiment, written(experiment))
    of = {name: results[name].sel(metric="rmse") for name in ("u_pl", "v_pl", "wind_vector_pl", "wind_vector")}
    assert of["wind_vector_pl"].sel(level=[500, 850]).notnull().all()
    assert (of["wind_vector_pl"].sel(source="model", level=500) > 0).all()
    units = {name: results[name].attrs.get("units") for name in ("u", "u_pl", "wind_vector_pl", "wind_vector")}
    assert units == dict.fromkeys(units, "m s-1")
    xr.testing.assert_allclose(of["wind_vector_pl"] ** 2, of["u_pl"] ** 2 + of["v_pl"] ** 2)
    assert of["wind_vector"].sel(level=12).notnull().all()  # that of the model's own levels is there too


def test_a_baseline_with_one_component_of_the_wind_has_no_score_of_the_vector(world, tmp_path):
    experiment = make_experiment(world, tmp_path, inference=INFERENCE, evaluation={"metrics": ["rmse"]})
    files = written(experiment)
    files[["u", "temperature"]].to_netcdf(tmp_path / "other.nc")
    section = experiment.evaluation.model_copy(update={"baselines": {"other": str(tmp_path / "other.nc")}})
    results, _, _ = scores(experiment.model_copy(update={"evaluation": section}), files)
    has = {
        name: results[name].notnull().all(["region", "lead_time", "level"]).values for name in ("u", "v", "wind_vector")
    }
    at = results["source"].values.tolist().index("other")
    assert has["u"].all()
    assert not has["v"][at].any()
    assert not has["wind_vector"][at].any()
    assert np.delete(has["wind_vector"], at, 0).all()


def test_levels_of_derived_fields_are_converted_as_those_of_others(tmp_path):
    with xr.open_dataset(make_world(tmp_path) / "data.nc") as dataset:
        dataset = dataset.load()
    dataset["level"] = ("level", dataset["level"].values * 50.0, {"units": "hPa"})
    dataset.to_netcdf(tmp_path / "data.nc")
    inference = {**INFERENCE, "derive": ["wind_speed"], "output": {"type": "zarr", "variables": ["surface_pressure"]}}
    levels = tuple(50 * number for number in range(1, 13))
    experiment = make_experiment(
        tmp_path, tmp_path / "run", levels, inference=inference, evaluation={"metrics": ["rmse"]}
    )
    files = written(experiment)
    assert files["level"].attrs["units"] == "hPa"
    files = files.assign_coords(level=("level", files["level"].values * 100, {"units": "Pa"}))
    results, _, _ = scores(experiment, files)
    assert results["wind_speed"].sel(source="model").notnull().all()


@pytest.mark.slow
def test_scores_are_the_same_whether_fields_were_written_or_derived_from_the_files(world, tmp_path):
    derive = everything(world)
    with_them = make_experiment(
        world, tmp_path / "a", inference={**INFERENCE, "derive": derive}, evaluation={"metrics": ["rmse"]}
    )
    without = make_experiment(
        world, tmp_path / "b", inference=INFERENCE, evaluation={"derive": derive, "metrics": ["rmse"]}
    )
    results = []
    for experiment in (with_them, without):
        files = written(experiment)
        result, truth, variables = scores(experiment, files)
        results.append(result)
    assert "geopotential" not in files
    xr.testing.assert_allclose(*(result[NAMES].drop_vars("provenance") for result in results), rtol=1e-5, atol=1e-9)
    rmse = results[0]["geopotential"].sel(metric="rmse", region="global")
    assert (rmse.sel(source="model", level=500) > 0).all()
    assert float(results[0]["temperature_pl"].sel(metric="rmse", source="model", region="global", level=850)[0]) > 0
    page = write_report(tmp_path / "report.html", results[1], files, truth, variables)
    assert "mean_sea_level_pressure" in page.read_text()


@pytest.mark.slow
def test_an_archive_on_pressure_levels_is_the_truth_of_derived_fields(world, tmp_path):
    derive = everything(world)[:2]
    plain = make_experiment(
        world, tmp_path / "a", inference=INFERENCE, evaluation={"derive": derive, "metrics": ["rmse"]}
    )
    files = written(plain)
    expected, truth, _ = scores(plain, files)
    archive = xr.Dataset(coords={"time": truth.times, "level": [850.0, 250.0, 500.0]})
    archive = archive.assign_coords(latitude=truth.grid.latitude, longitude=truth.grid.longitude)
    for variable in truth.derivation.outputs:
        values = truth.read([variable], range(len(truth)))
        dims = ("time", "level", "latitude", "longitude")
        archive[variable.name.removesuffix("_pl")] = (dims, values, {"units": "SI"})
    archive.to_netcdf(tmp_path / "archive.nc")
    source = {"type": "netcdf", "path": str(tmp_path / "archive.nc")}
    other = make_experiment(
        world, tmp_path / "a", inference=INFERENCE, evaluation={"derive": derive, "truth": source, "metrics": ["rmse"]}
    )
    result, _, variables = scores(other, files)
    assert {variable.name for variable in variables.outputs} == {v.name for v in truth.derivation.outputs}
    some = {"source": ["model", "persistence"], "level": [250, 500, 850]}
    xr.testing.assert_allclose(
        result["geopotential"].sel(some).drop_vars("provenance"),
        expected["geopotential"].sel(some).drop_vars("provenance"),
        rtol=1e-5,
    )


ORDERS = {
    "south first": lambda x: x.isel(latitude=slice(None, None, -1)),
    "from the date line": lambda x: x.assign_coords(longitude=(x["longitude"] + 180) % 360 - 180).sortby("longitude"),
}


@pytest.mark.parametrize("order", ["south first", pytest.param("from the date line", marks=pytest.mark.slow)])
def test_scores_do_not_depend_on_the_order_of_rows_and_columns_of_the_truth(world, tmp_path, order):
    """Climatology, thresholds and the height of the ground come from the data, in their order."""
    evaluation = {
        "derive": everything(world), "metrics": ["rmse", "acc", "activity", "brier"], "thresholds": {"quantiles": [0.9]},
    }  # fmt: skip
    plain = make_experiment(world, tmp_path, inference=INFERENCE, evaluation=evaluation)
    files = written(plain)
    expected, own, _ = scores(plain, files)
    with xr.open_dataset(world / "data.nc") as dataset:
        ORDERS[order](dataset).to_netcdf(tmp_path / "truth.nc")
    other = {**evaluation, "truth": {"type": "netcdf", "path": str(tmp_path / "truth.nc")}}
    found, truth, _ = scores(make_experiment(world, tmp_path, inference=INFERENCE, evaluation=other), files)
    for variable in truth.variables.outputs:
        for rows, columns in ((slice(None), slice(None)), (slice(1, 4), slice(2, 5))):
            parts = [store.read([variable], [3, 4], rows, columns=columns) for store in (truth, own)]
            np.testing.assert_array_equal(*parts, err_msg=variable.name)
    xr.testing.assert_allclose(found.drop_vars("provenance"), expected.drop_vars("provenance"), rtol=1e-12)


def test_files_without_what_a_field_needs_are_refused(world, tmp_path):
    inference = {**INFERENCE, "output": {"type": "zarr", "variables": ["u"]}}
    files = written(make_experiment(world, tmp_path, inference=inference))
    experiment = make_experiment(world, tmp_path, inference=inference, evaluation={"derive": everything(world)})
    with pytest.raises(
        UserError, match=r"evaluation\.derive: expected forecasts of temperature_pl, .*inference\.output"
    ):
        scores(experiment, files)


def test_rows_of_the_truth_are_those_of_the_whole(world, tmp_path):
    experiment = make_experiment(world, tmp_path, evaluation={"derive": everything(world)})
    variables = Variables(experiment.data)
    truth = open_truth(experiment, open_store(experiment.data, variables))
    for variable in truth.derivation.outputs:
        whole = truth.read([variable], [0, 3])
        parts = [truth.read([variable], [0, 3], slice(first, first + 2)) for first in range(0, truth.grid.height, 2)]
        np.testing.assert_array_equal(np.concatenate(parts, 2), whole, err_msg=variable.name)


@pytest.mark.parametrize(
    ("first", "last", "east"),
    [(80, -80, 360), (90, 20, 60), (20, 90, 60)],
    ids=["without poles", "a sector with a pole", "the same, south first"],
)
def test_so_are_single_rows_of_other_grids(world, tmp_path, first, last, east):
    (tmp_path / "levels.yml").write_bytes((world / "levels.yml").read_bytes())
    with xr.open_dataset(world / "data.nc") as data:
        latitude = np.linspace(first, last, data.sizes["latitude"])
        longitude = np.arange(data.sizes["longitude"]) * east / data.sizes["longitude"]
        data.assign_coords(latitude=latitude, longitude=longitude).to_netcdf(tmp_path / "data.nc")
    experiment = make_experiment(tmp_path, tmp_path, evaluation={"derive": everything(tmp_path)})
    truth = open_truth(experiment, open_store(experiment.data, Variables(experiment.data)))
    for variable in truth.derivation.outputs:
        rows = [truth.read([variable], [0], slice(row, row + 1)) for row in range(truth.grid.height)]
        np.testing.assert_array_equal(np.concatenate(rows, 2), truth.read([variable], [0]), err_msg=variable.name)


@pytest.mark.parametrize("section", ["inference", "evaluation"])
def test_check_names_what_is_missing(world, tmp_path, section):
    sections = {"inference": INFERENCE, "evaluation": {}}
    sections[section] = sections[section] | {"derive": [{"model_levels": str(world / "levels.yml")}, "geopotential"]}
    plain = make_experiment(world, tmp_path / "run", **sections)
    level = tuple(spec for spec in plain.data.prognostic.level if spec.name != "specific_humidity")
    role = plain.data.prognostic.model_copy(update={"level": level})
    broken = plain.model_copy(update={"data": plain.data.model_copy(update={"prognostic": role})})
    for experiment, complains in ((plain, False), (broken, True)):
        file = tmp_path / "my.yml"
        file.write_text(dump_experiment(experiment))
        if not complains:
            checked_experiment(file)
            continue
        with pytest.raises(ExperimentError) as refused:
            checked_experiment(file)
        assert f"{section}.derive" in str(refused.value)
        assert "without specific_humidity" in str(refused.value)


def test_normalisation_knows_no_derived_fields(world, tmp_path):
    experiment = make_experiment(world, tmp_path, inference={**INFERENCE, "derive": everything(world)})
    variables = Variables(experiment.data)
    statistics = fit_statistics(open_store(experiment.data, variables), variables, experiment.data)
    assert len(statistics.select(variables.outputs)[0]) == variables.out_channels
