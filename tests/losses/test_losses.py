"""Losses against plain NumPy in float64, and their gradients under masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from credit_like import registry
from credit_like.grid import Grid
from credit_like.losses._mean import AreaLoss
from credit_like.schema.data import DataSection
from credit_like.variables import Variables

HEIGHT, WIDTH = 6, 8


@dataclass
class FakeStatistics:
    """Known numbers per channel."""

    valid: np.ndarray

    def select(self, variables):
        n = sum(map(len, variables))
        return np.arange(n) + 1.0, np.arange(n) + 2.0, np.arange(n) * 0.5 + 0.25

    def mask(self, variables):
        return self.valid


@pytest.fixture
def variables() -> Variables:
    return Variables(
        DataSection.model_validate(
            {
                "source": {"type": "synthetic"},
                "timestep": "6h",
                "levels": [1, 2],
                "prognostic": {"level": ["u"], "surface": ["p"]},
                "diagnostic": {"surface": ["rain"]},
                "train": ["2000-01-01", "2000-02-01"],
                "valid": ["2000-03-01", "2000-03-02"],
                "test": ["2000-04-01", "2000-04-02"],
            }
        )
    )


@pytest.fixture
def grid() -> Grid:
    return Grid(np.linspace(75, -75, HEIGHT), np.arange(WIDTH) * 360 / WIDTH)


def reference(kind: str, x, y, grid, valid, scale, weights):
    """The loss as its docstring says it, loop by loop."""
    total = 0.0
    rows = grid.latitude_weights()
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            top = bottom = 0.0
            for i in range(HEIGHT):
                for j in range(WIDTH):
                    if valid[c, i, j]:
                        e = (x[b, c, i, j] - y[b, c, i, j]) / scale[c]
                        point = {"mse": e * e, "huber": e * e / 2 if abs(e) <= 1 else abs(e) - 0.5}.get(kind, abs(e))
                        top, bottom = top + rows[i] * point, bottom + rows[i]
            total += weights[c] * top / bottom
    return total / sum(weights) / x.shape[0]


@pytest.mark.parametrize("kind", registry.names("loss"))
@pytest.mark.parametrize("scale", ["change", "state"])
def test_equals_the_definition(kind, scale, variables, grid):
    rng = np.random.default_rng(0)
    valid = rng.random((4, HEIGHT, WIDTH)) > 0.2
    x, y = rng.normal(size=(2, 2, 4, HEIGHT, WIDTH)) * 3
    statistics = FakeStatistics(valid)
    config = registry.module("loss", kind).Config(scale=scale, variable_weights={"p": 3.0})
    loss = AreaLoss(config, variables, statistics, grid).double()
    _, std, change = statistics.select(variables.outputs)
    scales = [*(change if scale == "change" else std)[:3], std[3]]
    expected = reference(kind, x, y, grid, valid, scales, [1, 1, 3, 1])
    y[:, ~valid] = np.nan
    assert float(loss(torch.tensor(x), torch.tensor(y))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", registry.names("loss"))
def test_masked_points_have_no_gradient_and_no_nan(kind, variables, grid):
    valid = np.ones((4, HEIGHT, WIDTH), bool)
    valid[:, 0, 0] = False
    loss = AreaLoss(registry.module("loss", kind).Config(), variables, FakeStatistics(valid), grid)
    x = torch.randn(1, 4, HEIGHT, WIDTH, requires_grad=True)
    target = torch.randn(1, 4, HEIGHT, WIDTH)
    target[..., 0, 0] = torch.nan
    loss(x, target).backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert float(x.grad[..., 0, 0].abs().sum()) == 0
    assert float(x.grad[..., 1:, :].abs().min()) > 0


def test_parts_of_row_bands_add_up_to_the_whole(variables, grid):
    valid = np.random.default_rng(1).random((4, HEIGHT, WIDTH)) > 0.3
    config = registry.module("loss", "mse").Config()
    x, y = torch.randn(2, 3, 4, HEIGHT, WIDTH, dtype=torch.float64)
    whole = AreaLoss(config, variables, FakeStatistics(valid), grid).double()(x, y)
    bands = [slice(0, 1), slice(1, 4), slice(4, 6)]
    parts = [
        AreaLoss(config, variables, FakeStatistics(valid), grid, band).double()(x[..., band, :], y[..., band, :])
        for band in bands
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-13)


def test_a_misspelt_weight_is_named(variables, grid):
    config = registry.module("loss", "mse").Config(variable_weights={"rian": 1.0})
    with pytest.raises(ValueError, match="did you mean 'rain'"):
        AreaLoss(config, variables, FakeStatistics(np.ones((4, HEIGHT, WIDTH), bool)), grid)


def test_level_weights_multiply_those_of_the_variable(variables, grid):
    config = registry.module("loss", "mse").Config(variable_weights={"u": 2.0}, level_weights={2: 5.0})
    loss = AreaLoss(config, variables, FakeStatistics(np.ones((4, HEIGHT, WIDTH), bool)), grid)
    assert loss.channel_weights.tolist() == [2.0, 10.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"level_weights of predicted levels \(1, 2\), got 3"):
        AreaLoss(config.model_copy(update={"level_weights": {3: 1.0}}), variables, loss, grid)


def test_members_are_refused_by_a_loss_that_is_not_of_ensembles(variables, grid):
    loss = AreaLoss(registry.module("loss", "mae").Config(), variables, FakeStatistics(np.ones((4, 6, 8), bool)), grid)
    with pytest.raises(ValueError, match="expected a loss of ensembles for several members, got mae"):
        loss(torch.zeros(4, 4, HEIGHT, WIDTH), torch.zeros(2, 4, HEIGHT, WIDTH))
