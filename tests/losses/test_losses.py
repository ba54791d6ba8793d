"""Losses against plain NumPy in float64, and their gradients under masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from credit_like import registry
from credit_like.grid import Grid
from credit_like.losses._mean import AreaLoss
from credit_like.losses._trial import Shared, refuse_unshareable
from credit_like.nn.area import AreaMean
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
                        point = {
                            "mse": e * e,
                            "sum": e * e,  # by default of one term
                            "huber": e * e / 2 if abs(e) <= 1 else abs(e) - 0.5,
                            "log-cosh": np.log(np.cosh(e)),
                        }.get(kind, abs(e))  # a CRPS of one member is the absolute error
                        top, bottom = top + rows[i] * point, bottom + rows[i]
            total += weights[c] * top / bottom
    return total / sum(weights) / x.shape[0]


OF_ROWS = ("spectral", "spectral-crps", "energy")


@pytest.mark.parametrize("kind", [name for name in registry.names("loss") if name not in OF_ROWS])
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


def test_a_mask_is_held_as_a_mask_and_gives_the_bits_of_dense_weights(grid):
    """No number of a point is held that one number of its row and a bit say too."""
    valid = torch.from_numpy(np.random.default_rng(2).random((4, HEIGHT, WIDTH)) > 0.3)
    valid[1] = True
    valid[2, 3] = False
    weights = torch.from_numpy(grid.latitude_weights())[:, None] * valid
    area = AreaMean(weights)
    held = {name: buffer for name, buffer in area.named_buffers() if buffer.numel() >= valid.numel()}
    assert {buffer.dtype for buffer in held.values()} == {torch.bool}
    dense = weights / weights.sum((-2, -1), keepdim=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
    x[:, ~valid] = torch.nan
    for dtype in (torch.float32, torch.float64):
        expected = (torch.where(dense > 0, x.to(dtype), 0) * dense.to(dtype)).sum((-2, -1))
        assert torch.equal(area.part(x.to(dtype)), expected)
        halves = [
            AreaMean(weights, columns=part).part(x[..., part].to(dtype)) for part in (slice(0, 3), slice(3, None))
        ]
        torch.testing.assert_close(sum(halves), expected)
    # Weights that differ along a row are held as they are.
    any_weights = torch.rand(4, HEIGHT, WIDTH, generator=generator, dtype=torch.float64) * valid
    expected = (torch.where(valid, x, 0) * any_weights / any_weights.sum((-2, -1), keepdim=True)).sum((-2, -1))
    torch.testing.assert_close(AreaMean(any_weights).part(x), expected)


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


def test_a_variable_may_have_a_weight_for_each_level(variables, grid):
    valid = FakeStatistics(np.ones((4, HEIGHT, WIDTH), bool))
    config = registry.module("loss", "mse").Config(variable_weights={"u": [2.0, 3.0]}, level_weights={2: 5.0})
    assert AreaLoss(config, variables, valid, grid).channel_weights.tolist() == [2.0, 15.0, 1.0, 1.0]
    config = registry.module("loss", "mse").Config(variable_weights={"u": [2.0, 3.0, 4.0]})
    with pytest.raises(ValueError, match="expected a number or 2, one for each level, got 3"):
        AreaLoss(config, variables, valid, grid)


def test_members_are_refused_by_a_loss_that_is_not_of_ensembles(variables, grid):
    loss = AreaLoss(registry.module("loss", "mae").Config(), variables, FakeStatistics(np.ones((4, 6, 8), bool)), grid)
    with pytest.raises(ValueError, match="expected a loss of ensembles for several members, got mae"):
        loss(torch.zeros(4, 4, HEIGHT, WIDTH), torch.zeros(2, 4, HEIGHT, WIDTH))


def every_point(grid):
    return FakeStatistics(np.ones((4, HEIGHT, grid.width), bool))


@pytest.mark.parametrize("width", [WIDTH, WIDTH + 1])
@pytest.mark.parametrize("phase_weight", [1.0, 0.3])
def test_spectral_equals_the_definition_wave_by_wave(variables, width, phase_weight):
    grid = Grid(np.linspace(75, -75, HEIGHT), np.arange(width) * 360 / width)
    x, y = np.random.default_rng(0).normal(size=(2, 1, 4, HEIGHT, width)) * [[[[[3.0]]]], [[[[1.0]]]]] + 250
    config = registry.module("loss", "spectral").Config(phase_weight=phase_weight)
    loss = AreaLoss(config, variables, every_point(grid), grid).double()
    _, std, change = every_point(grid).select(variables.outputs)
    scales = [*change[:3], std[3]]
    longitude, expected = np.deg2rad(grid.longitude), 0.0
    for c in range(4):
        for i in range(HEIGHT):
            row = 0.0
            for k in range(-((width - 1) // 2), width // 2 + 1):  # every wave, of either sign
                p, t = (np.mean(f[0, c, i] / scales[c] * np.exp(-1j * k * longitude)) for f in (x, y))
                if k == 0:
                    row += abs(p - t) ** 2
                else:
                    turned = 1 - np.cos(np.angle(p) - np.angle(t))
                    p, t = abs(p), abs(t)
                    larger = (p**2 + t**2 + np.hypot(p**2 - t**2, 0.01 * (p**2 + t**2))) / 2
                    assert max(p, t) ** 2 <= larger <= 1.01 * max(p, t) ** 2
                    row += (p - t) ** 2 + phase_weight * 2 * larger * turned
            expected += grid.latitude_weights()[i] / grid.latitude_weights().sum() * row / 4
    assert float(loss(torch.tensor(x), torch.tensor(y))) == pytest.approx(expected, rel=1e-9)


def test_spectral_of_a_perfect_forecast_is_zero_and_of_a_smooth_one_more_than_of_a_shifted_one(variables, grid):
    """Under `mse`, a forecast without small waves beats one that has them in the wrong place; under `spectral` it does not."""
    angle = torch.deg2rad(torch.tensor(grid.longitude)).expand(1, 4, HEIGHT, WIDTH)
    truth, shifted, smooth = torch.sin(3 * angle), torch.sin(3 * angle + 0.6 * np.pi), torch.zeros_like(angle)
    values = {}
    for kind, options in (("mse", {}), ("spectral", {"phase_weight": 0.25})):
        config = registry.module("loss", kind).Config(**options)
        loss = AreaLoss(config, variables, every_point(grid), grid).double()
        assert float(loss(truth, truth)) == pytest.approx(0, abs=1e-24)
        values[kind] = float(loss(shifted, truth)), float(loss(smooth, truth))
    assert values["mse"][0] > values["mse"][1]
    assert values["spectral"][0] < values["spectral"][1]


def test_spectral_is_differentiable(variables):
    config = registry.module("loss", "spectral").Config()
    rowwise = registry.module("loss", "spectral").rowwise
    error, target = torch.randn(2, 1, 2, 2, WIDTH, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda e: rowwise(config, e, target), (error.requires_grad_(),))
    for target in (torch.zeros(1, 1, 1, WIDTH), torch.full((1, 1, 1, WIDTH), 1e-25), torch.full((1, 1, 1, WIDTH), 1e5)):
        nothing = torch.zeros(1, 1, 1, WIDTH, requires_grad=True)
        rowwise(config, nothing, target).sum().backward()
        assert bool(nothing.grad.isfinite().all())


def test_a_sum_is_the_sum_of_its_losses(variables, grid):
    x, y = torch.randn(2, 3, 4, HEIGHT, WIDTH, dtype=torch.float64)
    kinds, shared = {"mae": 2.0, "spectral": 0.5, "huber": 1.0}, {"scale": "state", "variable_weights": {"p": 3.0}}

    def value(kind, **options):
        return float(
            AreaLoss(registry.module("loss", kind).Config(**options), variables, every_point(grid), grid).double()(x, y)
        )

    terms = [{"weight": weight, "loss": {"type": kind}} for kind, weight in kinds.items()]
    expected = sum(weight * value(kind, **shared) for kind, weight in kinds.items())
    assert value("sum", terms=terms, **shared) == pytest.approx(expected, rel=1e-12)


SCORES = [
    {"weight": 2.0, "loss": {"type": "crps", "alpha": 0.9}},
    {
        "weight": 0.5,
        "loss": {"type": "sum", "terms": [{"loss": {"type": "spectral-crps"}}, {"loss": {"type": "energy"}}]},
    },
]


def test_a_sum_of_scores_of_ensembles_is_their_weighted_sum(variables, grid):
    """Values and gradients of three scores of four members, one of them in a sum within the sum."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2, 4, HEIGHT, WIDTH, dtype=torch.float64, generator=generator)
    x = torch.randn(8, 4, HEIGHT, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)

    def value(kind, **options):
        config = registry.module("loss", kind).Config(**options)
        return AreaLoss(config, variables, every_point(grid), grid).double()(x, target)

    expected = 2 * value("crps", alpha=0.9) + 0.5 * (value("spectral-crps") + value("energy"))
    found = value("sum", terms=SCORES)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    [gradient], [of_sum] = (torch.autograd.grad(each, x) for each in (expected, found))
    torch.testing.assert_close(of_sum, gradient, rtol=1e-12, atol=1e-15)


def test_what_all_terms_share_is_refused_in_one_of_them():
    config = registry.module("loss", "sum").Config
    with pytest.raises(ValueError, match="expected scale beside the terms"):
        config(terms=[{"loss": {"type": "mse", "scale": "state"}}])
    again = config(terms=[{"loss": {"type": "huber", "delta": 2}}])
    assert config.model_validate(again.model_dump(mode="json")) == again


@pytest.fixture
def half() -> np.ndarray:
    """Return a mask of four channels: rows with few, many and all points."""
    mask = np.zeros((4, HEIGHT, WIDTH), bool)
    for row in range(HEIGHT):
        mask[:, row, : row + 3] = True
    return mask


def test_the_energy_score_is_of_the_points_that_have_data(variables, grid, half):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 4, HEIGHT, WIDTH)), rng.normal(size=(1, 4, HEIGHT, WIDTH))
    loss = AreaLoss(registry.module("loss", "energy").Config(alpha=1.0), variables, FakeStatistics(half), grid).double()
    scale = loss.scale.numpy()

    def distance(a, b):
        return np.sqrt((((a - b) / scale) ** 2).mean(-1, where=half))

    rows = np.mean([distance(one, y[0]) for one in x], 0)
    rows -= sum(distance(x[j], x[k]) for j in range(3) for k in range(3)) / 12
    weights = grid.latitude_weights()[:, None] * half
    expected = ((rows[..., None] * weights).sum((1, 2)) / weights.sum((1, 2))).mean()
    assert float(loss(torch.from_numpy(x), torch.from_numpy(y))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", OF_ROWS)
def test_a_row_of_few_points_counts_as_much_as_one_of_many(variables, kind):
    """Errors of the same variance have the same loss, whatever share of the points has data."""
    wide = Grid(np.array([10.0, -10.0]), np.arange(128) * 360 / 128)
    noise = torch.randn(64, 2, 4, 2, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, y = noise[:, 0], noise[:, 1]
    values = []
    for share in (1.0, 0.5, 0.25):
        mask = np.zeros((4, 2, 128), bool)
        mask[..., : int(128 * share)] = True
        loss = AreaLoss(registry.module("loss", kind).Config(), variables, FakeStatistics(mask), wide).double()
        values.append(float(loss(x, y)))
    assert values == pytest.approx([values[0]] * 3, rel=0.08)


def test_spectral_of_a_variable_with_gaps_does_not_depend_on_its_mean(variables, grid, half):
    """Sea surface temperature has no data on land: 290 K at its points are not waves."""
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(2, 1, 4, HEIGHT, WIDTH)))
    loss = AreaLoss(registry.module("loss", "spectral").Config(), variables, FakeStatistics(half), grid).double()
    assert float(loss(x + 290, y + 290)) == pytest.approx(float(loss(x, y)), rel=1e-9)


@pytest.mark.parametrize("name", registry.names("loss"))
def test_every_loss_can_be_computed_in_parts(name):
    config = registry.module("loss", name).Config()
    everything = Shared(samples=True, rows=True, columns=True)
    refuse_unshareable(config, 3, (HEIGHT, WIDTH), 2, everything, torch.device("cpu"))
