"""Position biases that are computed together, against their definition: one layer after the other for each bias alone.

And what attention is given on a GPU.
"""

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from credit_like.models import wxformer
from credit_like.nn import spectral_norm
from credit_like.nn.attention import POSITION_INDICES, LongAttention, PositionBias, ShortAttention, position_tables
from credit_like.nn.init import initialise
from credit_like.nn.lora import add_lora

ZOO = sorted((Path(__file__).parents[2] / "models").glob("*/model.yml"))


def definition(bias):
    """The bias of every pair of tokens, (w^2, w^2), by its formula."""
    reach = bias.window - 1 if bias.position_index == "exact" else bias.window
    axis = torch.arange(-reach, reach + 1, dtype=torch.float64)
    table = torch.cartesian_prod(axis, axis)[: (2 * bias.window - 1) ** 2]
    for linear, norm in zip(bias.linears[:3], bias.norms, strict=True):
        table = nn.functional.relu(norm(nn.functional.linear(table, linear.effective_weight(), linear.bias)))
    table = nn.functional.linear(table, bias.linears[3].effective_weight(), bias.linears[3].bias)
    position = torch.cartesian_prod(torch.arange(bias.window), torch.arange(bias.window))
    dy, dx = (position[:, None] - position[None] + bias.window - 1).unbind(-1)
    return table.flatten()[dy * (2 * bias.window - 1) + dx]


def biases(position_index, normalised, lora=False):
    """A bias for windows of 2 and one for windows of 5, in double precision, with affine norms that are not the identity."""
    made = nn.ModuleList(PositionBias(24, w, position_index=position_index, spectral_norm=normalised) for w in (2, 5))
    if lora:
        add_lora(made, 2, ["*.linears.1"])
        made.requires_grad_(True)
    initialise(made, 0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norms" in name or name.endswith((".bias", ".up")):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    spectral_norm.before_step(made)
    return made


@pytest.mark.parametrize("kind", ["plain", "normalised", "normalised outside", "low rank"])
@pytest.mark.parametrize("position_index", POSITION_INDICES)
def test_values_and_gradients_are_those_of_the_definition(position_index, kind):
    made = biases(position_index, kind != "plain", lora=kind == "low rank")
    if kind == "normalised outside":
        for _, layer in spectral_norm.layers(made):
            layer.spectral.in_backward = False
    cotangents = [torch.randn(b.window**2, b.window**2, dtype=torch.float64) for b in made]
    answers = {}
    for how in ("together", "alone", "defined"):
        made.zero_grad()
        if how == "together":
            values = [bias(table) for bias, table in zip(made, position_tables(*made), strict=True)]
        else:
            values = [bias() if how == "alone" else definition(bias) for bias in made]
        sum((v * c).sum() for v, c in zip(values, cotangents, strict=True)).backward()
        spectral_norm.correct_gradients(made)
        answers[how] = [*values, *(p.grad.clone() for p in made.parameters())]
    for how in ("together", "alone"):
        for found, expected in zip(answers[how], answers["defined"], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14 * max(1, expected.abs().max().item()))


def test_a_window_of_one_token_has_no_table_and_cached_biases_compute_their_own():
    _, large = biases("exact", True)
    absent, table = position_tables(None, large)
    assert absent is None
    assert table.shape == (81,)
    assert position_tables(None, None) == [None, None]
    with torch.no_grad():
        assert position_tables(None, large) == [None, None]
        torch.testing.assert_close(large(), large(table), rtol=0, atol=1e-14)


@pytest.mark.slow
def test_compiled_tables_are_those_of_the_definition():
    made = biases("exact", True)

    def together():
        return tuple(bias(table) for bias, table in zip(made, position_tables(*made), strict=True))

    values = torch.compile(together, backend="aot_eager", fullgraph=True)()
    defined = [definition(bias) for bias in made]
    cotangents = [torch.randn(b.window**2, b.window**2, dtype=torch.float64) for b in made]
    gradients = [
        torch.autograd.grad(sum((v * c).sum() for v, c in zip(of, cotangents, strict=True)), list(made.parameters()))
        for of in (values, defined)
    ]
    for found, expected in zip((*values, *gradients[0]), (*defined, *gradients[1]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14 * max(1, expected.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", ZOO, ids=lambda path: path.parent.name)
def test_a_gpu_has_a_fused_kernel_for_the_attention_of_every_model(monkeypatch, path, dtype):
    """The conditions of torch's memory-efficient kernel, the only fused one for a bias that has a gradient."""
    section = yaml.safe_load(path.read_text())["model"]
    config = wxformer.Config.model_validate({key: value for key, value in section.items() if key != "predict"})
    given = []

    def record(q, k, v, *, attn_mask):
        given.append((q, k, v, attn_mask))
        return torch.empty_like(q)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", record)
    windows = [(config.local_window_size, ShortAttention), *((g, LongAttention) for g in config.global_window_size)]
    for window, kind in windows:
        with torch.device("meta"):
            layer = kind(config.dim[0], window, dim_head=config.dim_head, spectral_norm=True).to(dtype)
        layer(torch.empty(1, 2 * window, 2 * window, config.dim[0], device="meta", dtype=dtype))
    assert len(given) == sum(window > 1 for window, _ in windows)
    for *tensors, bias in given:
        assert bias.ndim == 2
        assert bias.is_contiguous()
        assert bias.dtype == dtype
        for x in tensors:
            assert x.dtype == dtype
            assert x.stride(-1) == 1
            assert x.shape[-1] * x.element_size() % 16 == 0
            assert x.storage_offset() * x.element_size() % 16 == 0
