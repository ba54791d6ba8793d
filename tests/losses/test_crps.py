"""The CRPS of members against brute force, against the closed form of a Gaussian, and its fairness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from credit_like.losses import crps
from credit_like.losses._mean import AreaLoss
from tests.losses.test_losses import HEIGHT, WIDTH, FakeStatistics, grid, variables  # noqa: F401


def brute_force(alpha: float, error_BKCHW: Tensor) -> Tensor:
    """Sum over all pairs, as the definition has it."""
    members = error_BKCHW.shape[1]
    skill = sum(error_BKCHW[:, k].abs() for k in range(members)) / members
    pairs = sum((error_BKCHW[:, j] - error_BKCHW[:, k]).abs() for j in range(members) for k in range(members) if j != k)
    if members == 1:
        return skill
    return skill - alpha * pairs / (2 * members * (members - 1)) - (1 - alpha) * pairs / (2 * members**2)


@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.95, 1.0])
def test_value_and_gradient_equal_brute_force(members, alpha):
    error = torch.randn(2, members, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(members))
    weight = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    results = []
    for score in (lambda e: crps.of_members(crps.Config(alpha=alpha), e), lambda e: brute_force(alpha, e)):
        e = error.clone().requires_grad_()
        value = score(e)
        (value * weight).sum().backward()
        results.append((value.detach(), e.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_the_shared_gradient_of_equal_members_is_that_of_the_absolute_error():
    error = torch.full((1, 4, 1, 1, 1), 0.7, dtype=torch.float64, requires_grad=True)
    score = crps.of_members(crps.Config(alpha=1.0), error)
    score.backward()
    assert score.item() == pytest.approx(0.7, rel=1e-15)
    assert error.grad is not None
    assert error.grad.flatten().tolist() == [0.25] * 4


def gaussian(mean: float, sigma: float, truth: float = 0.0) -> tuple[float, float]:
    """Return the expected CRPS of N(mean, σ²) for a truth from N(0, `truth`²), and its derivative with respect to the mean.

    Gneiting and Raftery (J. Am. Stat. Assoc. 102, 359, 2007), equation 21, in which the difference of forecast and truth is
    Gaussian too.
    """
    size = math.hypot(sigma, truth)
    z = -mean / size
    density, below = math.exp(-z * z / 2) / math.sqrt(2 * math.pi), (1 + math.erf(z / math.sqrt(2))) / 2
    return size * (z * (2 * below - 1) + 2 * density) - sigma / math.sqrt(math.pi), 1 - 2 * below


@pytest.mark.parametrize(("mean", "sigma"), [(0.0, 1.0), (0.8, 0.5), (-1.5, 2.0)])
def test_many_members_give_the_closed_form_of_a_gaussian(mean, sigma):
    """The members are the quantiles (k - 1/2)/K, whose CRPS is the distribution's up to O(1/K)."""
    members = 2000
    level = (torch.arange(members, dtype=torch.float64) + 0.5) / members
    quantiles = mean + sigma * torch.special.ndtri(level)
    error = quantiles[None, :, None, None, None].requires_grad_()
    score = crps.of_members(crps.Config(alpha=0.0), error)
    (slope,) = torch.autograd.grad(score.sum(), error)
    value, derivative = gaussian(mean, sigma)
    assert score.item() == pytest.approx(value, abs=2e-3 * sigma)
    assert slope.sum().item() == pytest.approx(derivative, abs=1e-3)


def test_the_expectation_of_the_fair_score_does_not_depend_on_the_number_of_members():
    """Ensembles of N(0.5, 0.8²) against truths of N(0, 0.6²), 250 000 draws for each K: the score, and its gradient.

    The standard error of each mean is below 1.2e-3, so a test at 4 standard errors misses a bias of 0.01 with a
    probability below 1e-5. The bias of α = 0 is (1 - α) σ / (√π K), 0.226 for K = 2, and of α = 0.95 0.0113, which the
    test must see.
    """
    expected, slope = gaussian(0.5, 0.8, 0.6)
    generator = torch.Generator().manual_seed(3)
    for members in (2, 3, 8):
        x, y = (torch.randn(250_000, n, 1, 1, 1, generator=generator, dtype=torch.float64) for n in (members, 1))
        error = (0.5 + 0.8 * x - 0.6 * y).requires_grad_()
        for alpha in (1.0, 0.95, 0.0):
            score = crps.of_members(crps.Config(alpha=alpha), error).flatten()
            (gradient,) = torch.autograd.grad(score.sum(), error)
            slopes, score = gradient.flatten(1).sum(1), score.detach()
            assert float(slopes.mean()) == pytest.approx(slope, abs=4 * float(slopes.std()) / math.sqrt(len(slopes)))
            deviation = float(score.std()) / math.sqrt(len(score))
            assert deviation < 1.2e-3
            bias = (1 - alpha) * 0.8 / (math.sqrt(math.pi) * members)
            assert float(score.mean()) == pytest.approx(expected + bias, abs=4 * deviation)
            if members == 2 and alpha < 1:
                assert float(score.mean()) > expected + 4 * deviation


def test_area_variables_and_missing_points_count_as_in_other_losses(variables, grid):  # noqa: F811
    rng = np.random.default_rng(0)
    valid = rng.random((4, HEIGHT, WIDTH)) > 0.2
    x, y = rng.normal(size=(2, 3, 4, HEIGHT, WIDTH)), rng.normal(size=(2, 4, HEIGHT, WIDTH))
    config = crps.Config(alpha=0.9, variable_weights={"p": 3.0}, level_weights={1: 2.0})
    loss = AreaLoss(config, variables, FakeStatistics(valid), grid).double()
    scale = np.array([0.25, 0.75, 1.25, 5.0])[:, None, None]
    point = brute_force(0.9, torch.tensor((x - y[:, None]) / scale)).numpy()
    weights = np.where(valid, grid.latitude_weights()[:, None], 0.0)
    channels = (point * weights).sum((-2, -1)) / weights.sum((-2, -1))
    y[:, ~valid] = np.nan
    found = loss(torch.tensor(x).flatten(0, 1), torch.tensor(y))
    assert float(found) == pytest.approx(float((channels * [2, 1, 3, 1]).sum(-1).mean() / 7), rel=1e-12)
