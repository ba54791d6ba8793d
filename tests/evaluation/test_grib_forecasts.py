"""Forecasts in GRIB, made by ecCodes and by the program: the scores of the same forecasts in netCDF."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from world import HEIGHT, WIDTH, forecasts_of_truth, make_context, make_data, make_experiment

from credit_like import registry
from credit_like.data.store import open_store
from credit_like.errors import UserError
from credit_like.evaluation.evaluate import evaluate
from credit_like.evaluation.results import save_results
from credit_like.evaluation.sources import ForecastFiles, open_forecast
from credit_like.figures import plot
from credit_like.inference.forecast import write_forecasts
from credit_like.inference.paths import forecast_path
from credit_like.variables import Variables

pytest.importorskip("eccodes", reason="the extra `grib` (ecCodes) is not installed")
from tests.data.sources.test_grib import message, surface

LEADS, INIT = 2, [32, 34]
PARAMETERS = {"u": "u", "temperature": "t", "sp": "sp"}
"""Name in the experiment → short name; `rain` has no parameter of its own."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(context, two members of forecasts with errors)."""
    folder = tmp_path_factory.mktemp("world")
    context = make_context(make_experiment(make_data(folder / "world.nc"), folder / "run"))
    members = [
        forecasts_of_truth(context.store, context.variables, INIT, LEADS, lambda truth, by=by: by * truth)
        for by in (1.01, 0.98)
    ]
    forecasts = xr.concat(members, "number").assign_coords(number=[0, 1])
    for variable in context.variables.outputs:
        forecasts[variable.name].attrs = context.store.attrs(variable)
    return context, forecasts


def messages(forecasts):
    """Yield (initial time, message) of every field."""
    north, east = forecasts["latitude"].values, forecasts["longitude"].values
    area = north[0], east[0], north[-1], east[-1]
    stacked = [dim for dim in ("time", "prediction_timedelta", "number", "level") if dim in forecasts.dims]
    for name, short in PARAMETERS.items():
        fields = forecasts[name].stack(field=[dim for dim in stacked if dim in forecasts[name].dims])
        for field in fields["field"].values:
            one = fields.sel(field=field)
            start = one["time"].values.astype("datetime64[s]").item()
            keys = {
                "dataDate": int(f"{start:%Y%m%d}"), "dataTime": int(f"{start:%H%M}"),
                "step": int(one["prediction_timedelta"] / np.timedelta64(1, "h")),
            }  # fmt: skip
            ensemble = (
                {"productDefinitionTemplateNumber": 1, "number": int(one["number"])} if "number" in stacked else {}
            )
            make = surface if "level" not in one.coords else message
            level = {} if make is surface else {"level": int(one["level"])}
            args = (short,) if make is surface else ()
            names = {} if make is surface else {"shortName": short}
            yield start, make(*args, one.values, shape=(HEIGHT, WIDTH), area=area, **ensemble, **names, **level, **keys)


def write(folder, forecasts):
    """Write one file of each initial time, its messages in a random order."""
    found = [*messages(forecasts)]
    np.random.default_rng(0).shuffle(found)
    folder.mkdir()
    for start in {start for start, _ in found}:
        (folder / f"{start:%Y-%m-%d-%H}.grb2").write_bytes(b"".join(one for of, one in found if of == start))
    return folder


@pytest.mark.parametrize("members", [1, 2])
def test_scores_are_those_of_the_same_forecasts_in_netcdf(world, tmp_path, members):
    context, forecasts = world
    forecasts = forecasts.isel(number=0, drop=True) if members == 1 else forecasts
    baselines = {
        "baselines": {"other": str(write(tmp_path / "grib", forecasts))},
        "metrics": ("rmse", "crps", "spread")[: 2 * members - 1],
    }
    section = context.experiment.evaluation.model_copy(update=baselines)
    experiment = context.experiment.model_copy(update={"evaluation": section})
    results = evaluate(experiment, forecasts, context.store, context.store, context.variables)
    for name in PARAMETERS:
        mine, other = (results[name].sel(source=source) for source in ("model", "other"))
        assert (mine.sel(metric="rmse") > 0).all(), "the test needs forecasts with errors"
        np.testing.assert_allclose(other, mine, rtol=1e-4)
    assert results["rain"].sel(source="other").isnull().all()


def test_absent_messages_are_missing_values_and_those_that_contradict_each_other_are_left_out(world, tmp_path, caplog):
    context, forecasts = world
    one = forecasts.isel(number=0, drop=True)
    contents = [content for _, content in messages(one)]
    (tmp_path / "a.grib").write_bytes(b"".join([*contents[1:], contents[-1]]))
    with caplog.at_level(logging.WARNING):
        dataset = open_forecast(tmp_path / "a.grib")
    assert caplog.messages[0].startswith("sp is not read: expected each field once, got message 19 (sp)")
    assert caplog.messages[0].endswith("remove one of them")
    assert "sp" not in dataset
    files = ForecastFiles(dataset, context.store, "a.grib")
    u = next(variable for variable in context.variables.outputs if variable.name == "u")
    first, other = (
        files.fields(int(init), [21600, 43200], u, [0, 1]) for init in context.store.seconds[np.array(INIT)]
    )
    assert np.isnan(first[0, 0, 0]).all(), "the message that was left out: the first lead and level"
    wanted = one["u"].transpose("time", "prediction_timedelta", "level", "latitude", "longitude").values
    np.testing.assert_allclose(first[0, 1], wanted[0, 1], atol=1e-4)
    np.testing.assert_allclose(first[0, 0, 1], wanted[0, 0, 1], atol=1e-4)
    np.testing.assert_allclose(other[0], wanted[1], atol=1e-4)


def test_precipitation_since_the_initial_time_is_that_of_the_steps_of_the_truth(world, tmp_path):
    context, forecasts = world
    rain = forecasts["rain"].isel(number=0, time=0)
    area = (
        *(float(rain[axis][0]) for axis in ("latitude", "longitude")),
        *(float(rain[axis][-1]) for axis in ("latitude", "longitude")),
    )
    start = rain["time"].values.astype("datetime64[s]").item()

    def total(hours, values):
        """Return precipitation in m of values in kg m-2."""
        keys = {
            "dataDate": int(f"{start:%Y%m%d}"),
            "dataTime": int(f"{start:%H%M}"),
            "shape": (HEIGHT, WIDTH),
            "area": area,
        }
        return surface("tp", values / 1000, stepType="accum", stepRange=hours, **keys)

    first, second = rain.values.astype(float)
    since_start = [total("0-6", first), total("0-12", first + second), total("0-18", first + second + 1)]
    store = context.store
    tree = context.experiment.to_dict()
    tree["data"]["diagnostic"] = {"surface": [{"name": "total_precipitation", "var": "rain"}]}
    variables = Variables(type(context.experiment).model_validate(tree).data)
    store = open_store(type(context.experiment).model_validate(tree).data, variables)
    (tp,) = variables.role("diagnostic")

    def read(*contents):
        (tmp_path / "a.grib").write_bytes(b"".join(contents))
        files = ForecastFiles(open_forecast(tmp_path / "a.grib"), store, "a.grib")
        return files.fields(int(files.init[0]), [6 * 3600, 12 * 3600, 18 * 3600], tp, [0])[0, :, 0]

    np.testing.assert_allclose(read(*since_start), [first, second, np.ones_like(first)], atol=1e-5)
    lacking = read(since_start[0], since_start[2])
    np.testing.assert_allclose(lacking[0], first, atol=1e-5)
    assert np.isnan(lacking[1:]).all(), "18 h cannot be known without 12 h"
    of_steps = read(since_start[0], total("6-12", second))
    np.testing.assert_allclose(of_steps[:2], [first, second], atol=1e-5)


@pytest.mark.parametrize(
    ("ranges", "kind", "said"),
    [
        (("0-6", "0-12"), "avg", "means over 6, 12 h"),
        (("0-6", "0-12"), "max", "maxima over 6, 12 h"),
        (("0-6", "6-12"), "avg", None),
    ],
)
def test_means_over_growing_times_are_scored_with_a_warning(world, tmp_path, caplog, ranges, kind, said):
    context, forecasts = world
    name = {"avg": "avg_sp", "max": "max_sp"}[kind]
    tree = context.experiment.to_dict()
    tree["data"]["diagnostic"] = {"surface": [{"name": name, "var": "sp"}]}
    data = type(context.experiment).model_validate(tree).data
    variables = Variables(data)
    (variable,) = variables.role("diagnostic")
    one = forecasts["sp"].isel(number=0, time=0)
    start = one["time"].values.astype("datetime64[s]").item()
    keys = {"dataDate": int(f"{start:%Y%m%d}"), "dataTime": int(f"{start:%H%M}"), "shape": (HEIGHT, WIDTH)}
    keys["area"] = tuple(float(one[axis][end]) for end in (0, -1) for axis in ("latitude", "longitude"))
    contents = [
        surface("sp", field.values, stepType=kind, stepRange=hours, **keys)
        for hours, field in zip(ranges, one, strict=True)
    ]
    (tmp_path / "a.grib").write_bytes(b"".join(contents))
    with caplog.at_level(logging.WARNING):
        files = ForecastFiles(open_forecast(tmp_path / "a.grib"), open_store(data, variables), "a.grib")
        read = files.fields(int(files.init[0]), [6 * 3600, 12 * 3600], variable, [0])[0, :, 0]
    np.testing.assert_allclose(read, one.values, rtol=1e-4)
    assert caplog.messages == (
        [f"{name} of a.grib are {said}, which are scored as they are; convert them to one length of time"]
        if said
        else []
    )


def test_fields_on_several_grids_are_refused(world, tmp_path):
    contents = [content for _, content in messages(world[1])]
    (tmp_path / "a.grib").write_bytes(b"".join([*contents, surface("sp", step=6)]))
    with pytest.raises(UserError, match=r"expected all fields on one grid.*grib_copy -w gridType=VALUE"):
        open_forecast(tmp_path / "a.grib")


def test_a_rollout_in_grib_is_scored_and_drawn(world, tmp_path):
    context, _ = world

    def run(kind, **more):
        output = registry.module("writer", kind).Config(path=str(tmp_path / kind), variables=tuple(PARAMETERS), **more)
        section = context.experiment.inference.model_copy(update={"output": output})
        experiment = context.experiment.model_copy(update={"inference": section, "save_loc": str(tmp_path / kind)})
        write_forecasts(replace(context, experiment=experiment), "step-7")
        return experiment, evaluate(
            experiment, forecast_path(experiment), context.store, context.store, context.variables
        )

    (_, wanted), (experiment, found) = run("netcdf"), run("grib", bits_per_value=32)
    for name in PARAMETERS:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
    save_results(found, tmp_path / "grib" / "evaluation")
    assert plot(experiment) == 0
    assert (tmp_path / "grib" / "evaluation" / "map_u.png").is_file()
