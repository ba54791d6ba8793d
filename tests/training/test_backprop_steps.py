"""Truncated backpropagation: the gradient of each part of a forecast from its own, constant initial state."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from credit_like import verify as kit
from credit_like.schema.load import load_experiment
from tests.experiments import representatives
from tests.faults import tiny
from tests.test_verify import CASES, FILE

LEADS = 5


def trainer(folder, steps, leads=LEADS):
    made = tiny.trainer(
        folder, backprop_steps=steps, forecast_len=leads, dropout=0.0, use_ema=False, grad_max_norm=None
    )
    for owner in (made.context.stepper, *made.loss.modules()):
        owner.double()
    return made


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """An optimiser that leaves the gradients where they are."""
    from credit_like.training.optimizers import adamw

    class Still:
        def __init__(self, config, parameters):
            self.parameters, self.gradients = parameters, {}

        def step(self, learning_rate, skip):
            self.gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

        def state(self):
            return {}

    monkeypatch.setattr(adamw, "build", Still)


def sample_of(made):
    return next(made.train_loader.batches(0)).to("cpu")


def double(sample):
    wide = {name: getattr(sample, name).double() for name in ("prognostic", "forcing", "target")}
    return dataclasses.replace(sample, **wide)


def gradients(made, sample):
    loss = made.train_step([sample], 1, 0.0, 1).ready()[0]
    return loss, made.state.optimizer.gradients


def surrogate(made, sample, steps):
    """The mean over leads, each part of `steps` leads forecast from a constant state."""
    stepper, loss = made.context.stepper, made.loss
    with torch.no_grad():
        states = [stepper.initial(sample.prognostic, sample.index)]
        for lead in range(LEADS):
            states.append(stepper(states[-1], sample.forcing[:, :, lead : lead + 1]))

    def value():
        total = torch.zeros((), dtype=torch.float64)
        for first in range(0, LEADS, steps):
            state = states[first]
            for lead in range(first, min(first + steps, LEADS)):
                state = stepper(state, sample.forcing[:, :, lead : lead + 1])
                total = total + loss(stepper.outputs(state), sample.target[:, :, lead])
        return total / LEADS

    return value


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
def test_the_gradient_is_that_of_parts_from_constant_states(tmp_path, steps) -> None:
    made = trainer(tmp_path, steps)
    sample = double(sample_of(made))
    loss, found = gradients(made, sample)
    value = surrogate(made, sample, steps)
    assert loss == pytest.approx(value().item(), rel=1e-6)  # what is logged is in float32
    size = 1e-5
    with torch.no_grad():
        for name, parameter in made.state.parameters.items():
            if name not in found:
                continue
            for i in (0, parameter.numel() // 2, parameter.numel() - 1):
                flat, differences = parameter.view(-1), []
                for sign in (1, -1):
                    flat[i] += sign * size
                    differences.append(sign * value())
                    flat[i] -= sign * size
                expected = float(sum(differences)) / (2 * size)
                assert float(found[name].view(-1)[i]) == pytest.approx(expected, rel=1e-6, abs=1e-9), (name, i)


def test_as_many_steps_as_leads_are_all(tmp_path) -> None:
    results = {}
    for steps in (None, LEADS, 1):
        made = trainer(tmp_path, steps)
        results[steps] = gradients(made, double(sample_of(made)))
    loss, whole = results[None]
    assert loss == results[LEADS][0] == pytest.approx(results[1][0], rel=1e-6)
    assert all(torch.equal(results[LEADS][1][name], value) for name, value in whole.items())
    assert any(not torch.allclose(results[1][1][name], value, rtol=1e-3) for name, value in whole.items())


def held(made, sample):
    """The largest number of bytes that the graph keeps for backward at a time."""
    now = most = 0

    class Kept:
        def __init__(self, tensor):
            nonlocal now, most
            self.tensor, self.bytes = tensor, tensor.nbytes
            now += self.bytes
            most = max(most, now)

        def __del__(self):
            nonlocal now
            now -= self.bytes

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        gradients(made, sample)
    return most


def test_memory_does_not_grow_with_the_forecast(tmp_path) -> None:
    sizes = {}
    for steps in (1, None):
        for leads in (2, 8):
            made = trainer(tmp_path, steps, leads)
            sizes[steps, leads] = held(made, double(sample_of(made)))
    assert sizes[1, 8] == sizes[1, 2]
    assert sizes[None, 8] > 3 * sizes[None, 2]


@pytest.mark.slow
@pytest.mark.parametrize("case", representatives(["domain 2", "DDP 2", "FSDP2 2", "data 2 × domain 2"], "domain 2"))
def test_every_layout_has_the_gradient_of_one_process(tmp_path, case) -> None:
    settings = ["data.forecast_len=3", "trainer.backprop_steps=2", f"save_loc={tmp_path}"]
    (found,) = [row for row in kit.verify(load_experiment(FILE, settings), [CASES[case]]) if row.name == case]
    assert found.ok, found
    assert {"loss", "gradients", "weights"} & found.errors.keys()
