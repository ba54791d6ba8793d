"""What a training saves of a model: names of the plain model, and nothing that a checkpoint cannot hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from credit_like.checkpoint.export import full_weights
from credit_like.checkpoint.manager import Checkpoint
from credit_like.checkpoint.shards import named_pieces
from credit_like.errors import UserError
from credit_like.parallel.fsdp2 import full_parameters
from tests.faults import tiny


def with_buffer(value: torch.Tensor, persistent: bool):
    def wrap(model):
        model.register_buffer("table", value, persistent=persistent)
        return model

    return wrap


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_buffer_that_cannot_be_saved_is_refused_before_training(tmp_path, dtype) -> None:
    value = torch.zeros(3, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=f"model.type: expected state .* got table of type {name}; .*persistent=False"):
        tiny.trainer(tmp_path, wrap=with_buffer(value, persistent=True))
    assert tiny.trainer(tmp_path, wrap=with_buffer(value, persistent=False)).state.pieces()


class Around(nn.Module):
    """A model that calls the one inside it `module`, as wrappers do."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.module = inside

    def forward(self, x):
        return self.module(x)


class Replicated(DistributedDataParallel):
    """One that needs no other ranks."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_a_model_with_an_attribute_called_module_is_exported_under_its_own_names(tmp_path) -> None:
    made = tiny.trainer(tmp_path, wrap=Around, epochs=1)
    assert made.fit().state == "finished"
    weights = full_weights(Checkpoint.open(tmp_path / "checkpoints" / "step-9"), "raw")
    assert set(weights) == {f"module.{name}" for name in tiny.Model(2, 2).state_dict()}
    made.state.model.load_state_dict(weights)


@pytest.mark.parametrize("model", [tiny.Model(2, 2), Around(tiny.Model(2, 2))], ids=["plain", "around"])
def test_names_are_those_inside_of_ddp(model) -> None:
    assert named_pieces(Replicated(model)).keys() == named_pieces(model).keys() == model.state_dict().keys()
    with full_parameters(Replicated(model)) as full:
        assert full.keys() == dict(model.named_parameters()).keys()
