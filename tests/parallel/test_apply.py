"""Initial weights of torch's own layers in a sharded model are slices of those of one process."""

import pytest
import torch
from torch import nn

from credit_like.nn.init import initialise
from credit_like.parallel.apply import materialise, parallelise
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import whole
from credit_like.schema.trainer import TrainerSection


class Mixed(nn.Module):
    """Torch's layers only; two of them are split over tensor ranks."""

    _tp_col, _tp_row = "expand", "contract"

    def __init__(self):
        super().__init__()
        self.expand, self.contract = nn.Linear(6, 8), nn.Linear(8, 6)
        self.conv, self.norm = nn.Conv2d(5, 7, 3), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self._fsdp2_shard = True


def _shards(rank, tensor, expected):
    section = TrainerSection.model_validate({"parallelism": {"data": "fsdp2", "tensor": tensor}})
    runtime = Runtime.start(section.parallelism, torch.device("cpu"))
    with torch.device("meta"):
        model = nn.Sequential(Mixed(), Mixed())
    model = materialise(parallelise(model, section, runtime), runtime, 5)
    found = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    assert list(found) == list(expected)
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=str)
def test_torch_s_layers_start_alike_in_every_layout(run_ranks, layout):
    expected = dict(initialise(nn.Sequential(Mixed(), Mixed()), 5).named_parameters())
    expected = {name: parameter.detach() for name, parameter in expected.items()}
    assert all(run_ranks(layout[0] * layout[1], _shards, layout[1], expected))
