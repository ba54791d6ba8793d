"""DDP: the same gradient of the same samples in the first step of a start as in any later one."""

import pytest
import torch
from torch import nn

from credit_like.errors import UserError
from credit_like.models import wxformer
from credit_like.models.wxformer.model import TransformerLayer
from credit_like.parallel.apply import materialise, parallelise
from credit_like.parallel.ddp import apply_ddp, refuse_unused
from credit_like.parallel.runtime import Runtime
from credit_like.schema.trainer import Parallelism, TrainerSection


def _gradients(rank):
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    torch.manual_seed(0)
    parts = [part for _ in range(6) for part in (nn.Linear(37, 37), nn.LayerNorm(37), nn.GELU())]
    model = apply_ddp(nn.Sequential(*parts, nn.Linear(37, 3)), runtime.submeshes["dp"])
    torch.manual_seed(rank)
    x, y = torch.randn(8, 37), torch.randn(8, 3)
    found = []
    for _ in range(3):
        model.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def test_the_first_step_adds_gradients_in_the_order_of_later_ones(run_ranks):
    for first, second, third in run_ranks(4, _gradients):
        assert torch.equal(first, second)
        assert torch.equal(second, third)


def _unused(rank):
    Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("used", "spare")})
    layers.forward = layers["used"].forward
    model = apply_ddp(layers, None)
    model(torch.ones(2, 3)).sum().backward()
    try:
        refuse_unused(model)
    except UserError as error:
        said = str(error)
    layers["spare"].requires_grad_(False)
    refuse_unused(model)
    return said


def test_parameters_that_no_sample_uses_are_named(run_ranks):
    for said in run_ranks(2, _unused):
        assert "got none of spare.weight, spare.bias, which" in said
        assert "set data: fsdp2" in said


class _OneLayer(nn.Module):
    """A layer whose weights fill more than DDP's first bucket of 1 MiB."""

    def __init__(self):
        super().__init__()
        config = wxformer.Config(
            dim=128, depth=(1, 1, 1, 1), dim_head=32, local_window_size=2, global_window_size=(2, 2, 2, 1)
        )
        self.layer = TransformerLayer(config, 0, 0)

    def forward(self, x):
        return self.layer(x)


def _graphs(rank):
    """The graphs into which a compiled unit is divided."""
    compile_unit, graphs = nn.Module.compile, []

    def kept(graph, _inputs, **_):
        graphs.append(graph)
        return graph.forward

    nn.Module.compile = lambda module, **options: compile_unit(module, backend=kept, **options)
    section = TrainerSection.model_validate({"parallelism": {"data": "ddp"}, "compile": True})
    runtime = Runtime.start(section.parallelism, torch.device("cpu"))
    with torch.device("meta"):
        model = _OneLayer()
    model = materialise(parallelise(model, section, runtime), runtime, 0)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert sum(p.nbytes for p in model.parameters()) > 2**20
    model(torch.randn(1, 4, 4, 128)).sum().backward()
    runtime.close()
    return len(graphs)


@pytest.mark.slow
def test_a_compiled_unit_is_one_graph_whatever_the_size_of_the_buckets(run_ranks):
    assert run_ranks(2, _graphs) == [1, 1]
