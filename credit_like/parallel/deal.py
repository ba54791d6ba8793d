"""Work on whole tensors, dealt out: each tensor has one owner, which gets it whole and sends every rank its part of the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes

from credit_like.parallel.collectives import all_to_all

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Dealt:
    """A tensor's owner, and where its parts are, by rank of the world."""

    owner: int
    shape: tuple[int, ...]
    boxes: Mapping[int, Box]
    """The part of each rank that holds one, this rank's included."""
    senders: frozenset[int]
    """Ranks whose parts together are the tensor, each of its elements once."""


def deal(tensors: Mapping[str, Tensor], cost: Mapping[str, float]) -> dict[str, Dealt]:
    """Deal tensors to the ranks that hold parts of them, the most expensive first, each to the rank with the least work.

    The plan follows from the placements alone, so every rank makes the same one without communication. Tensors of one
    mesh are dealt among its ranks, independently of those of other meshes.
    """
    loads: dict[tuple[int, ...], list[float]] = {}
    found: dict[str, Dealt] = {}
    known: dict[tuple[object, ...], dict[int, Box]] = {}
    for name in sorted(tensors, key=lambda name: (-cost[name], name)):
        tensor = tensors[name]
        key = (tuple(tensor.shape), *((tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()))
        if key not in known:
            known[key] = _boxes(tensor)
        boxes = known[key]
        work = loads.setdefault(tuple(boxes), [0.0] * len(boxes))
        at = work.index(min(work))
        work[at] += cost[name]
        owner = list(boxes)[at]
        found[name] = Dealt(owner, tuple(tensor.shape), boxes, _senders(boxes, owner))
    return found


def _boxes(tensor: Tensor) -> dict[int, Box]:
    """Return the box that each rank of a tensor's mesh holds; a plain tensor is held whole by all ranks."""
    if not isinstance(tensor, DTensor):
        return {rank: tuple(slice(0, n) for n in tensor.shape) for rank in range(_world())}
    mesh = tensor.device_mesh
    with _disable_current_modes():
        ranks = mesh.mesh.reshape(-1).tolist()
        coordinates = itertools.product(*(range(n) for n in mesh.shape))
        boxes = {}
        for rank, coordinate in zip(ranks, coordinates, strict=True):
            shape, offset = _compute_local_shape_and_global_offset(
                tensor.shape, mesh.shape, list(coordinate), tensor.placements
            )
            boxes[rank] = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return boxes


def _senders(boxes: Mapping[int, Box], owner: int) -> frozenset[int]:
    """Return one holder of each box that is not empty: the owner where it is one of them, else the first."""
    holders: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in (owner, *boxes):
        if _count(boxes[rank]):
            holders.setdefault(tuple((part.start, part.stop) for part in boxes[rank]), rank)
    return frozenset(holders.values())


def to_owners(parts: Mapping[str, Tensor], dealt: Mapping[str, Dealt]) -> dict[str, Tensor]:
    """Return the tensors that this rank owns, whole, given this rank's part of each. Collective over the world."""
    me = _rank()
    owned = {name: parts[name].new_empty(d.shape) for name, d in dealt.items() if d.owner == me}
    for names in _by_dtype(parts):
        sent = [
            [parts[n] for n in names if dealt[n].owner == rank and me in dealt[n].senders] for rank in range(_world())
        ]
        coming = [[n for n in names if n in owned and rank in dealt[n].senders] for rank in range(_world())]
        boxes = [[dealt[n].boxes[rank] for n in some] for rank, some in enumerate(coming)]
        received = _exchange(sent, boxes, parts[names[0]])
        for rank, some in enumerate(coming):
            for name, values in zip(some, received[rank], strict=True):
                owned[name][dealt[name].boxes[rank]] = values
    return owned


def from_owners(
    owned: Mapping[str, Tensor], parts: Mapping[str, Tensor], dealt: Mapping[str, Dealt]
) -> dict[str, Tensor]:
    """Return this rank's part of each tensor, given those that it owns; `parts` are of the same dtypes. Collective."""
    me = _rank()
    result: dict[str, Tensor] = {}
    for names in _by_dtype(parts):
        sent = [
            [owned[n][dealt[n].boxes[rank]] for n in names if n in owned and rank in dealt[n].boxes]
            for rank in range(_world())
        ]
        coming = [[n for n in names if dealt[n].owner == rank] for rank in range(_world())]
        received = _exchange(sent, [[dealt[n].boxes[me] for n in some] for some in coming], parts[names[0]])
        for some, values in zip(coming, received, strict=True):
            result |= dict(zip(some, values, strict=True))
    return result


def _exchange(sent: list[list[Tensor]], coming: list[list[Box]], like: Tensor) -> list[list[Tensor]]:
    """Send tensors of the dtype and device of `like` to each rank; return those from each, in the shapes of the boxes."""
    if len(sent) == 1:
        return sent
    flat = [tensor.reshape(-1) for some in sent for tensor in some]
    buffer = torch.cat(flat) if flat else like.new_empty(0)
    sizes = [sum(map(_count, boxes)) for boxes in coming]
    group = dist.group.WORLD
    assert group is not None
    received = all_to_all(buffer, sizes, [sum(t.numel() for t in some) for some in sent], group)
    result = []
    for boxes, values in zip(coming, received.split(sizes), strict=True):
        pieces = values.split([_count(box) for box in boxes]) if boxes else ()
        result.append([piece.view([p.stop - p.start for p in box]) for piece, box in zip(pieces, boxes, strict=True)])
    return result


def _by_dtype(parts: Mapping[str, Tensor]) -> list[list[str]]:
    dtypes = sorted({part.dtype for part in parts.values()}, key=str)
    return [[name for name, part in parts.items() if part.dtype == dtype] for dtype in dtypes]


def _count(box: Box) -> int:
    return math.prod(part.stop - part.start for part in box)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
