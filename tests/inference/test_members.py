"""Forecasts whose members have noise of the model: reproducible in any batch, share and after an interruption."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from torch import nn
from world import Stir, make_context, make_experiment

from credit_like.errors import UserError
from credit_like.evaluation.sources import open_forecast
from credit_like.inference import forecast as forecasts
from credit_like.inference.forecast import forecast_path, write_forecasts
from credit_like.nn.noise import NoiseKeys, standard_normal
from credit_like.rollout import rollout
from credit_like.schema.checks import ensemble_findings
from credit_like.schema.inference import Ensemble

PERTURBED = {"amplitude": {"u": 0.5, "sp": 0.2}}


class Noisy(nn.Module):
    """A model that stirs, with noise at every point."""

    def __init__(self, inner: Stir) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BCTHW, key_B=None):
        y_BCTHW = self.inner(x_BCTHW)
        z_BHWC = standard_normal(key_B, y_BCTHW.shape[-2:], y_BCTHW.shape[1], y_BCTHW.dtype)
        return y_BCTHW + 0.1 * z_BHWC.permute(0, 3, 1, 2)[:, :, None]


def write(data, save_loc, noisy=True, part=(0, 1), ensemble=None, **inference):
    """Write forecasts with the members of `ensemble` (3 by default); return what was written."""
    experiment = make_experiment(data, save_loc, ensemble={"members": 3, **(ensemble or {})}, **inference)
    context = make_context(experiment)
    if noisy:
        context.stepper.model = Noisy(context.stepper.model)
        context.stepper.noise = NoiseKeys(context.store.seconds, experiment.seed)
    outcome = write_forecasts(context, "step-7", part=part)
    if not outcome.finished:
        return None
    return open_forecast(forecast_path(experiment)).load()


def distance(one, other):
    """Largest difference of two forecasts of u at the last lead."""
    return float(np.abs(one["u"] - other["u"]).isel(prediction_timedelta=-1).max())


def test_members_of_the_model_are_the_same_in_every_batch_and_share(data, tmp_path):
    some = write(data, tmp_path / "a", batch_size=2)
    many = write(data, tmp_path / "b", batch_size=4, ensemble={"members": 5})
    assert some.sizes["number"] == 3
    xr.testing.assert_allclose(many.sel(number=[0, 1, 2]), some, rtol=1e-6)
    assert write(data, tmp_path / "c", part=(1, 2), batch_size=2) is None
    done = sorted(path.name for path in (tmp_path / "c" / "forecasts" / "done").iterdir())
    assert {name.rpartition(".")[2] for name in done} == {"2"}, "of each initial time the second batch"
    xr.testing.assert_identical(write(data, tmp_path / "c", part=(0, 2), batch_size=2), some)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert distance(some.sel(number=first), some.sel(number=second)) > 0.1
    other = write(data, tmp_path / "d", ensemble={"seed": 1})
    assert distance(some.sel(number=0), other.sel(number=0)) > 0.1


def test_an_interrupted_ensemble_is_completed_with_the_same_bits(data, tmp_path, monkeypatch):
    whole, calls = write(data, tmp_path / "whole"), []

    class Cut(Exception):
        pass

    def cut(*args, **kwargs):
        calls.append(args)
        if len(calls) == 5:
            raise Cut
        return rollout(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(forecasts, "rollout", cut)
        with pytest.raises(Cut):
            write(data, tmp_path / "cut")
    xr.testing.assert_identical(write(data, tmp_path / "cut"), whole)


@pytest.mark.parametrize("kind", ["zarr", "netcdf"])
def test_members_that_are_complete_are_not_computed_again(data, tmp_path, monkeypatch, kind):
    """An interruption costs the batch that was being computed; in netCDF, where a file has all members, the initial time."""
    output, made = {"type": kind}, []

    class Cut(Exception):
        pass

    def counted(*args, members, **kwargs):
        made.append(members)
        if len(made) == stop_at:
            raise Cut
        return rollout(*args, members=members, **kwargs)

    monkeypatch.setattr(forecasts, "rollout", counted)
    inference = {"init": "2000-01-09", "lead": "12h", "batch_size": 2, "output": output, "ensemble": {"members": 7}}
    stop_at = 0
    whole = write(data, tmp_path / "whole", **inference)
    made.clear()
    stop_at = 3
    with pytest.raises(Cut):
        write(data, tmp_path / "cut", **inference)
    made.clear()
    stop_at = 0
    xr.testing.assert_identical(write(data, tmp_path / "cut", **inference), whole)
    assert made == ([[4, 5], [6]] if kind == "zarr" else [[0, 1], [2, 3], [4, 5], [6]])


def test_what_makes_members_differ(data, tmp_path):
    model, both, perturbed, plain = (
        write(data, tmp_path / name, noisy, ensemble=ensemble)
        for name, noisy, ensemble in (
            ("model", True, {"from": "model"}),
            ("both", True, {"from": "both", **PERTURBED}),
            ("perturbed", True, {"from": "perturbations", **PERTURBED}),
            ("plain", False, PERTURBED),
        )
    )
    # The first member starts from the unperturbed state, with the noise of member 0.
    for other in (both, perturbed):
        xr.testing.assert_allclose(other.sel(number=0), model.sel(number=0), rtol=1e-6)
    assert distance(plain.sel(number=0), model.sel(number=0)) > 0.1
    assert distance(both.sel(number=1), model.sel(number=1)) > 0.1
    assert distance(both.sel(number=1), perturbed.sel(number=1)) > 0.1
    assert distance(perturbed.sel(number=0), perturbed.sel(number=1)) > 0.1


def test_the_default_is_whatever_there_is(data, tmp_path):
    assert Ensemble(members=3).sources(noisy=True) == (True, False)
    assert Ensemble.model_validate({"members": 3, **PERTURBED}).sources(noisy=True) == (True, True)
    assert Ensemble.model_validate({"members": 3, **PERTURBED}).sources(noisy=False) == (False, True)


@pytest.mark.parametrize(
    ("ensemble", "noisy", "place", "message"),
    [
        ({"from": "model"}, False, "from", "expected a model with noise for members from model, got none"),
        ({"from": "both", **PERTURBED}, False, "from", "expected a model with noise for members from both, got none"),
        ({"from": "both"}, True, "amplitude", "expected an amplitude above 0"),
        ({}, False, "amplitude", "expected an amplitude above 0"),
        ({"from": "model", **PERTURBED}, True, "amplitude", "expected no amplitude with `from: model`"),
    ],
)
def test_members_that_would_be_the_same_are_one_message(data, tmp_path, ensemble, noisy, place, message):
    section = Ensemble.model_validate({"members": 3, **ensemble})
    [(where, found)] = ensemble_findings(section, ["u", "sp"], noisy)
    assert where == ("inference", "ensemble", place)
    assert message in found
    if not noisy:
        with pytest.raises(UserError, match=message):
            write(data, tmp_path, noisy, ensemble=ensemble)
        assert not list(tmp_path.iterdir())
