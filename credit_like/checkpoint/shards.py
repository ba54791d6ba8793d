"""Boxes of tensors that this rank holds, and the selection of those that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from credit_like.checkpoint.format import NAMES, Piece
from credit_like.parallel.shards import box, local
from credit_like.parallel.unwrap import canonical_name


def piece_of(tensor: Tensor) -> Piece:
    """Return the box of a tensor that this rank holds; it shares the tensor's memory."""
    offset = tuple(part.start for part in box(tensor))
    return Piece(local(tensor).detach(), tuple(tensor.shape), offset) if offset else Piece.whole(tensor.detach())


def named_pieces(model: nn.Module) -> dict[str, Piece]:
    """Return every parameter and saved buffer of a model under its layout-independent name."""
    return {canonical_name(name): piece_of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def beside(piece: Piece, local: Tensor) -> Piece:
    """Return a piece sharded like `piece`, such as an optimiser moment; single elements are not sharded."""
    return Piece(local, piece.shape, piece.offset) if local.shape == piece.local.shape else Piece.whole(local)


def share_out(pieces: Mapping[str, Piece]) -> list[dict[str, Any]]:
    """Return which pieces each rank writes, as name → (dtype, shape, offset, piece size). Collective.

    A piece that several ranks hold is written once, by the one with the fewest bytes so far, largest pieces first. Each
    rank therefore writes about 1/ranks of all bytes in every layout.
    """
    mine = {
        name: (str(p.local.dtype), p.local.element_size(), p.shape, *p.box)
        for name, p in pieces.items()
        if p.local.numel() or 0 in p.shape
    }
    everyone: list[dict[str, Any]] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, held in enumerate(everyone):
        for name, about in held.items():
            holders.setdefault((name, *about), []).append(rank)

    def size(key: tuple[Any, ...]) -> int:
        return int(key[2] * torch.Size(key[5]).numel())

    loads = [0] * len(everyone)
    plan: list[dict[str, Any]] = [{} for _ in everyone]
    for key in sorted(holders, key=lambda key: (-size(key), key)):
        rank = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[rank] += size(key)
        name, dtype, _, shape, offset, size_of = key
        plan[rank][name] = (dtype, shape, offset, size_of)
    return plan


def rank_file(rank: int) -> str:
    """Return the name of the file of one rank."""
    return f"rank-{rank:05d}.safetensors"


def rows(plan: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Convert the assignment to rows for `format.table`."""
    dtypes = {str(dtype): name for dtype, name in NAMES.items()}
    return [
        (name, dtypes[dtype], rank_file(rank), shape, offset, size, name)
        for rank, held in enumerate(plan)
        for name, (dtype, shape, offset, size) in sorted(held.items())
    ]
