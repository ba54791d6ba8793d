"""The blocks as single functions equal their plain composition, whether they save their widest values or recompute them."""

import pytest
import torch
from torch.nn import functional

from credit_like import ops
from credit_like.nn.attention import LongAttention, ShortAttention
from credit_like.nn.feed_forward import FeedForward
from credit_like.nn.init import initialise
from credit_like.nn.norms import GroupNorm
from credit_like.ops.cpu import blocks as kernels
from credit_like.ops.cpu import direct, policy
from tests.ops.agreement import assert_same_function


def blocks(**options):
    return {
        "feed-forward": FeedForward(16, **options),
        "short": ShortAttention(16, 2, dim_head=8, **options),
        "long": LongAttention(16, 3, dim_head=8, **options),
    }


def outcome(block, x, cotangent):
    """Output, and gradients of the input and of every parameter."""
    x = x.clone().requires_grad_()
    y = block(x)
    return [y, *torch.autograd.grad((y * cotangent).sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("portion", [64 * 5, 64 * 17, 2**19])
@pytest.mark.parametrize("name", list(blocks()))
def test_a_block_equals_its_plain_composition(name, portion, keep, normalised, monkeypatch):
    block = initialise(blocks(spectral_norm=normalised)[name], 0).double()
    x, cotangent = torch.randn(2, 2, 6, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with policy.disabled():
        expected = outcome(block, x, cotangent)
    monkeypatch.setattr(kernels, "PORTION", portion)
    monkeypatch.setattr(kernels, "FEWEST", 1)
    monkeypatch.setattr(kernels, "BAND", portion)
    monkeypatch.setattr(policy, "SAVE_FROM", 16 if keep else 17)
    assert policy.applies(x)
    assert policy.saves_activations(x) == keep
    for a, b in zip(outcome(block, x, cotangent), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert not policy.saves_activations(x)
        torch.testing.assert_close(block(x), expected[0], rtol=1e-11, atol=1e-12)


def saved(block, x):
    """Values that a forward saves for backward besides its input and the weights."""
    known = {t.untyped_storage().data_ptr() for t in (x, *block.parameters())}
    kept = block(x).grad_fn.saved_tensors
    return sum(t.numel() for t in kept if t is not None and t.untyped_storage().data_ptr() not in known)


def test_what_is_recomputed_is_not_saved(monkeypatch):
    x = torch.randn(1, 24, 24, 16, requires_grad=True)
    for name, wide in (("feed-forward", 4), ("short", 3)):
        block = initialise(blocks()[name], 0)
        counts = []
        for threshold in (16, 17):
            monkeypatch.setattr(policy, "SAVE_FROM", threshold)
            counts.append(saved(block, x))
        assert counts[0] >= wide * x.numel()
        assert counts[1] < x.numel()


def test_nothing_is_recomputed_twice_under_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    block = initialise(FeedForward(16), 0)
    x = torch.randn(1, 4, 4, 16, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    asked = []
    whole = block.forward

    def watched(x):
        asked.append(policy.saves_activations(x))
        return whole(x)

    block.forward = watched
    got = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), [x, *block.parameters()])
    assert asked == [True, True]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not policy.saves_activations(x)


def test_recomputing_in_the_block_saves_no_more_than_its_weights(monkeypatch):
    monkeypatch.setattr(policy, "SAVE_FROM", 1)
    few, many = torch.randn(1, 4, 8, 16, requires_grad=True), torch.randn(1, 6, 8, 16, requires_grad=True)
    with ops.recompute_in_block():
        assert policy.saves_activations(few)
        assert not policy.saves_activations(many)
        assert saved(initialise(blocks()["feed-forward"], 0), many) == 0
    assert policy.saves_activations(many)


@pytest.mark.parametrize("groups", [1, 4])
def test_norm_and_activation_equal_the_library_s(groups):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    x, weight, bias = random(2, 5, 6, 12), random(12), random(12)
    norm = GroupNorm(groups, 12).double()
    norm.weight, norm.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
    weight, bias = norm.weight, norm.bias
    expected = functional.silu(functional.group_norm(x.permute(0, 3, 1, 2), groups, weight, bias, 1e-5))
    assert ops.uses_fused_kernel(x, norm)
    y = ops.norm_silu(x, norm)
    assert_same_function(y, expected.permute(0, 2, 3, 1), [x, weight, bias], generator, 1e-11)


@pytest.mark.parametrize(("kernel", "stride", "outputs"), [(3, 1, 5), (4, 2, 5), (3, 1, 400), (2, 2, 400)])
def test_a_convolution_equals_the_library_s(kernel, stride, outputs):
    """Few outputs, and more outputs than points."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 14, 3, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(outputs, 3, kernel, kernel, dtype=torch.float64, generator=generator).requires_grad_()
    bias = torch.randn(outputs, dtype=torch.float64, generator=generator).requires_grad_()
    pads = (1, kernel - stride - 1) if kernel > stride else (0, 0)
    padded = functional.pad(x, (0, 0, *pads, *pads)).permute(0, 3, 1, 2)
    expected = functional.conv2d(padded, weight, bias, stride=stride).permute(0, 2, 3, 1)
    y = direct.conv(x, weight, bias, stride, pads, pads)
    assert_same_function(y, expected, [x, weight, bias], generator, 1e-11)


@pytest.mark.parametrize("factor", [2, 3])
def test_a_pixel_shuffle_equals_the_library_s(factor):
    x = torch.randn(2, 3, 4, 5 * factor**2, dtype=torch.float64, requires_grad=True)
    expected = functional.pixel_shuffle(x.permute(0, 3, 1, 2), factor).permute(0, 2, 3, 1)
    y = ops.pixel_shuffle(x, factor)
    cotangent = torch.randn_like(expected)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad((z * cotangent).sum(), x)[0] for z in (y, expected)))
