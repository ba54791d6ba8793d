"""Members that start from bred vectors, or from lagged forecasts."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from world import make_context, make_experiment

from credit_like.errors import UserError
from credit_like.evaluation.sources import open_forecast
from credit_like.inference.breed import initial_states
from credit_like.inference.forecast import forecast_path, write_forecasts
from credit_like.inference.times import initial_times
from credit_like.rollout import rollout
from credit_like.schema.checks import ensemble_findings
from credit_like.schema.inference import Ensemble

SIX = dt.timedelta(hours=6)
BRED = {"amplitude": {"u": 0.1, "sp": 0.05}, "perturbations": {"type": "bred", "cycles": 2, "cycle": "12h"}}
LAGGED = {"perturbations": {"type": "lagged", "lag": "12h"}}


class Frames(nn.Module):
    """A model that stirs the mean of all frames."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x_BCTHW):
        return self.inner(x_BCTHW.mean(2, keepdim=True))


def write(data, save_loc, ensemble, part=(0, 1), history_len=1, **inference):
    experiment = make_experiment(data, save_loc, ensemble={"members": 4, **ensemble}, **inference)
    section = experiment.data.model_copy(update={"history_len": history_len})
    context = make_context(experiment.model_copy(update={"data": section}))
    context.stepper.model = Frames(context.stepper.model)
    outcome = write_forecasts(context, "step-7", part=part)
    return open_forecast(forecast_path(experiment)).load() if outcome.finished else None


@pytest.mark.parametrize("history_len", [1, 3])
def test_a_lagged_member_is_the_forecast_from_an_earlier_analysis(data, tmp_path, history_len):
    frames = {"history_len": history_len}
    members = write(data, tmp_path / "a", LAGGED, init="2000-01-09", lead="1d", batch_size=3, **frames)
    for member in range(4):
        start = np.datetime64("2000-01-09") - member * np.timedelta64(12, "h")
        one = write(
            data, tmp_path / f"b{member}", {"members": 1}, init=str(start), lead=f"{24 + 12 * member}h", **frames
        )
        for name in members:
            late = one[name].isel(time=0, prediction_timedelta=slice(2 * member, None)).values
            np.testing.assert_allclose(members[name].sel(number=member).isel(time=0).values, late, rtol=2e-6)


@pytest.mark.parametrize("ensemble", [BRED, LAGGED])
def test_the_same_in_every_batch_and_share(data, tmp_path, ensemble):
    some = write(data, tmp_path / "a", ensemble, batch_size=3)
    xr.testing.assert_allclose(write(data, tmp_path / "b", ensemble, batch_size=8), some, rtol=1e-5)
    assert write(data, tmp_path / "c", ensemble, part=(1, 2), batch_size=3) is None
    xr.testing.assert_identical(write(data, tmp_path / "c", ensemble, part=(0, 2), batch_size=3), some)
    u = some["u"].isel(prediction_timedelta=0)
    for first in range(4):
        for second in range(first):
            assert float(np.abs(u.sel(number=first) - u.sel(number=second)).max()) > 1e-3
    if ensemble is BRED:
        other = write(data, tmp_path / "d", {**ensemble, "seed": 1})
        assert not np.array_equal(other["u"].sel(number=1), some["u"].sel(number=1))
        np.testing.assert_allclose(other["u"].sel(number=0), some["u"].sel(number=0), rtol=1e-5)


def states(context, members, init):
    """The initial states of members (M, C, H, W) at one time, and the analysis (C, H, W)."""
    prognostic = context.variables.role("prognostic")
    analysed = torch.from_numpy(context.store.read(prognostic, [init] * len(members)))
    perturb = initial_states(context, amp=False)(members)
    return perturb(analysed[:, :, None], [init] * len(members))[:, :, 0].double(), analysed[0].double()


def norm(context, x_CHW):
    """Root mean square over the globe and the channels, in units of their change per step, written out."""
    change = context.statistics.select(context.variables.role("prognostic"))[2]
    weights = context.store.grid.latitude_weights()
    squares = (x_CHW.numpy() / change[:, None, None]) ** 2
    return float(np.sqrt((squares.mean(-1) * weights).sum(-1).mean() / weights.sum()))


def test_bred_vectors_come_in_pairs_of_the_size_of_their_seed(data, tmp_path):
    context = make_context(make_experiment(data, tmp_path, ensemble={"members": 5, **BRED}))
    bred, analysed = states(context, [0, 1, 2, 3, 4], 33)
    assert torch.equal(bred[0], analysed)
    gaussian = {"members": 5, "amplitude": BRED["amplitude"]}
    seeds, _ = states(make_context(make_experiment(data, tmp_path, ensemble=gaussian)), [1, 2], 33)
    for pair, seed in ((1, seeds[0]), (3, seeds[1])):
        up, down = bred[pair] - analysed, bred[pair + 1] - analysed
        change = torch.from_numpy(context.statistics.select(context.variables.role("prognostic"))[2])[:, None, None]
        np.testing.assert_allclose(up / change, -down / change, atol=2e-3)  # of float32 sums with the analysis
        assert norm(context, up) == pytest.approx(norm(context, seed - analysed), rel=2e-3)


def test_breeding_is_the_cycle_of_forecast_and_rescaling(data, tmp_path):
    """Against the cycle written out in float64, with the analysis of each time as the control's start."""
    context = make_context(make_experiment(data, tmp_path, ensemble={"members": 3, **BRED}))
    init, prognostic = 33, context.variables.role("prognostic")

    def run(start, perturb=None):
        for _, state in rollout(context.stepper, context.store, context.variables, [start], 2, perturb=perturb):
            last = state
        return last.now[0].double()

    gaussian = make_context(make_experiment(data, tmp_path, ensemble={"members": 3, "amplitude": BRED["amplitude"]}))
    seed, analysed = states(gaussian, [1], init)
    vector = seed[0] - analysed
    size = norm(context, vector)
    for back in (4, 2):
        grown = run(init - back, lambda x, _, by=vector: (x.double() + by[:, None]).float()) - run(init - back)
        vector = grown * size / norm(context, grown)
    bred, analysed = states(context, [1], init)
    change = torch.from_numpy(context.statistics.select(prognostic)[2])[:, None, None]
    np.testing.assert_allclose((bred[0] - analysed) / change, vector / change, atol=5e-3)
    assert norm(context, bred[0] - analysed - vector) < 0.02 * size


class Growing(nn.Module):
    """A linear model in which one mixture of the channels grows by half in a step, and all else halves."""

    def __init__(self, n_prognostic: int, out_channels: int) -> None:
        super().__init__()
        direction = torch.ones(n_prognostic) / n_prognostic**0.5
        matrix = torch.outer(direction, direction) - 0.5 * torch.eye(n_prognostic)
        self.register_buffer("matrix", torch.nn.functional.pad(matrix, (0, 0, 0, out_channels - n_prognostic)))

    def forward(self, x_BCTHW):
        n = self.matrix.shape[1]
        return torch.einsum("oc,bchw->bohw", self.matrix, x_BCTHW[:, :n, -1])[:, :, None]


def test_breeding_finds_what_grows(data, tmp_path):
    """The channels of a bred vector, in units of their change per step, are those of the mixture that grows."""
    perturbations = {"type": "bred", "cycles": 6, "cycle": "12h"}
    ensemble = {"members": 3, "amplitude": {"u": 0.1}, "perturbations": perturbations}
    context = make_context(make_experiment(data, tmp_path, ensemble=ensemble))
    n = context.variables.n("prognostic")
    std, change = (context.statistics.select(context.variables.role("prognostic"))[i][:, None, None] for i in (1, 2))
    model = Growing(n, context.variables.out_channels)
    # x' = x + change · M (x / std): in units of the change, D M D⁻¹ with D = std / change has the eigenvectors of M · D⁻¹.
    model.matrix[:n] = model.matrix[:n] * torch.from_numpy(std / change).squeeze(-1).float()
    context.stepper.model = model
    bred, analysed = states(context, [1], 33)
    vector = ((bred[0] - analysed).numpy() / change).reshape(n, -1)
    vector = vector[:, np.abs(vector).max(0) > 0.1 * np.abs(vector).max()]
    cosine = vector.sum(0) / np.linalg.norm(vector, axis=0) / n**0.5
    assert (np.abs(cosine) > 0.98).all()
    gaussian = {"members": 3, "amplitude": {"u": 0.1}}
    seed, _ = states(make_context(make_experiment(data, tmp_path, ensemble=gaussian)), [1], 33)
    alone = ((seed[0] - analysed).numpy() / change).reshape(n, -1)
    before = alone.sum(0) / np.linalg.norm(alone, axis=0) / n**0.5
    assert (np.abs(before) < 0.95).any(), "the seed has another direction"


@pytest.mark.parametrize("ensemble", [BRED, LAGGED])
def test_initial_times_have_the_data_before_them(data, tmp_path, ensemble):
    """Two cycles of 12 h need 4 steps, three lags of 12 h six: earlier initial times are refused, or left out by default."""
    steps = 4 if ensemble is BRED else 6
    experiment = make_experiment(data, tmp_path, ensemble={"members": 4, **ensemble})
    context = make_context(experiment)

    def positions(section, missing=()):
        return initial_times(section, context.store, experiment.data, missing)

    with pytest.raises(UserError, match=rf"expected {steps} steps of data before an initial time .*got 3 before"):
        positions(experiment.inference.model_copy(update={"init": init_of("2000-01-01T18")}))
    assert positions(experiment.inference.model_copy(update={"init": init_of("2000-01-02T12")})) == [6]
    plain = experiment.inference.model_copy(update={"init": None})
    early = plain.model_copy(update={"ensemble": Ensemble(members=1)})
    assert positions(plain) == positions(early), "the test period begins late enough"
    # An analysis that is missing takes away the initial times whose members start there.
    absent = positions(plain)[1] - 2
    left = [i for i in positions(plain) if i - absent not in range(0, steps + 1, 2)]
    assert positions(plain, [absent]) == left != positions(plain)
    assert positions(plain, [positions(plain)[1] - 1]) == positions(plain)


def init_of(time):
    from credit_like.schema.inference import InitialTimes

    return InitialTimes.model_validate(time)


@pytest.mark.parametrize(
    ("ensemble", "message"),
    [
        ({"perturbations": {"type": "gaussian", "lag": "6h"}}, "expected no lag with `type: gaussian`"),
        ({"perturbations": {"type": "lagged", "cycles": 3}}, "expected no cycles with `type: lagged`"),
        ({"perturbations": {"type": "bred", "lag": "6h", "cycle": "6h"}}, "expected no lag with `type: bred`"),
    ],
)
def test_keys_of_another_type_are_refused(ensemble, message):
    with pytest.raises(ValueError, match=message):
        Ensemble.model_validate({"members": 3, **ensemble})


@pytest.mark.parametrize(
    ("ensemble", "noisy", "place", "message"),
    [
        ({"perturbations": {"type": "bred"}}, False, "amplitude", "expected an amplitude above 0"),
        ({**LAGGED, "amplitude": {"u": 1.0}}, False, "amplitude", "expected no amplitude of lagged members"),
        ({**LAGGED, "from": "model"}, True, "perturbations", "expected no perturbations with `from: model`"),
    ],
)
def test_perturbations_that_do_not_fit_are_one_message(ensemble, noisy, place, message):
    [(where, found)] = ensemble_findings(Ensemble.model_validate({"members": 3, **ensemble}), ["u", "sp"], noisy)
    assert where == ("inference", "ensemble", place)
    assert message in found


def test_lagged_members_need_no_amplitude():
    section = Ensemble.model_validate({"members": 3, **LAGGED})
    assert list(ensemble_findings(section, ["u"], False)) == []
    assert section.sources(noisy=True) == (True, True)


def test_a_cycle_between_two_steps_is_refused(data, tmp_path):
    ensemble = {"members": 3, "amplitude": {"u": 0.1}, "perturbations": {"type": "bred", "cycle": "9h"}}
    experiment = make_experiment(data, tmp_path, ensemble=ensemble)
    context = make_context(experiment)
    with pytest.raises(UserError, match=r"inference.ensemble.perturbations.cycle: expected a whole number of steps"):
        initial_times(experiment.inference, context.store, experiment.data)
