"""The functions of credit_like.parallel where a mesh or a manager is missing."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from credit_like.parallel import apply_ddp, apply_fsdp2, unpad_shard_interp
from credit_like.parallel.fsdp2 import fsdp2_is_applied, fsdp2_load_state_dict, fsdp2_state_dict
from credit_like.parallel.runtime import Runtime
from credit_like.schema.trainer import Parallelism

CONF = {"trainer": {}}


def test_one_process_needs_no_mesh():
    model = nn.Linear(3, 2)
    assert apply_fsdp2(model, None, CONF) is model
    assert not fsdp2_is_applied(model)
    assert apply_ddp(model, None) is model


def _without_a_mesh(rank):
    Runtime.start(Parallelism(data="fsdp2"), torch.device("cpu"))
    torch.manual_seed(0)
    plain = nn.Linear(3, 2, dtype=torch.float64)
    values = {name: p.detach().clone() for name, p in plain.named_parameters()}
    replica = apply_ddp(nn.Linear(3, 2), None)
    model = apply_fsdp2(nn.Linear(3, 2, dtype=torch.float64), None, CONF)
    given = dict(values)
    fsdp2_load_state_dict(model, given)
    kept = all(given[name] is values[name] for name in values)
    fsdp2_load_state_dict(model, given)
    state = fsdp2_state_dict(model)
    same = all(torch.equal(state[name], values[name]) for name in state)
    sharded = all(isinstance(p, DTensor) and p.device_mesh.size() == 2 for p in model.parameters())
    return isinstance(replica, DistributedDataParallel), sharded, kept, same, len(state)


def test_without_a_mesh_all_ranks_are_one_and_a_state_can_be_loaded_twice(run_ranks):
    assert run_ranks(2, _without_a_mesh) == [(True, True, True, True, 2), (True, True, True, True, 0)]


def test_the_whole_image_is_unpadded_and_resized_without_a_manager():
    y = torch.randn(2, 3, 1, 20, 14, dtype=torch.float64)
    pads = {"pad_lat": (3, 1), "pad_lon": (2, 4)}
    cut = y[..., 3:19, 2:10]
    assert torch.equal(unpad_shard_interp(y, pads, None, 16, 8), cut)
    assert torch.equal(unpad_shard_interp(y[:, :, 0], None, None, 20, 14), y[:, :, 0])
    resized = nn.functional.interpolate(cut.flatten(1, 2), size=(17, 9), mode="bilinear").unflatten(1, (3, 1))
    assert torch.equal(unpad_shard_interp(y, pads, None, 17, 9), resized)
