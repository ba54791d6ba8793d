"""LoRA: the applied weight, fused kernels, merging, and what is refused."""

from __future__ import annotations

import pytest
import torch

from credit_like.errors import UserError
from credit_like.models import wxformer
from credit_like.nn import init, spectral_norm
from credit_like.nn.lora import add_lora, merged

HEIGHT, WIDTH = 32, 64
ALL = ("*.qkv", "*.out", "*.expand", "*.contract")


def model(rank=0, match=ALL, scale=1.0, normalised=False):
    config = wxformer.Config(use_spectral_norm=normalised)
    blank = wxformer.build(config, in_channels=3, out_channels=2, frames=1, height=HEIGHT, width=WIDTH)
    if rank:
        add_lora(blank, rank, match, scale)
    init.initialise(blank, 0)
    for _ in range(20):
        for kind, members in spectral_norm._by_class(blank):
            kind.iterate_all(members)
    return blank


def stirred(network):
    for name, parameter in network.named_parameters():
        if name.endswith("lora.up"):
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return network


FIELD = torch.linspace(-1, 1, 2 * 3 * HEIGHT * WIDTH).view(2, 3, 1, HEIGHT, WIDTH)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_start_is_the_source_and_the_merged_model_is_the_changed_one(normalised):
    plain, changed = model(normalised=normalised), model(2, scale=1.5, normalised=normalised)
    with torch.no_grad():
        torch.testing.assert_close(changed(FIELD), plain(FIELD), rtol=1e-5, atol=1e-5)
        stirred(changed)
        weight, layer = changed.stages[1].layers[0].long_ff.expand, changed.get_parameter
        name = "stages.1.layers.0.long_ff.expand.lora"
        change = 1.5 * layer(f"{name}.up") @ layer(f"{name}.down")
        own = weight.weight / torch.linalg.matrix_norm(weight.weight, 2) if normalised else weight.weight
        torch.testing.assert_close(weight.effective_weight(), own + change, rtol=1e-4, atol=1e-5)
        tensors = merged(changed.state_dict(), 1.5)
        assert set(tensors) == set(plain.state_dict())
        plain.load_state_dict(tensors)
        spectral_norm.refresh(plain)
        scale = float(plain(FIELD).abs().max())
        torch.testing.assert_close(changed(FIELD), plain(FIELD), rtol=0, atol=1e-5 * scale)
        assert float((changed(FIELD) - model(normalised=normalised)(FIELD)).abs().max()) > 1e-2 * scale


def test_only_the_changes_of_matched_layers_are_trained():
    network = stirred(model(2, ["stages.3.*.qkv", "stages.0.layers.0.short_ff.*"], normalised=True))
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    spectral_norm.before_step(network)
    network(FIELD).square().mean().backward()
    spectral_norm.correct_gradients(network)
    got = {name for name, parameter in network.named_parameters() if parameter.grad is not None}
    layers = [
        "3.layers.0.short.qkv",
        "3.layers.0.long.qkv",
        "0.layers.0.short_ff.expand",
        "0.layers.0.short_ff.contract",
    ]
    assert got == {f"stages.{layer}.lora.{leaf}" for layer in layers for leaf in ("up", "down")}
    assert all(float(p.grad.abs().max()) > 0 for p in network.parameters() if p.grad is not None)
    assert all(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        UserError, match=r"start_from.lora.match: expected .*short\.qkv.*, got head\.\*, which matches none"
    ):
        model(2, ["*.qkv", "head.*"])
    with pytest.raises(UserError, match=r"start_from.lora.rank: expected at most 8, .*stages\.0\..*, got 9"):
        model(9)
