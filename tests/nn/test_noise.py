"""Noise: SplitMix64's published numbers, its distribution, independence of layout, and layers that start as the identity."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from credit_like.models import wxformer
from credit_like.models.wxformer import model as wxformer_model
from credit_like.nn import init, noise
from credit_like.nn.feed_forward import FeedForward
from credit_like.nn.noise import (
    GAMMA,
    Noise,
    NoiseKeys,
    NormNoise,
    absorb,
    innovation_weights,
    innovations,
    mix,
    standard_normal,
)
from credit_like.nn.place import Place
from credit_like.ops.cpu import policy

HEIGHT, WIDTH = 32, 64
KEYS = torch.tensor([5, -7])
IN_NORMS = {"noise": {"type": "conditional-norm", "channels": 5, "correlation": 0.5}}


def model(**changes):
    config = wxformer.Config.model_validate({"noise": {"channels": 5}, **changes})
    blank = wxformer.build(config, in_channels=3, out_channels=2, frames=1, height=HEIGHT, width=WIDTH)
    return init.initialise(blank, 0)


def stirred(model):
    """Give every layer of noise weights other than 0."""
    for name, parameter in model.named_parameters():
        if "noise." in name:
            generator = torch.Generator().manual_seed(len(name) + parameter.numel())
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def test_hashes_are_those_of_splitmix64():
    """The first numbers of SplitMix64 from the seed 1234567, as its reference implementation gives them."""
    counter = torch.tensor([1234567]) + torch.arange(1, 6) * GAMMA
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [value % 2**64 for value in mix(counter).tolist()] == expected


def test_numbers_are_independent_and_normal():
    """4 · 10^5 numbers: the tolerances are 5 standard errors of each moment, and of correlations between neighbours."""
    z = standard_normal(KEYS, (50, 40), 100, torch.float64)
    count = z.numel()
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert float((z**power).mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / count))
    pairs = [
        (z[0], z[1]),  # samples
        (z[:, 1:], z[:, :-1]),  # rows
        (z[:, :, 1:], z[:, :, :-1]),  # columns
        (z[..., 1:], z[..., :-1]),  # channels
        (z[..., :50], z[..., 50:]),  # cosine and sine of one angle
        (z[..., :50] ** 2 - 1, z[..., 50:] ** 2 - 1),
    ]
    pairs += [(z[:1], standard_normal(absorb(KEYS[:1], level), (50, 40), 100, torch.float64)) for level in range(3)]
    pairs += [(z[:1], standard_normal(NoiseKeys.after(KEYS[:1]), (50, 40), 100, torch.float64))]
    for one, other in pairs:
        size = float(one.pow(2).mean() * other.pow(2).mean()) ** 0.5
        assert abs(float((one * other).mean())) < 5 * size / math.sqrt(one.numel())


def test_extreme_bits_give_finite_numbers(monkeypatch):
    for bits in (0, -1, 0xFFFFFFFF, -(1 << 32)):
        monkeypatch.setattr(noise, "mix", lambda x, bits=bits: torch.full_like(x, bits))
        assert bool(standard_normal(KEYS, (2, 2), 3, torch.float32).isfinite().all())


def test_rows_samples_and_channels_do_not_depend_on_what_else_is_computed():
    whole = standard_normal(KEYS, (9, 6), 4, torch.float32)
    band = standard_normal(KEYS[1:], (4, 6), 4, torch.float32, (Place(3, 9), Place()))
    assert torch.equal(band, whole[1:, 3:7])
    box = standard_normal(KEYS[1:], (4, 3), 4, torch.float32, (Place(3, 9), Place(2, 6)))
    assert torch.equal(box, whole[1:, 3:7, 2:5])


def test_keys_are_a_function_of_seed_member_time_and_lead():
    seconds = np.arange(20, dtype=np.int64) * 21600
    keys, later = NoiseKeys(seconds, 3), NoiseKeys(seconds[4:], 3)
    member, index = torch.meshgrid(torch.arange(8), torch.arange(4, 20), indexing="ij")
    first = keys(index.flatten(), member.flatten())
    assert torch.equal(later(index.flatten() - 4, member.flatten()), first)  # times count, not positions
    leads = torch.stack([first, NoiseKeys.after(first), NoiseKeys.after(NoiseKeys.after(first))])
    keys.reseed("step", 1)
    every = torch.cat([leads.flatten(), keys(index.flatten(), member.flatten())])
    keys.reseed()
    assert torch.equal(keys(index.flatten(), member.flatten()), first)
    assert len(every.unique()) == every.numel()


@pytest.mark.parametrize(
    "changes", [{}, {"upsample": "transpose", "interp": False, "use_spectral_norm": True}, IN_NORMS]
)
def test_weights_of_a_model_without_noise_give_the_same_forecast(changes):
    plain, noisy = model(**{**changes, "noise": None}).eval(), model(**changes).eval()
    missing = noisy.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys
    layers = [f"stages.{stage}.layers.0.{block}" for stage in range(4) for block in ("short_ff", "long_ff")]
    added = (
        [f"{layer}.noise.weight" for layer in layers] if "noise" in changes else [f"noise.{i}.weight" for i in range(4)]
    )
    assert missing.missing_keys == added
    x = torch.randn(2, 3, 1, HEIGHT, WIDTH)
    with torch.no_grad():
        # Blocks with noise in their norms have no fused kernel, so rounding differs.
        tolerance = 1e-5 if "noise" in changes else 0
        torch.testing.assert_close(noisy(x, key_B=KEYS), plain(x), rtol=tolerance, atol=tolerance)
        assert torch.equal(noisy(x), plain(x))
        stirred(noisy)
        assert torch.equal(noisy(x), plain(x))
        spread = (noisy(x, key_B=KEYS) - plain(x)).flatten(1).std(1)
        assert float(spread.min()) > 1e-3


def test_a_scale_of_zero_leaves_out_its_resolution():
    some = model(noise={"channels": 2, "scales": [0, 1, 0, 0.5]})
    assert [n for n, _ in some.named_parameters() if n.startswith("noise")] == ["noise.1.weight", "noise.3.weight"]
    some = model(noise={"type": "conditional-norm", "scales": [0, 1, 0, 0]})
    names = [n for n, _ in some.named_parameters() if "noise" in n]
    assert names == [f"stages.1.layers.0.{block}.noise.weight" for block in ("short_ff", "long_ff")]
    with pytest.raises(ValueError, match=r"expected a scale above 0, got 0 at every resolution"):
        wxformer.Config.model_validate({"noise": {"scales": [0, 0, 0, 0]}})


def test_a_layer_equals_its_formula_and_its_gradient_is_exact():
    layer = Noise(3, 4, 0.5, level=2).double()
    layer.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    z = 0.5 * standard_normal(absorb(KEYS, 2), (4, 5), 4, torch.float64)
    a, b = layer.weight[:3], layer.weight[3:]
    expected = x * (1 + torch.einsum("bhwn,cn->bhwc", z, a)) + torch.einsum("bhwn,cn->bhwc", z, b)
    torch.testing.assert_close(layer(x, KEYS[:, None]), expected, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(layer, {"weight": w}, (x, KEYS[:, None])), (x, layer.weight)
    )


def test_a_block_modulates_its_norm():
    """x + mlp(norm(x) · (1 + z A) + z B) with z of the level of the block, from the keys of this step and those before."""
    conf = {**IN_NORMS["noise"], "scales": [0.5, 1, 1, 1]}
    block = stirred(model(noise=conf)).double().stages[0].layers[0].long_ff
    x = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    weights = innovation_weights(0.5)
    keys = innovations(KEYS, len(weights))
    z = 0.5 * sum(w * standard_normal(absorb(keys[:, j], 9), (4, 6), 5, x.dtype) for j, w in enumerate(weights))
    a, b = block.noise.weight.chunk(2)
    normed = block.norm(x) * (1 + z @ a.T) + z @ b.T
    expected = x + block.contract(torch.nn.functional.gelu(block.expand(normed)))
    torch.testing.assert_close(block(x, noise_BJ=keys), expected, rtol=1e-13, atol=1e-13)


def _gradients(layer, *arguments, **keys):
    layer.zero_grad()
    y = layer(*arguments, **keys)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dim", [8, policy.SAVE_FROM])
def test_a_block_computes_again_what_it_has_not_kept(dim):
    """All but the input, or of many channels all but the input and the expanded values; the plain form keeps everything."""
    block = FeedForward(dim, noise=NormNoise(dim, 3, 1.0, level=8), dropout=0.1).double()
    block.noise.weight.data.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 4, 6, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = _gradients(block, x, KEYS, KEYS[:, None])
    of_input, x.grad = x.grad, None
    with policy.disabled():
        expected = _gradients(block, x, KEYS, KEYS[:, None])
    assert len(found) == 8
    for one, other in zip([*found, of_input], [*expected, x.grad], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_model_computes_again_what_its_blocks_have_not_kept():
    noisy = stirred(model(**IN_NORMS, use_spectral_norm=True)).double()
    x = torch.randn(2, 3, 1, HEIGHT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = _gradients(noisy, x, key_B=KEYS)
    with policy.disabled():
        expected = _gradients(noisy, x, key_B=KEYS)
    assert len(found) == len(expected) == 1 + len(list(noisy.parameters()))
    whole = torch.cat([x.flatten() for x in expected[1:]]).norm()
    for one, other in zip(found, expected, strict=True):  # some gradients are 0 but for rounding
        assert float((one - other).norm() / other.norm().clamp(min=1e-4 * whole)) < 1e-11


@pytest.mark.parametrize("frozen", [False, True])
def test_the_decoder_recomputes_its_noisy_inputs(monkeypatch, frozen):
    """The gradients are bitwise those with all inputs saved, and the noise is recomputed once for both of its uses."""
    noisy, made = stirred(model()).double(), []
    numbers = Noise.numbers
    monkeypatch.setattr(Noise, "numbers", lambda self, *more: made.append(self) or numbers(self, *more))
    for name, parameter in noisy.named_parameters():
        parameter.requires_grad_(not frozen or name.startswith("noise."))
    x = torch.randn(2, 3, 1, HEIGHT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = _gradients(noisy, x, key_B=KEYS)
    layers = list(noisy.noise.values())
    assert made == [*layers, *reversed(layers)]
    monkeypatch.setattr(wxformer_model, "recomputing", lambda y: nullcontext())
    for one, other in zip(found, _gradients(noisy, x, key_B=KEYS), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_correlated_noise_is_autoregressive(correlation):
    """Unit variance at every lead, and between leads k apart ρ^k, less the terms that a sum of n innovations leaves out.

    Of n terms ρ^k (1 - ρ^(2 (n - k))) / (1 - ρ^(2 n)) is left. The tolerance is 5 standard errors, which are at most √(2 / n)
    for a moment of n numbers.
    """
    layer = Noise(2, 4, 1.0, level=1, correlation=correlation)
    x, keys, fields = torch.zeros(2, 50, 100, 2), KEYS, []
    for _ in range(5):
        fields.append(layer.numbers(x, innovations(keys, len(layer.weights)), x.dtype))
        keys = NoiseKeys.after(keys)
    count, error = len(layer.weights), 5 * math.sqrt(2 / fields[0].numel())
    for first in range(5):
        for second in range(first, 5):
            apart, left_out = second - first, correlation ** (2 * count)
            kept = 1 - left_out / correlation ** (2 * apart) if correlation and apart < count else 0
            expected = 1 if not apart else correlation**apart * kept / (1 - left_out)
            moment = float((fields[first] * fields[second]).mean())
            assert moment == pytest.approx(expected, abs=error)
            assert expected == pytest.approx(correlation**apart, abs=0.1)
    assert sum(weight**2 for weight in layer.weights) == pytest.approx(1)


def test_correlated_noise_needs_nothing_but_the_key_of_its_lead():
    """A forecast that goes on from its third lead has the noise of one without a break, in other batches and on bands."""
    layer = Noise(2, 3, 1.0, level=0, correlation=0.8)
    layer.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 6, 4, 2, generator=torch.Generator().manual_seed(1))
    keys = NoiseKeys.after(NoiseKeys.after(KEYS))
    whole = layer(x, innovations(keys, len(layer.weights)))
    stored = torch.tensor(keys.tolist()[1:])
    layer.places = (Place(2, 6), Place())
    band = layer(x[1:, 2:5], innovations(stored, len(layer.weights)))
    assert torch.equal(band, whole[1:, 2:5])
