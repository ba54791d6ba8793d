"""The stepper against its formulas in float64, with a model whose output is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from credit_like.errors import UserError
from credit_like.schema.data import DataSection
from credit_like.state import Sample
from credit_like.stepper import Stepper
from credit_like.variables import Variables

HEIGHT, WIDTH = 4, 6


class Recorder(nn.Module):
    """A fixed 1 × 1 linear map of the newest frame that remembers what it was given."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(out_channels, in_channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            * 0.1
        )
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        self.seen.append(x.detach())
        return torch.einsum("oc,bchw->bohw", self.weight, x[:, :, -1])[:, :, None]


@dataclass
class FakeStatistics:
    valid: np.ndarray
    numbers: ClassVar = {
        "u": (1.0, 2.0, 0.5),
        "p": (1e3, 10.0, 3.0),
        "rain": (0.125, 0.25, 0.25),
        "sst": (280.0, 10.0, 1.0),
        "z": (500.0, 100.0, 1.0),
    }

    def select(self, variables):
        rows = [self.numbers[v.name] for v in variables for _ in v.channels]
        return tuple(np.array([r[i] for r in rows]) for i in range(3))

    def mask(self, variables):
        return self.valid


@pytest.fixture
def variables() -> Variables:
    return Variables(
        DataSection.model_validate(
            {
                "source": {"type": "synthetic"},
                "timestep": "6h",
                "prognostic": {"surface": ["u", "p"]},
                "diagnostic": {"surface": ["rain"]},
                "dynamic_forcing": {"surface": ["sst"]},
                "static": {"surface": ["z"]},
                "history_len": 2,
                "train": ["2000-01-01", "2000-02-01"],
                "valid": ["2000-03-01", "2000-03-02"],
                "test": ["2000-04-01", "2000-04-02"],
            }
        )
    )


def make(variables, predict, valid=None, physics=()):
    valid = np.ones((3, HEIGHT, WIDTH), bool) if valid is None else valid
    static = np.random.default_rng(3).normal(500, 100, (1, HEIGHT, WIDTH)).astype(np.float32)
    model = Recorder(variables.in_channels, variables.out_channels)
    return Stepper(model, variables, FakeStatistics(valid), static, predict, physics).double(), static


def sample(leads=3) -> Sample:
    rng = np.random.default_rng(1)
    prognostic = np.stack([rng.normal(1, 2, (2, 2, HEIGHT, WIDTH)), rng.normal(1e3, 10, (2, 2, HEIGHT, WIDTH))], 1)
    forcing = rng.normal(280, 10, (2, 1, 2 + leads - 1, HEIGHT, WIDTH))
    target = rng.normal(0, 1, (2, 3, leads, HEIGHT, WIDTH))
    return Sample(*map(torch.tensor, (prognostic, forcing, target)), torch.tensor([4, 9]))


@pytest.mark.parametrize("predict", ["increment", "state"])
def test_rollout_equals_the_formulas(variables, predict):
    stepper, static = make(variables, predict)
    s = sample()
    predictions = [p.detach().numpy() for p, _ in stepper.predict_sample(s)]
    weight = stepper.model.weight.detach().numpy()
    frames = [s.prognostic[:, :, 0].numpy(), s.prognostic[:, :, 1].numpy()]
    mean, std, change = np.array([1.0, 1e3]), np.array([2.0, 10.0]), np.array([0.5, 3.0])
    z = np.broadcast_to((static - 500) / 100, (2, 1, HEIGHT, WIDTH))
    for lead in range(3):
        f = (s.forcing[:, :, lead + 1].numpy() - 280) / 10
        x = np.concatenate([(frames[-1] - mean[:, None, None]) / std[:, None, None], z, f], 1)
        y = np.einsum("oc,bchw->bohw", weight, x)
        if predict == "increment":
            after = frames[-1] + change[:, None, None] * y[:, :2]
        else:
            after = mean[:, None, None] + std[:, None, None] * y[:, :2]
        rain = 0.125 + 0.25 * y[:, 2:]
        np.testing.assert_allclose(predictions[lead], np.concatenate([after, rain], 1), rtol=1e-12)
        older = stepper.model.seen[lead][:, :2, 0].numpy()
        np.testing.assert_allclose(older, (frames[-2] - mean[:, None, None]) / std[:, None, None], rtol=1e-12)
        frames.append(after)


def test_gradients_flow_through_the_whole_rollout(variables):
    stepper, _ = make(variables, "increment")
    s = sample()
    *_, (last, _) = stepper.predict_sample(s)
    (through,) = torch.autograd.grad(last.sum(), stepper.model.weight)
    state = stepper.initial(s.prognostic, s.index)
    with torch.no_grad():
        *_, before = stepper.rollout(state, s.forcing, 2)
    (one_step,) = torch.autograd.grad(stepper.outputs(stepper(before, s.forcing[:, :, 2:])).sum(), stepper.model.weight)
    assert not torch.allclose(through, one_step, rtol=1e-3)
    eps = 1e-4
    with torch.no_grad():
        direction = torch.randn(
            stepper.model.weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
        )
        sums = []
        for sign in (1, -1):
            stepper.model.weight += sign * eps * direction
            *_, (shifted, _) = stepper.predict_sample(s)
            sums.append(float(shifted.sum()))
            stepper.model.weight -= sign * eps * direction
    assert (sums[0] - sums[1]) / (2 * eps) == pytest.approx(float((through * direction).sum()), rel=1e-6)


def test_a_turned_globe_is_turned_back(variables):
    stepper, _ = make(variables, "increment")
    plain = [p for p, _ in stepper.predict_sample(sample())]
    stepper.shift = 3
    turned = [p for p, _ in stepper.predict_sample(sample())]
    for one, other in zip(plain, turned, strict=True):  # this model does not know where it is
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    leads = len(plain)
    for straight, rolled in zip(stepper.model.seen[:leads], stepper.model.seen[leads:], strict=True):
        torch.testing.assert_close(rolled, straight.roll(3, -1), rtol=1e-12, atol=1e-12)
        assert not torch.equal(rolled, straight)


def test_points_without_data_hold_the_mean_and_come_back_as_nan(variables):
    valid = np.ones((3, HEIGHT, WIDTH), bool)
    valid[:, 1, 2] = False
    stepper, _ = make(variables, "increment", valid)
    s = sample()
    s.prognostic[..., 1, 2] = torch.nan
    for after in stepper.rollout(stepper.initial(s.prognostic, s.index), s.forcing, 3):
        out = stepper.outputs(after)
        assert bool(out.isfinite().all())
        np.testing.assert_array_equal(out[:, :, 1, 2].detach().numpy(), np.tile([1.0, 1e3, 0.125], (2, 1)))
        assert bool(stepper.masked(out)[..., 1, 2].isnan().all())
        assert int(stepper.masked(out).isnan().sum()) == 6
    assert all(bool(x[:, :2, :, 1, 2].abs().max() == 0) for x in stepper.model.seen)


def test_the_index_follows_the_time(variables):
    stepper, _ = make(variables, "state")
    s = sample()
    states = list(stepper.rollout(stepper.initial(s.prognostic, s.index), s.forcing, 3))
    assert states[-1].index.tolist() == [7, 12]


@pytest.mark.parametrize("recomputes", [False, True])
def test_physics_that_writes_to_the_state_or_the_forcing_before_is_refused(variables, recomputes):
    """Later corrections, and the next step of a model with a history, would have others."""

    class Change(nn.Module):
        def forward(self, after, before):
            before -= after[:, : before.shape[1]]
            return 1 * after

    class ChangeForcing(nn.Module):
        needs_forcing = True

        def forward(self, after, before, forcing):
            return after + 0 * forcing.clamp_(min=0).sum()

    class Careful(nn.Module):
        needs_forcing = True

        def forward(self, after, before, forcing):
            return after.clamp_(min=0) - 0 * (before.clone().mul_(2).sum() + forcing.clone().mul_(2).sum())

    given = sample(leads=1)
    for change in (Change(), ChangeForcing()):
        stepper, _ = make(variables, "increment", physics=[change])
        stepper.recomputes = recomputes
        with pytest.raises(
            UserError,
            match=rf"physics: expected corrections that leave the state .*{type(change).__name__} of .*test_stepper",
        ):
            list(stepper.predict_sample(given))
    careful, _ = make(variables, "increment", physics=[Careful()])
    assert len(list(careful.predict_sample(given))) == 1


def test_physics_sees_the_output_and_the_state_before(variables):
    class Halve(nn.Module):
        def forward(self, after, before):
            return torch.cat([(after[:, :2] + before) / 2, after[:, 2:]], 1)

    plain, _ = make(variables, "increment")
    fixed, _ = make(variables, "increment", physics=[Halve()])
    s = sample()
    (free, _), (held, _) = next(plain.predict_sample(s)), next(fixed.predict_sample(s))
    expected = (free[:, :2] + s.prognostic[:, :, -1]) / 2
    torch.testing.assert_close(held[:, :2], expected, rtol=1e-13, atol=0)
