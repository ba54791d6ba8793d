"""What surrounds the model in a step: compiled as it is without, and how much of it is kept for backward."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from credit_like.losses._mean import AreaLoss
from credit_like.plan.simulate import _NoStatistics, sample_of
from credit_like.stepper import Stepper
from credit_like.training import step
from credit_like.variables import Variables
from tests.training.without_data import global_grid, small_experiment

GRID = global_grid(16, 32)


class _Keeps(torch.autograd.Function):
    """A model that keeps nothing for backward."""

    @staticmethod
    def forward(ctx, x, factor, channels):
        ctx.shape = x.shape
        return 1.5 * x[:, :channels, -1:]

    @staticmethod
    def backward(ctx, grad):
        full = grad.new_zeros(ctx.shape)
        full[:, : grad.shape[1], -1:] = 1.5 * grad
        return full, grad.sum(), None


class _Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.channels, self.factor = channels, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return _Keeps.apply(x, self.factor, self.channels)


class _Half(nn.Module):
    """A module of physics."""

    def forward(self, after, before):
        return (after + before[:, :1]) / 2


class _Masked(_NoStatistics):
    def mask(self, variables):
        found = super().mask(variables).copy()
        found[0, 2:4] = False
        return found


def _parts(leads, predict="increment", physics=()):
    experiment = small_experiment(
        GRID,
        {
            "prognostic": {"level": ["specific_humidity"], "surface": ["surface_pressure"]},
            "diagnostic": {"surface": ["precipitation"]},
            "forecast_len": leads,
        },
        model={"type": "wxformer", "predict": predict},
        trainer={"global_batch_size": 1},
    )
    variables, statistics = Variables(experiment.data), _Masked(GRID)
    model = _Model(variables.out_channels)
    static = np.zeros((1, GRID.height, GRID.width), np.float32)
    stepper = Stepper(model, variables, statistics, static, predict, physics)
    sample = sample_of(experiment, variables, GRID, slice(None))
    generator = torch.Generator().manual_seed(0)
    for x in (sample.prognostic, sample.target):
        x.normal_(generator=generator)
        x[:, 0, :, 2:4] = torch.nan
    return stepper, AreaLoss(experiment.loss, variables, statistics, GRID), sample


def _results(stepper, loss, sample, compare):
    total, sums = torch.zeros(()), []
    for prediction, target in stepper.predict_sample(sample):
        value, channels = compare(loss, prediction, target)
        total = total + value
        sums.append(channels)
    stepper.zero_grad()
    total.backward()
    return total.detach(), *sums, stepper.model.factor.grad


@pytest.mark.slow
@pytest.mark.parametrize(("predict", "physics"), [("increment", ()), ("state", (_Half(),))], ids=["plain", "physics"])
def test_compiled_arithmetic_gives_the_same_numbers(monkeypatch, predict, physics):
    stepper, loss, sample = _parts(3, predict, physics)
    expected = _results(stepper, loss, sample, step.compare)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    stepper.compile_arithmetic()
    got = _results(stepper, loss, sample, torch.compile(step.compare, dynamic=False))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert expected[-1] != 0


@pytest.mark.parametrize("leads", [1, 3])
def test_one_field_is_kept_for_each_step_of_a_rollout(leads):
    """The error, whose square is the loss: what surrounds the model need not be computed again in backward."""
    stepper, loss, sample = _parts(leads)
    constants = {x.untyped_storage().data_ptr() for x in (*stepper.buffers(), *loss.buffers())}
    kept, alive = {}, []

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in constants:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        total = sum(step.compare(loss, *lead)[0] for lead in stepper.predict_sample(sample))
    assert total.requires_grad
    field = sample.target[:, :, 0].numel() * 4
    assert leads * field <= sum(kept.values()) < leads * 1.2 * field
