"""Local shards of parameters: their values, their place in the whole tensor, the number of copies, and the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class Division:
    """How a tensor is divided over a mesh, described alike on all ranks."""

    mesh: tuple[tuple[str, int], ...] = ()
    """Name and size of each dimension of the mesh; empty for a tensor that every rank holds whole."""
    cuts: tuple[tuple[int, int], ...] = ()
    """(mesh dimension, tensor dimension) of each cut, in the order in which blocks are cut into blocks."""

    def boxes(self, shape: tuple[int, ...], coordinates: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (position, offset or size, dimension): the boxes of a tensor of `shape` at these positions in the mesh.

        `coordinates`: (position, mesh dimension). A cut into n gives blocks of ⌈size/n⌉, the last ones smaller or empty.
        """
        result = np.zeros((len(coordinates), 2, len(shape)), np.int64)
        result[:, 1] = shape
        for mesh_dim, dim in self.cuts:
            offset, size = result[:, 0, dim], result[:, 1, dim]
            block = -(-size // self.mesh[mesh_dim][1])
            start = np.minimum(coordinates[:, mesh_dim] * block, size)
            result[:, 1, dim] = np.minimum(size - start, block)
            result[:, 0, dim] = offset + start
        return result


def division(x: Tensor) -> tuple[Division, tuple[int, ...]] | None:
    """Return how a tensor is divided and this rank's position in the mesh; None for other placements than blocks."""
    if not isinstance(x, DTensor):
        return Division(), ()
    mesh, cuts, strided = x.device_mesh, [], []
    for mesh_dim, placement in enumerate(x.placements):
        if isinstance(placement, _StridedShard):
            # It cuts the blocks of the mesh dimensions after it.
            strided.append((mesh_dim, placement.dim))
        elif isinstance(placement, Shard):
            cuts.append((mesh_dim, placement.dim))
        elif not isinstance(placement, Replicate):
            return None
    at = mesh.get_coordinate()
    if at is None:
        return None
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    return Division(tuple(zip(names, mesh.shape, strict=True)), (*cuts, *strided)), tuple(at)


def local(x: Tensor) -> Tensor:
    """Return this rank's shard, or the tensor itself if it is not sharded. Writing to it writes to the parameter."""
    return x._local_tensor if isinstance(x, DTensor) else x


def copies(x: Tensor) -> int:
    """Return how many ranks of the world hold the same values as this one."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(x, DTensor):
        return world
    mesh = x.device_mesh
    sizes = [mesh.size(dim) for dim, placement in enumerate(x.placements) if not isinstance(placement, Replicate)]
    return world // math.prod(sizes)


def box(x: Tensor) -> tuple[slice, ...]:
    """Return the position of the local shard in the whole tensor, one slice per dimension; a shard is always one box.

    Sharding first over tensor ranks and then over data ranks cuts blocks into blocks, so this holds for strided
    placements too.
    """
    if not isinstance(x, DTensor):
        return tuple(slice(0, size) for size in x.shape)
    # Real tensors, also if the parameters are simulated: this is index arithmetic on small tensors.
    with _disable_current_modes():
        shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def whole(x: Tensor) -> Tensor:
    """Return the whole tensor on every rank. Collective over the ranks that share it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def slice_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, shaped as the local shard of `like`."""
    return full[box(like)]
