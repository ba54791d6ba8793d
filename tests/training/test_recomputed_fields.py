"""Rollouts under activation checkpointing: what surrounds the model is computed again in backward, with the same results."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from credit_like.parallel.runtime import Runtime
from tests.training.test_host_never_waits import PHYSICS, VARIABLES
from tests.training.without_data import global_grid, small_experiment, trainer_without_data

GRID = global_grid(32, 64)
LOSSES = {
    "mse": {"type": "mse"},
    "huber": {"type": "huber"},
    "spectral": {"type": "spectral"},
    "sum": {"type": "sum", "terms": [{"loss": {"type": "log-cosh"}}, {"loss": {"type": "spectral"}}]},
}


def made(leads, physics=(), loss="mse", variables=VARIABLES, **trainer):
    """A trainer with real weights and corrections, and a sample of `leads` steps."""
    experiment = small_experiment(
        GRID,
        {**variables, "forecast_len": leads},
        model={
            "type": "wxformer",
            "dim": [8, 16, 32, 64],
            "depth": [1, 1, 1, 1],
            "dim_head": 4,
            "padding_conf": {"activate": True, "mode": "earth", "pad_lat": [16, 16], "pad_lon": [16, 16]},
        },
        physics=list(physics),
        loss=LOSSES[loss],
        trainer={"shift_longitude": True, **trainer},
    )
    torch.manual_seed(0)
    built, sample = trainer_without_data(experiment, GRID, Runtime())
    generator = torch.Generator().manual_seed(1)
    for fields in (sample.prognostic, sample.target):
        fields.normal_(generator=generator).mul_(0.01).add_(1.0)
    sample.forcing.zero_()
    return built, sample


class _Outside(torch.autograd.Function):
    """In place of the model: it keeps nothing for backward."""

    @staticmethod
    def forward(ctx, x, factor, channels):
        ctx.shape = x.shape
        return 0.01 * x[:, :1, -1:].repeat(1, channels, 1, 1, 1)

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_zeros(ctx.shape)
        whole[:, :1, -1:] = 0.01 * grad.sum(1, keepdim=True)
        return whole, grad.sum(), None


class _Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.channels, self.factor = channels, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return _Outside.apply(x, self.factor, self.channels)


class _Storages(TorchDispatchMode):
    """The storages of all results except known ones; the bytes of those still there can be asked for."""

    def __init__(self, known):
        super().__init__()
        self.known, self.seen = set(known), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.known:
                    self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self):
        return sum(size for reference, size in self.seen.values() if not reference.expired())


def kept(leads, **options):
    """The bytes that are there between the forward of a rollout and its backward, without those before."""
    built, sample = made(leads, **options)
    step = built.train_step
    step.stepper.model = _Model(built.context.variables.out_channels)
    step.stepper.recomputes = step.recomputes
    with _Storages(x.untyped_storage()._cdata for x in (sample.prognostic, sample.forcing, sample.target)) as storages:
        total, _ = step.forward(step.stepper.predict_sample(sample), range(leads), leads)
        found = storages.alive()
    total.backward()
    return found


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("physics", [(), PHYSICS], ids=["no physics", "all"])
def test_a_step_of_a_rollout_keeps_no_more_fields_than_it_hands_over(physics, loss):
    """The model's output, the state after it, the prediction, and what the model's input needs of a transform; but nothing that
    physics, the transforms of the output or the loss make of them."""
    field = sum(len(v) for v in made(1)[0].context.variables.outputs) * GRID.height * GRID.width * 4
    few, many = (kept(n, physics=physics, loss=loss, activation_checkpoint=True) for n in (2, 6))
    assert (many - few) / 4 < 4.2 * field
    if physics or loss != "mse":
        few, many = (kept(n, physics=physics, loss=loss) for n in (2, 6))
        assert (many - few) / 4 > 5.9 * field


def test_without_physics_and_transforms_the_prediction_alone_is_kept():
    plain = {"prognostic": {"level": ["temperature"], "surface": []}, "diagnostic": {"surface": ["precipitation"]}}
    few, many = (kept(n, variables=plain, activation_checkpoint=True) for n in (2, 6))
    assert (many - few) / 4 < 1.1 * 3 * GRID.height * GRID.width * 4


FINITE = [section for section in PHYSICS if section["type"] != "energy"]
"""Those whose gradients are finite where temperature is 1 K."""


def results(**options):
    built, sample = made(3, FINITE, "sum", **options)
    step = built.train_step
    gradients = {}

    def update(optimizer_step, learning_rate, skip):
        gradients.update({name: p.grad.clone() for name, p in step.parameters.items() if p.grad is not None})
        return optimizer_step(learning_rate, skip)

    step.optimizer.step = functools.partial(update, step.optimizer.step)
    report = step([sample, dataclasses.replace(sample, target=sample.target * 1.001)], 2, 1e-3, 1)
    return report.ready(), report.corrections, gradients


@pytest.mark.parametrize("backprop_steps", [None, 2])
def test_gradients_and_recorded_corrections_are_those_without(backprop_steps):
    numbers, corrections, gradients = results(backprop_steps=backprop_steps)
    assert corrections
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    again, names, found = results(backprop_steps=backprop_steps, activation_checkpoint=True)
    assert names == corrections
    assert again == numbers
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))
