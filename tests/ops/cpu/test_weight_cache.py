"""What is kept between forwards is what would be made anew, whoever changes the weights and however."""

from functools import partial

import pytest
import torch
from torch.func import functional_call

from credit_like.nn.attention import PositionBias
from credit_like.nn.conv import Conv2d
from credit_like.nn.cross_embed import CrossEmbed
from credit_like.nn.init import initialise
from credit_like.ops.cpu import policy, weight_cache


def counted(weights):
    calls = []

    def make():
        calls.append(1)
        return sum(weight.sum() for weight in weights) + 0

    return make, calls


def test_it_is_made_once_until_a_weight_or_the_key_changes():
    weights = [torch.ones(3, requires_grad=True), torch.ones(2, 2)]
    (make, calls), cached = counted(weights), partial(weight_cache.cached, torch.nn.Module())
    with torch.no_grad():
        assert cached(make, weights) == cached(make, weights) == 7
        assert len(calls) == 1
        weights[1].data[0, 0] = 5.0  # changes no version counter
        assert cached(make, weights) == 11
        assert cached(make, weights, key=2) == cached(make, weights, key=2) == 11
        assert len(calls) == 3
        doubled = [weight.double() for weight in weights]
        cached(make, doubled, key=2)
        assert len(calls) == 4
    assert cached(make, weights, key=2).requires_grad  # and nothing is kept while gradients are enabled
    with torch.no_grad():
        cached(make, weights, key=2)
    assert len(calls) == 6


def test_tensors_without_values_are_not_compared():
    weights = [torch.ones(3, device="meta")]
    (make, calls), cached = counted(weights), partial(weight_cache.cached, torch.nn.Module())
    with torch.no_grad():
        cached(make, weights)
        cached(make, weights)
    assert len(calls) == 2


LAYERS = {
    "bias": lambda normalised: PositionBias(16, 4, spectral_norm=normalised),
    "convolution": lambda normalised: Conv2d(3, 8, spectral_norm=normalised),
    "embedding": lambda normalised: CrossEmbed(3, 16, (2, 4, 16, 32), 2, spectral_norm=normalised),
}


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", list(LAYERS))
def test_a_layer_sees_every_change_of_its_weights(name, normalised, monkeypatch):
    from credit_like.nn import spectral_norm

    monkeypatch.setattr(policy, "by_fourier", lambda rows, columns, kernel, *_: kernel >= 16)
    monkeypatch.setattr(policy, "prefers_onednn", lambda x: False)
    monkeypatch.setattr(policy, "by_winograd", lambda *_, cached: (cached, True))
    generator = torch.Generator().manual_seed(0)
    layer = initialise(LAYERS[name](normalised), 0).eval()
    inputs = () if name == "bias" else (torch.randn(1, 48, 64, 3, generator=generator),)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    seen = []

    def check():
        with torch.no_grad():
            outcomes = [layer(*inputs), layer(*inputs)]
        anew = initialise(LAYERS[name](normalised), 1).eval()
        anew.load_state_dict(layer.state_dict())
        for module, other in zip(layer.modules(), anew.modules(), strict=True):
            if isinstance(module, spectral_norm.SpectralNorm):
                other.inv_sigma.copy_(module.inv_sigma)
        with torch.no_grad():
            expected = anew(*inputs)
        assert all(torch.equal(outcome, expected) for outcome in outcomes)
        assert not any(torch.equal(expected, other) for other in seen)
        seen.append(expected)

    check()
    layer.train()
    assert weight_cache.is_cached(layer)
    layer(*inputs).square().sum().backward()
    assert not weight_cache.is_cached(layer)  # training has no use for it
    optimizer.step()
    layer.eval()
    check()
    state = {key: 1.5 * value for key, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    check()
    with torch.no_grad():
        other = {key: value + 0.1 for key, value in layer.named_parameters()}
        swapped = functional_call(layer, other, inputs)
        assert not torch.equal(swapped, seen[-1])
        layer.load_state_dict(other, strict=False)
        check()
        assert torch.equal(swapped, seen[-1])
    layer.double()
    inputs = tuple(x.double() for x in inputs)
    with torch.no_grad():
        assert layer(*inputs).dtype == torch.float64
