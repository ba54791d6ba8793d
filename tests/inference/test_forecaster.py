"""Three lines in a notebook: an export and a data set give what the run itself gives."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import xarray as xr

from credit_like import build
from credit_like.checkpoint.export import export, load_export
from credit_like.checkpoint.format import write_tensors
from credit_like.checkpoint.package import CORRECTIONS, WEIGHTS, Package, write_package
from credit_like.data.files import netcdf_files
from credit_like.data.store import open_store
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.inference.forecast import forecast
from credit_like.inference.forecaster import Forecaster, load_forecaster
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_experiment
from credit_like.variables import ROLES, Variables
from tests.experiments import DEMO, SHORT, SMALL_MODEL
from tests.inference.world import make_data, make_experiment

TINY = [
    *SHORT,
    SMALL_MODEL,
    "physics=[{type: clip, variables: [column_water, precipitation]}]",
    "trainer.epochs=1",
    "trainer.batches_per_epoch=2",
    "trainer.scheduler.warmup_steps=1",
]
INIT = ["2000-01-11T06:00:00", "2000-01-12T06:00:00"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(experiment, its data as one data set, its export)."""
    folder = tmp_path_factory.mktemp("run")
    experiment = load_experiment(DEMO, [*TINY, f"save_loc={folder}"])
    assert build.train(experiment) == 0
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    coords = {"latitude": store.grid.latitude, "longitude": store.grid.longitude, "time": store.times}
    dataset = xr.Dataset(coords={**coords, "time": store.times.astype("datetime64[ns]"), "level": [1.0, 2.0]})
    for variable in variables:
        static = variable in variables.role("static")
        dims = ("latitude", "longitude") if static else ("time", "level", "latitude", "longitude")
        values = store.read([variable], [0] if static else range(len(store)))
        if not variable.levels:
            values, dims = values[:, 0], tuple(dim for dim in dims if dim != "level")
        dataset[variable.name] = (dims, values[0] if static else values, store.attrs(variable))
    return experiment, dataset, export(folder, folder / "model.safetensors")


def test_an_analysis_within_a_period_is_no_climatology_of_it_which_a_package_has(run, tmp_path):
    _, dataset, _ = run
    period = "climatology: [2000-01-01, 2000-01-10]}"
    relaxed = (
        f"physics=[{{type: relax, variables: [u, column_water], rate: 0.5, {period}, {{type: clip, variables: [column_water]}}, "
        f"{{type: zonal-energy, variables: [v, precipitation], rate: 0.5, {period}, "
        f"{{type: spherical-filter, variables: [height], highest: 7, {period}]"
    )
    experiment = load_experiment(DEMO, [*TINY, relaxed, f"save_loc={tmp_path}"])
    assert build.train(experiment) == 0
    forecaster = load_forecaster(export(tmp_path, tmp_path / "model.safetensors"))
    one = dataset.sel(time=[np.datetime64("2000-01-05T00:00:00")])
    with pytest.raises(
        UserError,
        match=r"period 2000-01-01\S* to 2000-01-10\S*, got 2000-01-05T00:00:00; .*forecast with relax from a package",
    ):
        list(forecaster(one, init=["2000-01-05"], leads=1))
    from_data = list(forecaster(dataset, init=["2000-01-05"], leads=2))
    write_package(tmp_path, tmp_path / "package")
    from_analysis = list(load_forecaster(tmp_path / "package")(one, init=["2000-01-05"], leads=2))
    for first, second in zip(from_data, from_analysis, strict=True):
        xr.testing.assert_identical(first, second)
    corrections = netcdf_files.load(tmp_path / "package" / CORRECTIONS)
    assert [*corrections] == ["correction_0_mean", "correction_2_power", "correction_3_mean"]
    netcdf_files.save(2 * corrections, tmp_path / "other.nc")
    package = Package(tmp_path / "package" / WEIGHTS, corrections=tmp_path / "other.nc")
    other = list(load_forecaster(package)(one, init=["2000-01-05"], leads=2))
    for name in ("u", "v", "height", "precipitation"):
        assert not other[0][name].equals(from_analysis[0][name])


def test_three_lines_give_what_the_run_gives(run):
    experiment, dataset, path = run
    forecaster = load_forecaster(path)
    assert re.match(r"<Forecaster of \S+: steps of 6 h on \d+ x \d+ points; prognostic u, v, height", repr(forecaster))
    found = list(forecaster(dataset, init=INIT, leads=3))

    context = build.build_context(experiment, build.start(experiment))
    build.load_weights(context)
    expected = list(forecast(context.stepper, context.store, context.variables, INIT, 3))
    for one, other in zip(found, expected, strict=True):
        assert list(one.data_vars) == ["u", "v", "height", "column_water", "precipitation"]
        xr.testing.assert_allclose(one, other, rtol=1e-5)
        assert float(one["column_water"].min()) >= 0
    assert [int(one["prediction_timedelta"][0] / np.timedelta64(1, "h")) for one in found] == [6, 12, 18]


def test_the_precision_is_that_of_the_experiment(run):
    """Under `trainer.amp`, forecasts of `credit-like rollout` are computed in bfloat16."""
    _, dataset, path = run
    forecaster = load_forecaster(path)
    in_single = next(forecaster(dataset, init=INIT, leads=1))
    trainer = forecaster.experiment.trainer.model_copy(update={"amp": True})
    forecaster.experiment = forecaster.experiment.model_copy(update={"trainer": trainer})
    found = next(forecaster(dataset, init=INIT, leads=1))
    store = forecaster.open(dataset)
    stepper = forecaster.context(store, INIT[0]).stepper
    xr.testing.assert_identical(found, next(forecast(stepper, store, forecaster.variables, INIT, 1, amp=True)))
    error = abs(found - in_single).max() / in_single.std()
    assert all(0 < error[name] < 0.05 for name in ("u", "v", "height"))


def test_diagnostics_need_not_be_there(run):
    _, dataset, path = run
    forecaster = load_forecaster(path)
    (whole,) = forecaster(dataset, INIT[0], 1)
    (less,) = forecaster(dataset.drop_vars("precipitation"), INIT[0], 1)
    np.testing.assert_array_equal(less["precipitation"].values, whole["precipitation"].values)
    np.testing.assert_array_equal(less["u"].values, whole["u"].values)


def test_diagnostics_need_not_be_there_under_their_name_in_the_files(run):
    """Nor does it matter that the first variable has another name in the files."""
    _, dataset, path = run
    forecaster = load_forecaster(path)
    (whole,) = forecaster(dataset, INIT[0], 1)
    for name, var in (("precipitation", "rain"), ("u", "ua")):
        spec = forecaster.variables[name].spec
        object.__setattr__(spec, "var", var)
    (less,) = forecaster(dataset.drop_vars("precipitation").rename(u="ua"), INIT[0], 1)
    np.testing.assert_array_equal(less["precipitation"].values, whole["precipitation"].values)


def test_a_data_set_without_times_is_refused(run):
    """One time that was selected has no axis of times; nor must it matter that a diagnostic variable is not there."""
    _, dataset, path = run
    forecaster = load_forecaster(path)
    for lacking in (dataset.isel(time=0), dataset.drop_vars("time")):
        for data in (lacking, lacking.drop_vars("precipitation")):
            with pytest.raises(UserError, match=r"expected times of u in the data set given, got no axis `time`.*isel"):
                list(forecaster(data, INIT[0], 1))


def test_files_of_variables_of_their_own_are_those_of_the_training_alone(tmp_path):
    data = netcdf_files.load(make_data(tmp_path / "data.nc"))
    netcdf_files.save(data[["sst"]], tmp_path / "sst.nc")
    experiment = make_experiment(tmp_path / "data.nc", tmp_path / "run").to_dict()
    experiment["data"]["dynamic_forcing"] = {"surface": [{"name": "sst", "path": str(tmp_path / "sst.nc")}]}

    def opened(experiment):
        experiment = Experiment.model_validate(experiment)
        variables = Variables(experiment.data)
        roles = {role: Variables.channel_names(variables.role(role)) for role in ROLES}
        grid = Grid(data["latitude"].values, data["longitude"].values)
        return Forecaster(torch.nn.Identity(), experiment, {r: {"channels": x} for r, x in roles.items()}, grid).open(
            data
        )

    there = opened(experiment)
    np.testing.assert_array_equal(there.forcing([2], 2)[0, 0], data["sst"][2])
    experiment["data"]["static"] = {"surface": [{"name": "first", "var": "sst"}]}
    with pytest.raises(UserError, match="got several that are called sst in different files of the training"):
        opened(experiment)


def test_diagnostics_that_are_not_there_have_the_points_of_any_prognostic_variable(run):
    _, dataset, path = run
    ocean = dataset["longitude"].values < 180
    dataset = dataset.assign(column_water=dataset["column_water"].where(xr.DataArray(ocean, dims="longitude")))
    (less,) = load_forecaster(path)(dataset.drop_vars("precipitation"), INIT[0], 1)
    np.testing.assert_array_equal(np.isfinite(less["column_water"].values).all((0, -2)).squeeze(), ocean)
    assert np.isfinite(less["precipitation"].values).all()


def turned(dataset):
    """The columns from 180° W on."""
    longitude = (dataset["longitude"].values + 180) % 360 - 180
    return dataset.assign_coords(longitude=longitude).sortby("longitude")


def on_more_points(dataset):
    """The fields of a grid with rows between those of the model."""
    rows = dataset["latitude"].values
    between = (rows[1:] + rows[:-1]) / 2
    return dataset.reindex(latitude=np.sort(np.concatenate([rows, between])))


@pytest.mark.parametrize(
    "form",
    [
        turned,
        on_more_points,
        lambda d: d.isel(latitude=slice(None, None, -1), level=[1, 0]),
        lambda d: d.assign_coords(level=("level", d["level"].values * 100, {"units": "Pa"})),
    ],
    ids=["from 180 W", "more rows", "south first", "Pa"],
)
def test_other_forms_of_the_same_fields_give_the_same_forecast(run, form):
    _, dataset, path = run
    (expected,) = load_forecaster(path)(dataset, INIT[0], 1)
    (found,) = load_forecaster(path)(form(dataset), INIT[0], 1)
    xr.testing.assert_equal(found, expected)


def in_units(dataset, declared):
    """The same fields in units that are a factor times those of the data: name → (factor, units)."""
    return dataset.assign(
        {name: (dataset[name] / factor).assign_attrs(units=units) for name, (factor, units) in declared.items()}
    )


OTHER_UNITS = {
    "u": (1852 / 3600, "knots"),
    "height": (1000, "km"),
    "column_water": (1000, "m"),
    "precipitation": (1, "kg m-2 s-1"),  # does not convert, and is not read
    "orography": (1000, "km"),
    "land_sea_mask": (0.01, "%"),
}


def test_units_are_those_of_the_training(run):
    _, dataset, path = run
    forecaster = load_forecaster(path)
    (expected,) = forecaster(dataset, INIT[0], 1)
    (found,) = forecaster(in_units(dataset, OTHER_UNITS), INIT[0], 1)
    xr.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert {name: v.attrs["units"] for name, v in found.items()} == {n: v.attrs["units"] for n, v in expected.items()}
    (found,) = forecaster(in_units(dataset, {"u": (1, "m/s"), "v": (1, "?"), "height": (1, "")}), INIT[0], 1)
    xr.testing.assert_identical(found.drop_attrs(), expected.drop_attrs())
    assert [found[name].attrs["units"] for name in ("u", "v", "height")] == ["m s-1", "m s-1", "m"]


def test_units_that_are_no_texts_are_one_message(run, tmp_path):
    made = load_export(run[2])
    made.metadata["normalisation"]["prognostic"]["units"] = 5
    odd = tmp_path / "odd.safetensors"
    write_tensors(odd, made.weights, {name: json.dumps(value) for name, value in made.metadata.items()})
    with pytest.raises(UserError, match=r"expected the metadata of a checkpoint.*odd\.safetensors"):
        load_forecaster(odd)


@pytest.mark.parametrize(("unit", "factor"), [("millibars", 1), ("Pa", 100)])
def test_levels_are_in_the_units_of_the_training(run, unit, factor):
    _, dataset, path = run
    forecaster = load_forecaster(path)
    (expected,) = forecaster(dataset, INIT[0], 1)
    of_pressure = {role: {**about, "level_units": ["hPa"] * 9} for role, about in forecaster.normalisation.items()}
    forecaster = Forecaster(forecaster.model, forecaster.experiment, of_pressure, forecaster.grid)
    level = dataset["level"].values
    (found,) = forecaster(dataset.assign_coords(level=("level", level * factor, {"units": unit})), INIT[0], 1)
    xr.testing.assert_equal(found, expected)
    for other in ("kPa", "m"):
        with pytest.raises(UserError, match=f"expected levels 1, 2 hPa of u, v, height, got 1, 2 {other}; give"):
            list(forecaster(dataset.assign_coords(level=("level", level, {"units": other})), INIT[0], 1))


def test_an_export_without_units_takes_those_of_the_data(run):
    """As those of earlier releases are."""
    _, dataset, path = run
    forecaster = load_forecaster(path)
    without = {
        role: {key: value for key, value in about.items() if key not in ("units", "level_units")}
        for role, about in forecaster.normalisation.items()
    }
    forecaster = Forecaster(forecaster.model, forecaster.experiment, without, forecaster.grid)
    (found,) = forecaster(in_units(dataset, {"height": (1, "K")}), INIT[0], 1)
    assert found["height"].attrs["units"] == "K"


def test_two_files_may_have_a_variable_under_different_aliases(run):
    """As for a training, the first one is read."""
    _, dataset, path = run
    (expected,) = load_forecaster(path)(dataset, INIT[0], 1)
    mask = dataset[["land_sea_mask"]]
    others = mask.rename(land_sea_mask="lsm"), mask.rename(land_sea_mask="LSM")
    (found,) = load_forecaster(path)([dataset.drop_vars("land_sea_mask"), *others], INIT[0], 1)
    xr.testing.assert_equal(found, expected)


def test_sums_over_several_periods_do_not_stop_a_forecast(run):
    """A forecast cannot select one, and does not read diagnostic variables."""
    _, dataset, path = run
    (expected,) = load_forecaster(path)(dataset, INIT[0], 1)
    attrs = {**dataset["precipitation"].attrs, "period_hours": "6 12", "cell_methods": "time: sum"}
    changed = dataset.assign(precipitation=dataset["precipitation"].assign_attrs(attrs))
    (found,) = load_forecaster(path)(changed, INIT[0], 1)
    xr.testing.assert_equal(found, expected)
    assert "period_hours" not in found["precipitation"].attrs  # the spacing of an analysis does not say it either
    assert changed["precipitation"].attrs == attrs
    for name in ("land_sea_mask", "u"):
        changed = dataset[name].assign_attrs(period_hours="6 12")
        with pytest.raises(UserError, match=f"expected {name} of .* over one period, got 6, 12 h"):
            load_forecaster(path)(dataset.assign({name: changed}), INIT[0], 1)


def test_keys_of_an_experiment_are_explained(run):
    _, dataset, path = run
    members = xr.concat([dataset.assign_coords(number=n) for n in range(2)], "number")
    with pytest.raises(
        UserError, match=r"data.source.select.*`forecast` has no such key: write a file that needs none"
    ):
        load_forecaster(path).open(members)


def test_a_gap_in_what_a_forecast_reads_is_refused(run, monkeypatch):
    _, dataset, path = run
    monkeypatch.setattr("credit_like.inference.times._has_no_gap", lambda *_: False)
    with pytest.raises(ValueError, match=r"^expected data every 6h .* got a gap around"):
        load_forecaster(path)(dataset, INIT, 1)


def test_it_is_a_generator_outside_of_inference_mode(run):
    _, dataset, path = run
    for _ in load_forecaster(path)(dataset, INIT, 2):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("change", "init", "leads", "message"),
    [
        (lambda d: d.drop_vars("u"), INIT, 1, "u"),
        (lambda d: d, "2010-01-01", 1, "expected a time in the data, got 2010-01-01"),
        (lambda d: d, INIT, 0, "expected at least one lead"),
        (
            lambda d: d.isel(latitude=slice(2, None)),
            INIT,
            1,
            "of the model's grid, got .*give a file of the whole area",
        ),
        (lambda d: d.assign_coords(longitude=d.longitude + 2), INIT, 1, "of the model's grid, got .*regrid the data"),
        (
            lambda d: d.isel(level=[0]),
            INIT,
            1,
            "^the data set given: expected levels 1, 2 of u, v, .*got 1; give a file",
        ),
        (
            lambda d: d.drop_vars(["u", "orography", "precipitation"]),
            INIT,
            1,
            r"^expected u, orography in the data set given, got column_water, (?!.*precipitation)",
        ),
        (
            lambda d: in_units(d, {"u": (1, "K"), "orography": (1, "m2 s-2"), "v": (1, "knots")}),
            INIT,
            1,
            r"data: u in 'm s-1' \(got 'K' in the data set given\), orography in 'm' \(got 'm2 s-2' in .*\); convert",
        ),
    ],
    ids=["variable", "time", "lead", "area", "points", "level", "several", "units"],
)
def test_what_does_not_fit_is_refused(run, change, init, leads, message):
    _, dataset, path = run
    with pytest.raises(ValueError, match=message):
        load_forecaster(path)(change(dataset), init, leads)
