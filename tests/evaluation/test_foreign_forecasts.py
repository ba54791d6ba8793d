"""Forecasts and truths of others, in their names, dimensions and units: the same scores, or one message."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import xarray as xr
from world import forecasts_of_truth, make_context, make_data, make_experiment

from credit_like.data.store import open_store
from credit_like.data.units import conversion
from credit_like.errors import UserError
from credit_like.evaluation.evaluate import evaluate, open_baselines
from credit_like.evaluation.frames import by_init_frame
from credit_like.evaluation.needs import open_truth
from credit_like.evaluation.results import load_results, save_results
from credit_like.evaluation.sources import ForecastFiles, match
from credit_like.variables import Variables
from tests.test_terminal import scores

LEADS = 2
OTHER_UNITS = {"u": "knots", "temperature": "degC", "sp": "hPa", "rain": "m"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(experiment, store, variables, forecasts with errors)."""
    folder = tmp_path_factory.mktemp("world")
    experiment = make_experiment(make_data(folder / "world.nc"), folder / "run")
    context = make_context(experiment)
    store, variables = context.store, context.variables
    forecasts = forecasts_of_truth(store, variables, [32, 34], LEADS, lambda truth: 1.01 * truth)
    for variable in variables.outputs:
        forecasts[variable.name].attrs = store.attrs(variable)
    return experiment, store, variables, forecasts


def scored(world, other, tmp_path):
    """Scores of the forecasts beside a baseline, without what is known of the sources."""
    experiment, store, variables, forecasts = world
    other.to_netcdf(tmp_path / "other.nc")
    section = experiment.evaluation.model_copy(update={"baselines": {"other": str(tmp_path / "other.nc")}})
    experiment = experiment.model_copy(update={"evaluation": section})
    return evaluate(experiment, forecasts, store, store, variables)


def in_units(dataset, wanted):
    result = dataset.copy()
    for name, units in wanted.items():
        a, b = conversion(dataset[name].attrs["units"], units)
        result[name] = (a * dataset[name].astype("f8") + b).assign_attrs(units=units)
    return result


def in_pascal(dataset):
    return dataset.assign_coords(level=("level", 100 * dataset["level"].values, {"units": "Pa"}))


def with_members(dataset):
    return xr.concat([dataset, dataset], "realization").drop_vars("sp").assign(sp=dataset["sp"])


FORMS = {
    "other units": lambda x: in_units(x, OTHER_UNITS),
    "levels in Pa": in_pascal,
    "levels named by the CDS": lambda x: x.rename(level="pressure_level"),
    "levels named by CMIP6": lambda x: in_pascal(x).rename(level="plev"),
    "levels named by cfgrib": lambda x: x.rename(level="isobaricInhPa"),
    "levels of each variable": lambda x: x.rename(level="level_u"),
    "short names of axes": lambda x: x.rename(time="init_time", prediction_timedelta="lead_time", latitude="lat", longitude="lon"),
    "two members that are the same": with_members,
    "a further dimension of one": lambda x: x.expand_dims("surface", -1),
    "levels of one at the surface": lambda x: x.assign(sp=x["sp"].expand_dims(level_sp=[0.0], axis=2)),
    "units that nobody knows": lambda x: x.assign(rain=x["rain"].assign_attrs(units="mm of rain")),
    "no units": lambda x: x.assign({name: x[name].assign_attrs(units="") for name in x}),
    # Hours in floating point, as parts of days: some microseconds early; leads in single precision more.
    "a little early": lambda x: x.assign_coords(
        time=x["time"] - np.timedelta64(20, "us"),
        prediction_timedelta=x["prediction_timedelta"] - np.timedelta64(100, "ms"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_scores_do_not_depend_on_how_forecasts_are_written(world, tmp_path, form):
    results = scored(world, FORMS[form](world[3]), tmp_path)
    for variable in world[2].outputs:
        mine, other = (results[variable.name].sel(source=name) for name in ("model", "other"))
        assert (abs(mine) > 0).all(), "the test needs forecasts with errors"
        np.testing.assert_allclose(other, mine, rtol=1e-4)


def test_one_level_that_was_selected_is_scored(world, tmp_path):
    one = world[3][["temperature", "sp"]].sel(level=850)
    results = scored(world, one.rename(level="pressure_level"), tmp_path)
    mine, other = (results["temperature"].sel(source=name) for name in ("model", "other"))
    np.testing.assert_allclose(other.sel(level=850), mine.sel(level=850), rtol=1e-12)
    assert other.sel(level=500).isnull().all()
    np.testing.assert_allclose(*(results["sp"].sel(source=name) for name in ("model", "other")), rtol=1e-12)


@pytest.mark.parametrize(("told", "is_scored"), [("Temperature", True), ("perturbation potential temperature", False)])
def test_a_potential_temperature_is_not_scored_as_temperature(world, tmp_path, told, is_scored):
    other = world[3].rename(temperature="T")
    other["T"].attrs["long_name"] = told
    results = scored(world, other, tmp_path)
    assert results["temperature"].sel(source="other").notnull().any() == is_scored
    assert results["sp"].sel(source="other").notnull().any()


REFUSED = {
    "other quantity": (
        lambda x: x.assign(temperature=x["temperature"].assign_attrs(units="m")),
        r"temperature of .*other\.nc in units that convert to the truth's 'K', got 'm'; convert it",
    ),
    "no levels": (
        lambda x: x.sel(level=850).drop_vars("level"),
        r"u of .*other\.nc on time, .* got .* without levels; add them",
    ),
    "many sites": (
        lambda x: x.assign(sp=xr.concat([x["sp"], x["sp"]], "site")),
        r"sp of .*other\.nc on time, .* got 2 values of 'site' too; select one",
    ),
    "levels at the surface": (
        lambda x: x.assign(sp=x["temperature"].assign_attrs(units="Pa")),
        r"sp of .*other\.nc on time, .* got 2 values of 'level' too",
    ),
    "no leads": (
        lambda x: x.assign(sp=x["sp"].isel(prediction_timedelta=0)),
        r"sp of .*other\.nc on .* without prediction_timedelta",
    ),
    "bare leads": (
        lambda x: x.assign_coords(prediction_timedelta=[6, 12]),
        r"prediction_timedelta as time differences \(attribute units: hours\), got numbers in .*other\.nc; add the attribute",
    ),
    "bare times": (
        lambda x: x.assign_coords(time=[0.0, 48.0]),
        r"time as dates \(attribute units: hours since 1900-01-01\), got numbers in .*other\.nc; add the attribute",
    ),
    "other calendar": (
        lambda x: x.assign_coords(time=x["time"].convert_calendar("noleap", use_cftime=True)["time"]),
        r"forecasts in the truth's calendar standard, got noleap in .*other\.nc; change them",
    ),
}


def test_columns_that_miss_greenwich_by_rounding_are_found_there():
    theirs = np.arange(-180, 180, 0.1)  # a sum of steps: the column of Greenwich is at -1e-11
    assert 0 > theirs[1800] > -1e-9
    assert match(theirs % 360, np.arange(3600) / 10, "longitude", "x") == [*range(1800, 3600), *range(1800)]
    with pytest.raises(UserError, match=r"3600 longitudes from 0 to 359\.9, got 3600 from 180\.05 to 179\.95 in x"):
        match((theirs + 0.05) % 360, np.arange(3600) / 10, "longitude", "x")


def test_missing_coordinates_of_a_dataset_are_close_to_none():
    wanted = np.array([30.0, 0.0, -30.0])
    assert match(wanted[::-1] + 5e-4, wanted, "latitude", "x") == [2, 1, 0]
    with pytest.raises(UserError, match="3 latitudes from 30 to -30, got some that are NaN in x"):
        match(np.array([30.0, np.nan, -30.0]), wanted, "latitude", "x")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_one_message(world, tmp_path, case):
    change, message = REFUSED[case]
    with pytest.raises(UserError, match=rf"^evaluation\.baselines\.other: expected {message}") as refused:
        scored(world, change(world[3]), tmp_path)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.parametrize("axis", ["prediction_timedelta", "time", "latitude"])
def test_a_store_that_has_lost_a_coordinate_is_one_message(world, tmp_path, axis, consolidated):
    """The metadata of a consolidated one still tell of it, and zarr fills its values."""
    experiment, store, variables, forecasts = world
    forecasts.to_zarr(tmp_path / "other.zarr", zarr_format=2, consolidated=consolidated)
    shutil.rmtree(tmp_path / "other.zarr" / axis)
    with pytest.raises(UserError, match=rf"expected a coordinate {axis} with each value once in .*other\.zarr, got"):
        evaluate(experiment, tmp_path / "other.zarr", store, store, variables)


def test_forecasts_without_leads_are_one_message(world):
    experiment, store, variables, forecasts = world
    none = forecasts.isel(prediction_timedelta=[])
    with pytest.raises(UserError, match="expected forecasts with leads above 0, got none in the forecasts"):
        evaluate(experiment, none, store, store, variables)


def test_published_results_in_other_units_are_converted(world, tmp_path):
    """The same forecasts, scored in other units, are the same results, whatever the power of the units in a metric."""
    experiment, store, variables, forecasts = world
    tree = experiment.to_dict()
    tree["evaluation"] |= {"metrics": ["rmse", "mse", "mae", "bias", "acc"], "bootstrap": 5}
    other = type(experiment).model_validate(tree).to_dict()
    for role in ("prognostic", "diagnostic"):
        for variable in other["data"][role]["level"] + other["data"][role]["surface"]:
            variable["units"] = OTHER_UNITS[variable["name"]]
    other = type(experiment).model_validate(other)
    of_other = Variables(other.data)
    other_store = open_store(other.data, of_other)
    save_results(evaluate(other, forecasts, other_store, other_store, of_other), tmp_path)
    tree["evaluation"]["baselines"] = {"published": str(tmp_path / "model.nc")}
    results = evaluate(type(experiment).model_validate(tree), forecasts, store, store, variables)
    for variable in variables.outputs:
        mine, theirs = (results[variable.name].sel(source=name) for name in ("model", "published"))
        assert mine.sel(metric=["rmse", "mse", "bias_high"]).notnull().all()
        np.testing.assert_allclose(theirs, mine, rtol=2e-3, atol=1e-6)
    assert int(results["initial_times"]) == 2
    save_results(results, tmp_path / "again")
    assert "published" in load_results(tmp_path / "again")["source"].values


RESULTS = {
    "a further dimension": (
        lambda x: xr.concat([x, x], "kind"),
        r"u of .* on metric, lead_time, region, level, got 2 values of 'kind' too; select one",
    ),
    "levels at the surface": (
        lambda x: x.rename(u="sp").assign_attrs(units="Pa"),
        r"sp of .* on metric, lead_time, region, got 2 values of 'level' too; select one",
    ),
    "one lead": (lambda x: x.isel(lead_time=0), r"u of .* without lead_time; add them or remove the variable"),
    "no leads": (lambda x: x.drop_vars("lead_time"), r"u of .* got no coordinate lead_time; add it"),
    "bare leads": (
        lambda x: x.assign_coords(lead_time=[6.0, 24.0, 72.0]),
        r"lead_time of u of .* as time differences \(attribute units: hours\), got numbers; add the attribute",
    ),
    "another quantity": (
        lambda x: x.assign(u=x["u"].assign_attrs(units="K")),
        r"u of .* in units that convert to the truth's 'm s-1', got 'K'; convert them",
    ),
    "other variables": (lambda x: x.rename(u="ozone"), r"scores of some of u, temperature, sp, rain, got ozone in"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_published_results_that_cannot_be_compared_are_refused_before_anything_is_scored(world, tmp_path, case):
    change, message = RESULTS[case]
    file = tmp_path / "results.nc"
    change(scores().isel(source=0, drop=True)[["u"]]).to_netcdf(file)
    with pytest.raises(UserError, match=rf"^evaluation\.baselines\.other: expected .*{message}"):
        open_baselines({"other": str(file)}, world[1])


def test_published_results_may_have_dimensions_of_one(world, tmp_path, caplog):
    results = scores().isel(source=0, drop=True)[["u"]].expand_dims("kind")
    told = {"long_name": "perturbation potential temperature"}
    results.assign(T=results["u"].assign_attrs(told)).to_netcdf(tmp_path / "results.nc")
    assert open_baselines({"other": str(tmp_path / "results.nc")}, world[1])[1].keys() == {"other"}
    assert "results.nc is not shown as temperature: it is 'perturbation potential temperature'" in caplog.text


def test_sums_over_another_time_than_in_the_data_are_said(world, tmp_path, caplog):
    experiment, store, _, forecasts = world
    own = xr.load_dataset(experiment.data.source[0].path)
    own.to_netcdf(tmp_path / "same.nc")
    open_truth(with_truth(experiment, tmp_path / "same.nc"), store)
    assert "sums" not in caplog.text
    own["rain"].attrs["period_hours"] = "1"
    own.to_netcdf(tmp_path / "truth.nc")
    truth = open_truth(with_truth(experiment, tmp_path / "truth.nc"), store)
    assert (
        "evaluation.truth: sums: rain over 1 h in the files and over an unknown time in those of data.source, which are not "
        "converted"
    ) in caplog.text
    ForecastFiles(forecasts, truth, "the forecasts")
    assert "rain of the forecasts are sums" not in caplog.text
    rain = forecasts["rain"].assign_attrs(period_hours="6")
    ForecastFiles(forecasts.assign(rain=rain), truth, "the forecasts")
    assert "rain of the forecasts are sums over 6 h and those of the truth over 1 h" in caplog.text


def with_truth(experiment, path):
    tree = experiment.to_dict()
    tree["evaluation"]["truth"] = {"type": "netcdf", "path": str(path)}
    return type(experiment).model_validate(tree)


def test_the_truth_of_a_variable_with_a_file_of_its_own_is_that_of_the_truth(world, tmp_path):
    experiment, store, _, _ = world
    own = xr.load_dataset(experiment.data.source[0].path)
    own[["sp"]].to_netcdf(tmp_path / "sp.nc")
    own.assign(sp=own["sp"] + 100).to_netcdf(tmp_path / "truth.nc")
    tree = with_truth(experiment, tmp_path / "truth.nc").to_dict()
    tree["data"]["prognostic"]["surface"] = [{"name": "sp", "path": str(tmp_path / "sp.nc")}]
    truth = open_truth(type(experiment).model_validate(tree), store)
    sp = truth.variables["sp"]
    np.testing.assert_array_equal(truth.read([sp], [3]), store.read([store.variables["sp"]], [3]) + 100)


def test_variables_that_only_their_files_tell_apart_have_no_other_truth(world, tmp_path):
    """The truth would have one field for both; where levels tell them apart, it has each."""
    experiment, store, _, _ = world
    own = xr.load_dataset(experiment.data.source[0].path)
    own.to_netcdf(tmp_path / "truth.nc")
    tree = with_truth(experiment, tmp_path / "truth.nc").to_dict()
    first, second = ({"var": "sp", "path": str(tmp_path / f"{name}.nc")} for name in ("first", "second"))
    tree["data"]["prognostic"]["surface"] = [{"name": "sp", **first}, {"name": "other", **second}]
    for path in (first["path"], second["path"]):
        own[["sp"]].to_netcdf(path)
    apart = type(experiment).model_validate(tree)
    opened = open_store(apart.data, Variables(apart.data))
    with pytest.raises(
        UserError, match=r"^evaluation.truth: expected .* several that are called sp in different files"
    ):
        open_truth(apart, opened)
    tree["inference"]["output"]["variables"] = ["sp"]
    alone = open_truth(type(experiment).model_validate(tree), opened)
    np.testing.assert_array_equal(alone.read([alone.variables["sp"]], [3]), store.read([store.variables["sp"]], [3]))
    opened.close()


def test_variables_of_different_levels_are_told_apart_by_these(world):
    tree = world[0].to_dict()
    on_level = [{"name": f"z{level}", "var": "z", "levels": [level], "path": f"{level}.nc"} for level in (500, 850)]
    tree["data"]["prognostic"]["surface"] = on_level
    variables = [v for v in Variables(type(world[0]).model_validate(tree).data).outputs if v.spec.var == "z"]
    assert len(variables) == 2
    assert Variables.told_apart_by_files(variables) == []
    assert Variables.told_apart_by_files([*variables, variables[0]]) == ["z"]


def test_scores_do_not_depend_on_the_units_of_the_truth(world, tmp_path):
    experiment, store, variables, forecasts = world
    own = xr.load_dataset(experiment.data.source[0].path)
    in_units(own, OTHER_UNITS).to_netcdf(tmp_path / "truth.nc")
    truth = open_truth(with_truth(experiment, tmp_path / "truth.nc"), store)
    results = [evaluate(experiment, forecasts, one, store, variables) for one in (store, truth)]
    for variable in variables.outputs:
        assert truth.attrs(truth.variables[variable.name])["units"] == store.attrs(variable)["units"]
        np.testing.assert_allclose(*(found[variable.name] for found in results), rtol=1e-3, atol=1e-5)


def test_a_truth_of_a_part_of_the_grid_is_refused_with_the_columns_of_both(world, tmp_path):
    experiment, store, _, _ = world
    own = xr.load_dataset(experiment.data.source[0].path)
    own.isel(longitude=slice(0, 6)).to_netcdf(tmp_path / "truth.nc")
    width, theirs = len(own["longitude"]), own["longitude"].values
    columns = f"from {theirs[0]:g} to {theirs[5]:g}, got {width} from {theirs[0]:g} to {theirs[-1]:g}"
    with pytest.raises(UserError, match=rf"truth's 6 longitudes {columns} in those of this experiment"):
        open_truth(with_truth(experiment, tmp_path / "truth.nc"), store)


def test_a_truth_of_another_quantity_is_refused(world, tmp_path):
    experiment, store, _, _ = world
    own = xr.load_dataset(experiment.data.source[0].path)
    own["rain"].attrs["units"] = "kg m-2 s-1"
    own.to_netcdf(tmp_path / "truth.nc")
    with pytest.raises(
        UserError, match=r"^evaluation\.truth: expected rain in units that convert to 'kg m-2', in which"
    ):
        open_truth(with_truth(experiment, tmp_path / "truth.nc"), store)


@pytest.mark.parametrize("year", [1600, 2300])
def test_initial_times_before_and_after_those_of_nanoseconds_are_those_of_the_scores(tmp_path, year):
    """As nanoseconds in 64 bits, 2300 would be 1715."""
    with xr.open_dataset(make_data(tmp_path / "near.nc")) as dataset:
        times = np.datetime64(f"{year}-02-27", "s") + 6 * 3600 * np.arange(dataset.sizes["time"]).astype(
            "timedelta64[s]"
        )
        dataset.load().assign_coords(time=times).drop_encoding().to_netcdf(tmp_path / "far.nc")
    experiment = make_experiment(tmp_path / "far.nc", tmp_path / "run")
    tree = experiment.to_dict()
    ends = (times[0], times[12]), (times[13], times[16]), (times[17], times[-1])
    tree["data"] |= {split: [list(map(str, end))] for split, end in zip(("train", "valid", "test"), ends, strict=True)}
    tree["inference"]["init"] = [str(times[20])]
    experiment = type(experiment).model_validate(tree)
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    forecasts = forecasts_of_truth(store, variables, [20, 22], LEADS, lambda truth: 1.01 * truth)
    forecasts["time"] = times[[20, 22]]
    results = evaluate(experiment, forecasts, store, store, variables)
    assert list(results["init_time"].values.astype("datetime64[s]")) == list(times[[20, 22]])
    save_results(results, tmp_path / "scores")
    loaded = load_results(tmp_path / "scores")
    assert list(loaded["init_time"].values.astype("datetime64[s]")) == list(times[[20, 22]])
    np.testing.assert_array_equal(*(found["sp"].sel(source="model").values for found in (loaded, results)))
    frame = by_init_frame(loaded, "model", "rmse", "global")
    assert list(np.unique(frame["init_time"].to_numpy().astype("datetime64[s]"))) == list(times[[20, 22]])
