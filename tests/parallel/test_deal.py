"""Tensors dealt to owners: whole at one rank, parts back at every rank, from any placement and without communication to plan."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from credit_like.parallel import deal as deal_module
from credit_like.parallel.deal import deal, from_owners, to_owners
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local, slice_like
from credit_like.schema.trainer import Parallelism
from credit_like.training.optimizers import _muon

SHAPES = {"a": (6, 5), "b": (5, 6), "c": (3, 4), "d": (1, 7), "e": (8, 8), "f": (8, 8)}


def _values(name):
    shape = SHAPES[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(ord(name)), dtype=torch.float64)


def _tensors():
    """Plain, sharded unevenly and to nothing, on both dimensions, replicated and sharded, on a part of the world."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    places = {
        "b": (flat, [Shard(0)]),
        "c": (flat, [Shard(0)]),
        "d": (square, [Shard(1), Shard(1)]),
        "e": (square, [Replicate(), Shard(0)]),
        "f": (square["dp"], [Shard(0)]),
    }
    values = {name: _values(name) for name in SHAPES}
    sharded = {name: distribute_tensor(values[name], *places[name], src_data_rank=None) for name in places}
    return values | sharded


def _round(rank):
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    tensors = _tensors()
    dealt = deal(tensors, {name: tensor.numel() for name, tensor in tensors.items()})
    parts = {name: local(tensor) for name, tensor in tensors.items()}
    owned = to_owners(parts, dealt)
    assert all(torch.equal(whole, _values(name)) for name, whole in owned.items())
    back = from_owners({name: 2 * whole for name, whole in owned.items()}, parts, dealt)
    assert sorted(back) == sorted(SHAPES)
    assert all(torch.equal(back[name], 2 * slice_like(_values(name), tensor)) for name, tensor in tensors.items())
    runtime.close()
    return sorted(owned)


def test_whole_at_one_rank_and_parts_back_at_all(run_ranks):
    owned = Counter(name for names in run_ranks(4, _round) for name in names)
    # The mesh of f are two ranks, and the other two hold a second copy on a mesh of their own.
    assert owned == Counter({**dict.fromkeys(SHAPES, 1), "f": 2})


def _iterations(rank):
    counted = []
    orthogonal = _muon.orthogonal
    _muon.orthogonal = lambda x_Nrc: counted.extend(tuple(x.shape) for x in x_Nrc) or orthogonal(x_Nrc)
    runtime = Runtime.start(Parallelism(data="fsdp2"), torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    parameters = {
        name: torch.nn.Parameter(distribute_tensor(_values(name), mesh, [Shard(0)], src_data_rank=None))
        for name in "abcef"
    }
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()

    class Options:
        momentum, nesterov, weight_decay, betas, eps = 0.9, True, 0.1, (0.9, 0.95), 1e-8

    _muon.Muon(Options(), parameters).step(1e-2, torch.zeros(()))
    runtime.close()
    return counted


def test_each_matrix_is_iterated_once_in_the_world_and_the_work_is_shared(run_ranks):
    ranks = run_ranks(2, _iterations)
    assert Counter(shape for shapes in ranks for shape in shapes) == Counter(SHAPES[name] for name in "abcef")
    assert all((8, 8) in shapes for shapes in ranks), "the two most expensive ones are not one rank's"


@pytest.mark.parametrize("count", [1, 7])
def test_one_process_owns_everything(count):
    tensors = {f"{i}": torch.full((2, 3), float(i)) for i in range(count)}
    dealt = deal(tensors, dict.fromkeys(tensors, 1.0))
    owned = to_owners(tensors, dealt)
    back = from_owners(owned, tensors, dealt)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert deal_module._world() == 1


def test_matrices_of_one_shape_are_iterated_together_and_each_as_if_alone():
    """On a GPU the number of operations is what they cost."""
    generator = torch.Generator().manual_seed(0)
    matrices = {f"{i}": torch.randn(5, 3, 1, generator=generator, dtype=torch.float64) for i in range(3)}
    matrices["wide"] = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    calls = []
    whole = _muon.orthogonal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "orthogonal", lambda x: calls.append(len(x)) or whole(x))
        together = _muon._orthogonal(matrices)
    assert calls == [3, 1]
    for name, matrix in matrices.items():
        u, _, vh = torch.linalg.svd(matrix.flatten(1), full_matrices=False)
        found = together[name]
        alone = whole(matrix.flatten(1)[None])
        torch.testing.assert_close(found, alone.view(matrix.shape), rtol=1e-12, atol=1e-12)
        values = torch.linalg.svdvals(found.flatten(1))
        assert 0.6 < values.min() <= values.max() < 1.3
        aligned = u.mT @ found.flatten(1) @ vh.mT
        torch.testing.assert_close(aligned, aligned.diagonal().diag(), rtol=0, atol=1e-9)
