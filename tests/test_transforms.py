"""Variables that are transformed before they are scaled: exact inverses, statistics, steps, loss and forecasts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit_like import build
from credit_like.checkpoint.manager import CheckpointManager
from credit_like.data.statistics import Statistics, fit_statistics, scan, scan_blocks, varying, wanted_times
from credit_like.data.store import open_store
from credit_like.losses._mean import AreaLoss
from credit_like.schema.checks import section_findings
from credit_like.schema.data import Transform
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import dump_experiment, load_experiment
from credit_like.transforms import Transforms, forward, inverse
from credit_like.variables import Variables
from tests.experiments import DEMO, SHORT, SMALL_MODEL

KINDS = ["log1p", "sqrt", "asinh"]
RAIN = "{name: precipitation, transform: {type: log1p, scale: 0.1}}"
WATER = "{name: column_water, transform: {type: asinh, scale: 2}}"
SETTINGS = [
    *SHORT,
    SMALL_MODEL,
    "data.source.steps=60",
    f"data.diagnostic.surface=[{RAIN}]",
    f"data.prognostic.surface=[{WATER}]",
    "inference={init: [2000-01-12, 2000-01-12, 6h], lead: 12h}",
    "trainer={device: cpu, global_batch_size: 8, micro_batch_size: 8, batches_per_epoch: 2, scheduler: {type: constant}}",
]


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_in_numpy_and_torch(kind) -> None:
    transform = Transform(type=kind, scale=0.3)
    x = np.concatenate([-np.logspace(-6, 3, 50), [0.0], np.logspace(-6, 3, 50)])
    z = forward(transform, x, np)
    u = np.abs(x) / 0.3
    expected = (
        np.sign(x) * {"log1p": np.log(1 + u), "sqrt": np.sqrt(1 + u) - 1, "asinh": np.log(u + np.sqrt(u**2 + 1))}[kind]
    )
    np.testing.assert_allclose(z, expected, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(inverse(transform, z, np), x, rtol=1e-9, atol=1e-15)
    assert np.isnan(forward(transform, np.array([np.nan]), np)).all()
    wide = torch.tensor(x, requires_grad=True)
    np.testing.assert_allclose(forward(transform, wide, torch).detach(), z, rtol=1e-13)
    assert torch.autograd.gradcheck(lambda x: forward(transform, x, torch), (wide[::7],))
    assert torch.autograd.gradcheck(lambda z: inverse(transform, z, torch), (torch.tensor(z[::7], requires_grad=True),))
    at_zero = torch.zeros(1, requires_grad=True)
    forward(transform, at_zero, torch).backward()
    assert float(at_zero.grad) == pytest.approx({"sqrt": 0.5 / 0.3}.get(kind, 1 / 0.3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    experiment = load_experiment(DEMO, [*SETTINGS, f"save_loc={tmp_path_factory.mktemp('transforms')}"])
    assert build.train(experiment) == 0
    return experiment


def test_statistics_are_those_of_the_transformed_values(trained) -> None:
    variables = Variables(trained.data)
    store = open_store(trained.data, variables)
    statistics = Statistics.load(f"{trained.save_loc}/statistics.nc", store)
    rain = store.read([variables["precipitation"]], store.period(trained.data.train)).astype(float)
    water = store.read([variables["column_water"]], store.period(trained.data.train)).astype(float)
    mean, std, change_std = (part[[-2, -1]] for part in statistics.select(variables.outputs))
    values = [np.arcsinh(water / 2), np.sign(rain) * np.log1p(np.abs(rain) / 0.1)]
    np.testing.assert_allclose(mean, [x.mean() for x in values], rtol=1e-5)
    np.testing.assert_allclose(std, [x.std() for x in values], rtol=1e-5)
    np.testing.assert_allclose(change_std, [np.diff(x, axis=0).std() for x in values], rtol=1e-4)
    plain = load_experiment(DEMO, [*SETTINGS, "data.diagnostic.surface=[precipitation]"])
    with pytest.raises(ValueError, match="expected statistics of precipitation with the transform 'none'"):
        statistics.select(Variables(plain.data).outputs)
    with pytest.raises(ValueError, match=r"with the transform 'log1p of x / 0\.1', got 'none'"):
        fit_statistics(store, Variables(plain.data), plain.data).select(variables.outputs)


def test_the_audit_looks_at_physical_values(trained) -> None:
    found = {}
    for section in (trained.data, load_experiment(DEMO, [*SHORT, "data.source.steps=60"]).data):
        variables = Variables(section)
        store = open_store(section, variables)
        parts = scan_blocks(store, varying(variables), *wanted_times(store, section))
        found[section is trained.data] = scan(store, varying(variables), parts, look=True).looks
    assert found[True].keys() == found[False].keys()
    for position, looks in found[True].items():
        np.testing.assert_allclose(looks, found[False][position], rtol=1e-12)


def test_a_step_and_its_loss_equal_the_formulas(trained) -> None:
    context = build.build_context(trained, build.start(trained))
    build.load_weights(context, CheckpointManager(build.Path(trained.save_loc) / "checkpoints").latest())
    stepper, sample = context.stepper.eval(), next(build.build_loader(context, trained.data.train, False).batches(0))
    state = stepper.initial(sample.prognostic, sample.index)
    with torch.no_grad():
        y = stepper.model(stepper.inputs(state, sample.forcing))[:, :, 0].double()
        after = stepper(state, sample.forcing)
    mean, std, change_std = (torch.tensor(part) for part in context.statistics.select(context.variables.outputs))
    now = state.now[:, -1].double()
    water = 2 * torch.sinh(torch.asinh(now / 2) + change_std[-2] * y[:, -2])
    rain = mean[-1] + std[-1] * y[:, -1]
    rain = torch.sign(rain) * torch.expm1(rain.abs()) * 0.1
    torch.testing.assert_close(after.now[:, -1].double(), water, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.diagnostic[:, -1].double(), rain, rtol=1e-4, atol=1e-6)
    x = stepper.inputs(state, sample.forcing)
    torch.testing.assert_close(
        x[:, len(mean) - 2, -1].double(), (torch.asinh(now / 2) - mean[-2]) / std[-2], rtol=1e-4, atol=1e-5
    )
    loss = AreaLoss(trained.loss, context.variables, context.statistics, context.store.grid)
    prediction, target = stepper.outputs(after), sample.target[:, :, 0]
    errors = Transforms(context.variables.outputs).forward(prediction, torch) - Transforms(
        context.variables.outputs
    ).forward(target, torch)
    scale = torch.cat([change_std[:-1], std[-1:]])
    area = torch.tensor(context.store.grid.latitude_weights())
    expected = ((errors.double() / scale[:, None, None]).square().mean(-1) * area).sum(-1) / area.sum()
    torch.testing.assert_close(loss(prediction, target).double(), expected.mean(), rtol=1e-5, atol=0)


def test_forecasts_are_in_physical_units(trained) -> None:
    from credit_like.inference.forecast import forecast_path

    assert build.rollout(trained) == 0
    import xarray as xr

    variables = Variables(trained.data)
    store = open_store(trained.data, variables)
    truth = store.read([variables["column_water"]], store.period(trained.data.test))
    path = next(
        path
        for path in (forecast_path(trained), *forecast_path(trained).rglob("*.nc"))
        if path.suffix in (".nc", ".zarr")
    )
    with xr.open_dataset(path, engine="zarr" if path.suffix == ".zarr" else None, decode_timedelta=False) as written:
        water = written["column_water"].values
    assert abs(water.mean() - truth.mean()) < 3 * truth.std()


def test_an_experiment_says_the_transform_and_refuses_it_of_forcing(trained) -> None:
    text = dump_experiment(trained)
    assert "transform:" in text
    assert "transform" not in dump_experiment(load_experiment(DEMO))
    data = trained.to_dict()
    assert Experiment.model_validate(data) == trained
    short = load_experiment(DEMO, ["data.diagnostic.surface=[{name: precipitation, transform: sqrt}]"])
    assert short.data.diagnostic.surface[0].transform == Transform(type="sqrt")
    wrong = load_experiment(DEMO, ["data.static.surface=[{name: orography, transform: sqrt}]"])
    messages = [message for path, message in section_findings(wrong, 1) if path[-1] == "transform"]
    assert messages == ["expected a predicted variable to transform, got static 'orography', remove it"]
