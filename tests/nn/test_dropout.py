"""Dropout: the distribution of its masks, their independence of the layout, and the blocks against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

from credit_like.models import wxformer
from credit_like.nn import init
from credit_like.nn.attention import LongAttention, ShortAttention
from credit_like.nn.dropout import Dropout, gain, mask, path_factors
from credit_like.nn.feed_forward import FeedForward
from credit_like.nn.place import WHOLE, Place
from credit_like.parallel.fsdp2 import _apply_activation_checkpointing, shard_units

HEIGHT, WIDTH = 32, 64
KEYS = torch.tensor([5, -7])
DROPS = {"attn_dropout": 0.2, "ff_dropout": 0.1, "drop_path": 0.4}


def model(**changes):
    config = wxformer.Config.model_validate(changes)
    blank = wxformer.build(config, in_channels=3, out_channels=2, frames=1, height=HEIGHT, width=WIDTH)
    return init.initialise(blank, 0).double()


def masked(rate, rows=(0, 50), columns=(0, 40), channels=range(100), keys=KEYS, site=3):
    shape = (rows[1] - rows[0], columns[1] - columns[0])
    kept = mask(keys, site, rate, shape, (Place(rows[0]), Place(columns[0], 40)), channels, torch.float64)
    return kept * gain(rate)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_masks_are_independent_and_have_mean_one(rate):
    """4 · 10^5 numbers: the tolerances are 5 standard errors of the mean, and of correlations between neighbours."""
    factors = masked(rate)
    assert set(factors.unique().tolist()) == {0.0, 65536 / (65536 - round(rate * 65536))}
    variance = rate / (1 - rate)
    assert float(factors.mean()) == pytest.approx(1, abs=5 * math.sqrt(variance / factors.numel()))
    pairs = [
        (factors[0], factors[1]),
        (factors[:, 1:], factors[:, :-1]),
        (factors[:, :, 1:], factors[:, :, :-1]),
        *((factors[..., shift:], factors[..., :-shift]) for shift in (1, 2, 3, 4)),
        (factors, masked(rate, site=4)),
    ]
    for one, other in pairs:
        assert abs(float(((one - 1) * (other - 1)).mean())) < 5 * variance / math.sqrt(one.numel())


def test_a_part_of_rows_columns_channels_or_samples_has_the_mask_of_the_whole():
    whole = masked(0.3)
    for channels in (range(100), range(50, 100), range(3, 9), range(6, 7)):
        part = masked(0.3, rows=(4, 9), columns=(7, 30), channels=channels, keys=KEYS[1:])
        assert torch.equal(part, whole[1:, 4:9, 7:30, channels.start : channels.stop])


def test_the_path_of_a_sample_depends_on_its_key_alone():
    keys = torch.arange(4000)
    factors = path_factors(keys, 7, 0.25, torch.float64) * gain(0.25)
    assert factors.shape == (4000, 1, 1, 1)
    assert torch.equal(path_factors(keys[10:20], 7, 0.25, torch.float64) * gain(0.25), factors[10:20])
    assert float(factors.mean()) == pytest.approx(1, abs=5 * math.sqrt(1 / 3 / 4000))


def windows_of(kind, height, width, size):
    """Yield the points of each window, in the order of its tokens."""
    down, right = height // size, width // size
    for y in range(down):
        for x in range(right):
            if kind is ShortAttention:
                yield [(y * size + a, x * size + b) for a in range(size) for b in range(size)]
            else:
                yield [(a * down + y, b * right + x) for a in range(size) for b in range(size)]


@pytest.mark.parametrize("kind", [ShortAttention, LongAttention])
@pytest.mark.parametrize("window", [1, 2])
def test_attention_drops_probabilities(kind, window):
    """Against loops over windows, heads and queries."""
    block = init.initialise(kind(8, window, dim_head=4, dropout=0.3, site=9), 0).double()
    x = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    tokens = window**2
    factors = mask(KEYS, 9, 0.3, (4, 6), WHOLE, range(2 * tokens), x.dtype) * gain(0.3)
    q, k, v = block.qkv(block.norm(x)).unflatten(-1, (2, 3, 4)).unbind(-2)
    bias = block.bias() if window > 1 else torch.zeros(1, 1)
    attended = torch.zeros(2, 4, 6, 2, 4, dtype=torch.float64)
    for sample in range(2):
        for points in windows_of(kind, 4, 6, window):
            rows, columns = zip(*points, strict=True)
            for head in range(2):
                keys, values = k[sample, rows, columns, head], v[sample, rows, columns, head]
                for i, (row, column) in enumerate(points):
                    chances = torch.softmax(keys @ q[sample, row, column, head] / 2 + bias[i], 0)
                    kept = factors[sample, row, column, head * tokens : (head + 1) * tokens]
                    attended[sample, row, column, head] = (chances * kept) @ values
    torch.testing.assert_close(block(x, KEYS), x + block.out(attended.flatten(-2)), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(block(x, KEYS), block(x), atol=1e-3)


def test_a_feed_forward_block_drops_hidden_values():
    block = init.initialise(FeedForward(8, dropout=0.3, site=9), 0).double()
    x = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    factors = mask(KEYS, 9, 0.3, (4, 6), WHOLE, range(32), x.dtype) * gain(0.3)
    hidden = torch.nn.functional.gelu(block.expand(block.norm(x)))
    torch.testing.assert_close(block(x, KEYS), x + block.contract(hidden * factors), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(block(x), init.initialise(FeedForward(8), 0).double()(x), rtol=0, atol=0)
    assert torch.equal(Dropout(0.3, 9)(hidden), hidden)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3])
def test_the_mean_does_not_change_in_bfloat16(rate):
    """1 / (1 - rate) is no number of bfloat16: rounded, it would be wrong by up to 0.4 % for every value that is kept."""
    keys, shape = torch.arange(8), (64, 64)
    x = 1 + torch.arange(8 * 64 * 64 * 16).reshape(8, *shape, 16) % 997 / 997
    kept = Dropout(rate, 3)(x.bfloat16(), keys).double()
    there = kept != 0
    assert float(kept[there].mean() / x.bfloat16().double()[there].mean()) == pytest.approx(1 / (1 - rate), rel=2e-4)


def test_values_are_dropped_in_training_alone():
    plain, dropping = model(), model(**DROPS)
    dropping.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 1, HEIGHT, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = plain(x)
        assert torch.equal(dropping(x), expected)
        for rate in DROPS:
            one = model(**{rate: DROPS[rate]})
            one.load_state_dict(plain.state_dict())
            assert float((one(x, key_B=KEYS) - expected).abs().max()) > 1e-3, rate
            assert torch.equal(one(x, key_B=KEYS), one(x, key_B=KEYS))
            assert torch.equal(one.eval()(x, key_B=KEYS), plain.eval()(x))


def test_stochastic_depth_skips_more_of_the_later_layers():
    network = model(drop_path=0.3, depth=(1, 2, 2, 1))
    layers = [layer for stage in network.stages for layer in stage.layers]
    assert [layer.drop_path for layer in layers] == pytest.approx([0, 0.06, 0.12, 0.18, 0.24, 0.3])
    keys = torch.arange(200)
    x = torch.randn(1, 2, 4, 64, dtype=torch.float64).expand(200, -1, -1, -1)
    with torch.no_grad():
        last = layers[-1]
        y = last._residual(0, last.short, x, keys)
        whole = last.short(x[:1]) - x[:1]
    skipped = (y == x).flatten(1).all(1)
    assert float(skipped.double().mean()) == pytest.approx(0.3, abs=5 * math.sqrt(0.3 * 0.7 / 200))
    torch.testing.assert_close((y - x)[~skipped], (whole / 0.7).expand(200, -1, -1, -1)[~skipped], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recomputed_and_compiled_layers_drop_the_same(compiled):
    def run(network):
        y = network(
            torch.linspace(-1, 1, 2 * 3 * HEIGHT * WIDTH, dtype=torch.float64).view(2, 3, 1, HEIGHT, WIDTH), KEYS
        )
        y.square().mean().backward()
        return y.detach(), torch.cat([p.grad.flatten() for p in network.parameters()])

    expected = run(model(**DROPS))
    network = model(**DROPS)
    _apply_activation_checkpointing(network)
    if compiled:
        for unit in list(shard_units(network))[:2]:
            unit.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    for got, wanted in zip(run(network), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-13)
