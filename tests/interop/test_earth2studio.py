"""Exports behind Earth2Studio's protocol, against forecasts that the command writes."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
import pytest
import torch
import xarray as xr

from credit_like.checkpoint.package import write_package
from credit_like.errors import UserError
from credit_like.inference.forecaster import Forecaster, load_forecaster
from credit_like.inference.from_files import forecast_from_files
from credit_like.interop.earth2studio import Prognostic, load_model, names_of
from credit_like.rollout import rollout
from credit_like.schema.data import Role, VariableSpec
from credit_like.schema.experiment import Experiment
from credit_like.variables import ROLES, Variable, Variables
from tests.inference.test_forecaster import INIT, run  # noqa: F401
from tests.inference.world import make_context, make_data, make_experiment


@runtime_checkable
class Documented(Protocol):
    """The methods of `earth2studio.models.px.base.PrognosticModel`, release 0.19."""

    def __call__(self, x, coords): ...
    def create_iterator(self, x, coords): ...
    def input_coords(self): ...
    def output_coords(self, input_coords): ...
    def to(self, device): ...


@pytest.fixture(scope="module")
def package(run, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("package") / "model"
    write_package(run[0].save_loc, folder)
    return folder


def fetched(model, dataset, times):
    """Return (x, coords) as `earth2studio.data.fetch_data` returns them, without a batch dimension."""
    coords = OrderedDict(list(model.input_coords().items())[1:])
    coords["time"] = np.array(times, "datetime64[ns]")
    fields = []
    for name in coords["variable"]:
        var, _, level = str(name).partition("@")
        fields.append(dataset[var].sel(level=float(level)) if level else dataset[var])
    frames = coords["time"][:, None] + coords["lead_time"]
    x = np.stack([np.stack([f.sel(time=t).values for f in fields]) for t in frames.ravel()])
    return torch.from_numpy(x.reshape(*frames.shape, *x.shape[1:])), coords


def written(package, dataset, init, folder):
    """Return the forecast that the command writes, (lead, channel, latitude, longitude)."""
    source = folder / "analysis.nc"
    dataset.drop_vars(["orography", "land_sea_mask"]).sel(time=[init]).to_netcdf(source)
    made = forecast_from_files(package, [str(source)], folder / "out.zarr", lead="18h", device="cpu")
    with xr.open_zarr(made) as found:
        variables = [found[name][0].values for name in ("u", "v", "height", "column_water", "precipitation")]
    return np.concatenate([v if v.ndim == 4 else v[:, None] for v in variables], 1)


def test_it_satisfies_the_protocol(package):
    model = load_model(package)
    assert isinstance(model, Documented)
    assert model.to("cpu") is model
    assert model.forecaster.variables["height"].spec.units == "m"  # as in the training data
    coords = model.input_coords()
    assert isinstance(coords, OrderedDict)
    assert list(coords) == ["batch", "time", "lead_time", "variable", "lat", "lon"]
    assert coords["batch"].shape == coords["time"].shape == (0,)
    assert coords["lead_time"].tolist() == [np.timedelta64(0, "s")]
    after = model.output_coords(coords)
    assert list(after) == list(coords)
    assert after["lead_time"].tolist() == [np.timedelta64(6, "h")]
    assert after["variable"].tolist() == [
        "u@1", "u@2", "v@1", "v@2", "height@1", "height@2", "column_water", "precipitation",
    ]  # fmt: skip


def test_the_protocol_is_that_of_the_package_itself(package):
    base = pytest.importorskip("earth2studio.models.px.base", reason="the extra earth2studio is not installed")
    assert isinstance(load_model(package), base.PrognosticModel)


def test_forecasts_are_those_of_the_command_bit_by_bit(run, package, tmp_path):  # noqa: F811
    _, dataset, _ = run
    model = load_model(package)
    x, coords = fetched(model, dataset, INIT)
    # Members come before the initial times; here they are equal.
    x, coords = torch.stack([x, x]), OrderedDict([("ensemble", np.arange(2)), *coords.items()])
    steps = list(islice(model.create_iterator(x, coords), 4))
    predicted = model.forecaster.variables.n("prognostic")
    torch.testing.assert_close(steps[0][0][..., 0, :predicted, :, :], x[..., 0, :predicted, :, :], rtol=0, atol=0)
    assert bool(steps[0][0][..., predicted:, :, :].isnan().all())
    hours = [step["lead_time"].astype("timedelta64[h]").astype(int).tolist() for _, step in steps]
    assert hours == [[0], [6], [12], [18]]
    for y, step in steps:
        assert y.shape == tuple(map(len, step.values()))
        assert list(step) == ["ensemble", "time", "lead_time", "variable", "lat", "lon"]
    y = torch.cat([y for y, _ in steps[1:]], 2).numpy()
    for i, init in enumerate(INIT):
        (tmp_path / str(i)).mkdir()
        expected = written(package, dataset, init, tmp_path / str(i))
        np.testing.assert_array_equal(y[0, i], expected)
        np.testing.assert_array_equal(y[1, i], expected)


class Analyses:
    """A source of Earth2Studio's kind: fields of times and of names of variables."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __call__(self, time, variable):
        names = [str(name).partition("@") for name in np.atleast_1d(variable)]
        fields = [self.dataset[var].sel(level=float(level)) if level else self.dataset[var] for var, _, level in names]
        values = np.stack([[field.sel(time=t).values for field in fields] for t in np.atleast_1d(time)])
        at = {"time": np.atleast_1d(time), "variable": np.atleast_1d(variable)}
        at |= {"lat": self.dataset["latitude"].values, "lon": self.dataset["longitude"].values}
        return xr.DataArray(values, at, list(at))


def test_its_workflow_gives_the_forecast_of_the_command(run, package, tmp_path):  # noqa: F811
    workflow = pytest.importorskip("earth2studio.run", reason="the extra earth2studio is not installed")
    backends = pytest.importorskip("earth2studio.io")
    _, dataset, _ = run
    model = load_model(package)
    found = workflow.deterministic(
        INIT[:1], 3, model, Analyses(dataset), backends.ZarrBackend(), device="cpu", verbose=False
    )
    expected = written(package, dataset, INIT[0], tmp_path)
    for i, name in enumerate(model.outputs):
        np.testing.assert_array_equal(np.asarray(found[str(name)])[0, 1:], expected[:, i])


def test_one_call_is_one_step_of_the_iterator(run, package):  # noqa: F811
    _, dataset, _ = run
    model = load_model(package)
    x, coords = fetched(model, dataset, INIT[:1])
    (_, (first, _), (second, at)) = islice(model.create_iterator(x, coords), 3)
    y, after = model(x, coords)
    torch.testing.assert_close(y, first, rtol=0, atol=0)
    y += 1  # what a workflow may do
    # The output holds what the input needs, without the diagnostic channels.
    inputs = model.input_coords()["variable"]
    keep = [after["variable"].tolist().index(name) for name in inputs]
    y, after = model(first[..., keep, :, :], OrderedDict(after, variable=inputs))
    torch.testing.assert_close(y, second, rtol=0, atol=0)
    assert after["lead_time"] == at["lead_time"]


class Remote:
    """A package whose files are fetched one by one into other names, as from a hub."""

    def __init__(self, folder, cache):
        self.folder, self.cache = folder, cache

    def resolve(self, file_path):
        copy = self.cache / f"cached-{file_path}"
        copy.write_bytes((self.folder / file_path).read_bytes())
        return str(copy)


def test_a_package_may_be_remote(run, package, tmp_path):  # noqa: F811
    model, remote = load_model(package), load_model(Remote(package, tmp_path))
    x, coords = fetched(model, run[1], INIT[:1])
    torch.testing.assert_close(remote(x, coords)[0], model(x, coords)[0], rtol=0, atol=0)
    assert remote.forecaster.sha256 == model.forecaster.sha256 != ""


@pytest.mark.parametrize(
    ("name", "levels", "pressure", "expected"),
    [
        ("temperature", (500.0, 850.0), True, ("t500", "t850")),
        ("U", (850.0,), True, ("u850",)),
        ("temperature", (100.0, 137.0), True, ("temperature@100", "temperature@137")),
        ("temperature", (100.0,), False, ("temperature@100",)),
        ("geopotential", (500.0,), True, ("z500",)),
        ("2m_temperature", (), False, ("t2m",)),
        ("SP", (), True, ("sp",)),
        ("total_precipitation_6hr", (), True, ("tp06",)),
        ("surface_roughness", (), True, ("surface_roughness",)),
    ],
)
def test_names_are_those_of_the_lexicon(name, levels, pressure, expected):
    assert names_of(Variable(name, "prognostic", levels, VariableSpec(name=name)), pressure) == expected


@pytest.mark.parametrize(("unit", "known"), [("K", True), ("kelvin", True), ("", True), ("?", True), ("degC", False)])
def test_a_variable_in_other_units_has_no_name_of_the_lexicon(unit, known):
    spec = VariableSpec(name="t2m", units=unit)
    assert names_of(Variable("2m_temperature", "prognostic", (), spec), True) == (
        ("t2m",) if known else ("2m_temperature",)
    )


SOME = {"name": "u", "levels": [500]}


@pytest.mark.parametrize(
    ("prognostic", "diagnostic"),
    [
        ({"surface": ["sp", *({"name": f"T{p}", "var": "temperature", "levels": [p]} for p in (500, 850))]}, {}),
        ({"level": [SOME], "surface": ["sp", {"name": "wind", "var": "u", "levels": [850]}]}, {}),
        ({"level": [SOME]}, {"level": ["temperature"]}),
        ({"surface": ["sp"]}, {"level": ["temperature"], "surface": [{"name": "precipitation", "var": "rain"}]}),
    ],
    ids=["two of a variable", "one beside levels", "other levels of diagnostics", "levels of diagnostics alone"],
)
def test_variables_may_have_any_levels_and_names_in_the_files(tmp_path, prognostic, diagnostic):
    values = make_experiment(make_data(tmp_path / "data.nc"), tmp_path / "run").to_dict()
    forcing = {"surface": [{"name": "sst", "fill": "persist"}]}
    data = {
        **values["data"],
        "prognostic": prognostic,
        "diagnostic": diagnostic,
        "dynamic_forcing": forcing,
        "static": {},
    }
    context = make_context(Experiment.model_validate({**values, "data": data}))
    variables, store, statistics = context.variables, context.store, context.statistics
    moments = {}
    for role in ROLES:
        numbers = zip(("mean", "std", "change_std"), statistics.select(variables.role(role)), strict=True)
        moments[role] = {"channels": Variables.channel_names(variables.role(role)), **dict(numbers)}
    model = Prognostic(Forecaster(context.stepper.model, context.experiment, moments, store.grid))
    inputs = store.read((*variables.role("prognostic"), *variables.role("dynamic_forcing")), [10])
    coords = OrderedDict(model.input_coords(), time=store.times[[10]].astype("datetime64[ns]"))
    after, _ = model(torch.from_numpy(inputs)[None, None], coords)
    _, state = next(rollout(context.stepper, store, variables, [10], 1))
    np.testing.assert_allclose(after[0, 0, 0], context.stepper.outputs(state)[0], rtol=1e-6)
    store.close()


def test_what_does_not_fit_is_refused(run, package):  # noqa: F811
    _, dataset, export = run
    model = load_model(package)
    x, coords = fetched(model, dataset, INIT[:1])
    for key, value, message in [
        ("variable", coords["variable"][::-1], "expected variable"),
        ("lat", coords["lat"][::-1], "expected lat"),
        ("lon", coords["lon"][1:], "expected lon"),
        ("lead_time", np.array([-6, 0], "timedelta64[h]"), "expected lead_time"),
    ]:
        with pytest.raises(ValueError, match=message):
            next(model.create_iterator(x, OrderedDict(coords, **{key: value})))
    with pytest.raises(ValueError, match="expected dimensions that end with"):
        model(x, OrderedDict(reversed(coords.items())))
    with pytest.raises(UserError, match="expected a package with static fields"):
        load_model(export)
    forecaster = load_forecaster(package)
    sst = Role(surface=(VariableSpec(name="sst"),))
    data = forecaster.experiment.data.model_copy(update={"dynamic_forcing": sst})
    forecaster.variables = type(forecaster.variables)(data)
    with pytest.raises(UserError, match="expected forcing that is computed or persists, got sst"):
        type(model)(forecaster)
