"""The boxes of all ranks, computed from their positions in the mesh, are those that the ranks hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from credit_like.checkpoint import shards
from credit_like.checkpoint.format import Piece
from credit_like.checkpoint.manager import CheckpointManager
from credit_like.models import wxformer
from credit_like.parallel.apply import materialise, parallelise
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import Division
from credit_like.schema.trainer import Parallelism, TrainerSection


@given(st.data())
def test_boxes_are_those_of_torch(data) -> None:
    """Blocks of blocks over a mesh of two or three dimensions, also where sizes do not divide."""
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(0, 13), min_size=2, max_size=3)))
    dims = [data.draw(st.sampled_from([None, 0, 1])) for _ in mesh]
    division = Division(
        tuple((str(i), size) for i, size in enumerate(mesh)), tuple((i, d) for i, d in enumerate(dims) if d is not None)
    )
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    every = np.array(list(np.ndindex(*mesh)))
    for coordinate, (offset, size) in zip(every.tolist(), division.boxes(shape, every).tolist(), strict=True):
        wanted, start = _compute_local_shape_and_global_offset(shape, mesh, coordinate, placements)
        assert tuple(size) == tuple(wanted)
        if math.prod(size):
            assert tuple(offset) == tuple(start)


def test_a_cut_of_tensor_blocks_over_data_ranks_is_torchs() -> None:
    """As FSDP2 shards the parameters of a tensor-parallel layer."""
    division, every = Division((("dp", 4), ("tp", 2)), ((1, 0), (0, 0))), np.array(list(np.ndindex(4, 2)))
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    for coordinate, (offset, size) in zip(every.tolist(), division.boxes((24, 3), every).tolist(), strict=True):
        wanted, start = _compute_local_shape_and_global_offset((24, 3), (4, 2), coordinate, placements)
        assert (tuple(size), tuple(offset)) == (tuple(wanted), tuple(start))


MODEL = {
    "dim": (4, 8, 16, 32),
    "depth": (1, 1, 1, 1),
    "dim_head": 2,
    "cross_embed_kernel_sizes": ((4, 8), (2, 4), (2, 4), (2, 4)),
    "global_window_size": (4, 4, 2, 1),
    "local_window_size": 2,
    "use_spectral_norm": True,
}


def built(runtime: Runtime, parallelism: Parallelism) -> torch.nn.Module:
    with torch.device("meta"):
        model = wxformer.build(
            wxformer.Config.model_validate(MODEL), in_channels=5, out_channels=4, frames=1, height=64, width=64
        )
    section = TrainerSection.model_validate({"parallelism": parallelism.model_dump(), "compile": False})
    return materialise(parallelise(model, section, runtime), runtime, 0)


def save(rank, folder, parallelism):
    """Save a model in a layout; return what the rank told the others, what it writes, and its bytes."""
    runtime = Runtime.start(parallelism, torch.device("cpu"))
    told: list[shards._Record] = []
    whole_gather = shards.gather

    def gather(record, world):
        told.append(record)
        return whole_gather(record, world)

    shards.gather = gather
    held = {f"model/{name}": piece for name, piece in shards.named_pieces(built(runtime, parallelism)).items()}
    # A moment for each, and a single element, as an optimiser has them.
    moments = {
        f"optimizer/{kind}/{name}": shards.beside(piece, torch.full_like(piece.local, 0.5) if kind == "mean" else one)
        for name, piece in held.items()
        for kind, one in (("mean", None), ("count", torch.ones((), dtype=torch.int64)))
        if piece.shape
    }
    random = {f"random/{rank}/torch": Piece.whole(torch.full((3,), rank, dtype=torch.uint8))}
    manager = CheckpointManager(folder, runtime=runtime, asynchronous=False)
    manager.save(1, held | moments | random, {})
    mine = manager._plan.mine
    sizes = {name: piece.local.nbytes for name, piece in (held | moments | random).items()}
    for piece in held.values():
        piece.local.fill_(0)
    manager.latest().load(held)
    same = built(runtime, parallelism)  # the values depend on the seed alone
    wrong = [
        name
        for name, piece in shards.named_pieces(same).items()
        if not torch.equal(piece.local, held[f"model/{name}"].local)
    ]
    runtime.close()
    return [list(record.loose) for record in told], sum(sizes[name] for name in mine), wrong


LONG = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    ("world", "parallelism"),
    [
        (2, {"data": "fsdp2"}),
        pytest.param(4, {"data": "fsdp2", "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"data": "fsdp2", "tensor": 2, "replicate": 2}, marks=LONG),
        pytest.param(4, {"data": "fsdp2", "replicate": 2}, marks=LONG),
        pytest.param(4, {"data": "ddp", "tensor": 2}, marks=LONG),
        pytest.param(4, {"data": "fsdp2", "domain": 2}, marks=LONG),
    ],
    ids=str,
)
def test_no_piece_of_a_model_is_gathered(run_ranks, tmp_path, world, parallelism) -> None:
    """Only the random state is; each piece is written once, by all ranks about alike, and read back."""
    ranks = run_ranks(world, save, tmp_path, Parallelism.model_validate(parallelism))
    for rank, (told, _, wrong) in enumerate(ranks):
        assert told == [[f"random/{rank}/torch"]]
        assert not wrong
    written = [size for _, size, _ in ranks]
    assert max(written) < 1.4 * sum(written) / world


def differing(rank, folder):
    """Ranks that do not describe the same tensors: rows of one that this rank knows to be whole elsewhere."""
    runtime = Runtime.start(Parallelism(data="ddp"), torch.device("cpu"))
    rows = torch.arange(6.0).reshape(3, 2) + 6 * rank
    pieces = {
        "rows": Piece(rows, (6, 2), (3 * rank, 0), (Division(), ())),
        f"own {rank}": Piece(torch.full((2,), float(rank)), (2,), (0,), (Division(), ())),
    }
    manager = CheckpointManager(folder, runtime=runtime, asynchronous=False)
    manager.save(1, pieces, {})
    found = manager.latest()
    result = {name: found.read(name).tolist() for name in found.names()}
    runtime.close()
    return result


def test_pieces_of_unknown_placement_are_gathered(run_ranks, tmp_path) -> None:
    for found in run_ranks(2, differing, tmp_path):
        assert found == {
            "rows": torch.arange(12.0).reshape(6, 2).tolist(),
            "own 0": [0.0, 0.0],
            "own 1": [1.0, 1.0],
        }


def test_a_buffer_of_two_modules_has_both_names_and_a_weight_the_first():
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    layers[1].weight = layers[0].weight
    for layer in layers:
        layer.register_buffer("mask", torch.ones(2) if layer is layers[0] else layers[0].mask)
    names = {"0.weight", "0.bias", "0.mask", "1.bias", "1.mask"}  # however they are moved to a device
    assert shards.named_pieces(torch.nn.Sequential(*layers)).keys() == names
    layers[1].mask = layers[1].mask.clone()
    assert shards.named_pieces(torch.nn.Sequential(*layers)).keys() == names
