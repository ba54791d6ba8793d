"""The energy score of rows against brute force and against the closed form of two Gaussians."""

from __future__ import annotations

import pytest
import torch

from credit_like.losses import energy


def brute_force(alpha, error_BKCHW):
    """The definition, pair by pair, with torch's own gradient of the norm."""
    members = error_BKCHW.shape[1]
    skill = sum(_size(error_BKCHW[:, k]) for k in range(members)) / members
    pairs = sum(_size(error_BKCHW[:, j] - error_BKCHW[:, k]) for j in range(members) for k in range(members) if j != k)
    if members == 1:
        return skill
    return skill - alpha * pairs / (2 * members * (members - 1)) - (1 - alpha) * pairs / (2 * members**2)


def _size(difference):
    return torch.linalg.vector_norm(difference, dim=-1) / difference.shape[-1] ** 0.5


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.95, 1.0])
def test_value_and_gradient_equal_brute_force(members, alpha):
    error = torch.randn(2, members, 3, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(members))
    weight = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    config, results = energy.Config(alpha=alpha), []
    for score in (lambda e: energy.of_members(config, e).mean(-1), lambda e: brute_force(alpha, e)):
        e = error.clone().requires_grad_()
        value = score(e)
        (value * weight).sum().backward()
        results.append((value.detach(), e.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_two_gaussians_in_two_dimensions(spread):
    """Members N(0, s²) and truths N(0, 1) at two points: E|X - Y| = √(π/2) √(1 + s²), E|X - X'| = √π s (Rayleigh)."""
    draw = torch.Generator().manual_seed(3)
    rows, members = 40000, 4
    truth = torch.randn(1, 1, 1, rows, 2, dtype=torch.float64, generator=draw)
    x = spread * torch.randn(1, members, 1, rows, 2, dtype=torch.float64, generator=draw)
    score = energy.of_members(energy.Config(alpha=1.0), x - truth).mean(-1).flatten()
    pi = torch.pi
    expected = ((pi / 2 * (1 + spread**2)) ** 0.5 - pi**0.5 * spread / 2) / 2**0.5
    assert abs(float(score.mean()) - expected) < 4 * float(score.std()) / rows**0.5


def test_equal_members_have_a_gradient():
    error = torch.ones(1, 3, 1, 1, 4, requires_grad=True)
    energy.of_members(energy.Config(), error).mean().backward()
    assert torch.equal(error.grad, torch.full_like(error, 1 / 12))
    perfect = torch.zeros(1, 3, 1, 1, 4, requires_grad=True)
    energy.of_members(energy.Config(), perfect).mean().backward()
    assert not perfect.grad.any()
