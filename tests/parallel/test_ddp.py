"""DDP: the same gradient of the same samples in the first step of a start as in any later one."""

import torch
from torch import nn

from credit_like.parallel.ddp import apply_ddp
from credit_like.parallel.runtime import Runtime
from credit_like.schema.trainer import Parallelism


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
