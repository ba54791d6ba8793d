"""Local shards of parameters: their values, their place in the whole tensor, the number of copies, and the whole."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes


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


def whole_of_shards(shard: Tensor, like: Tensor) -> Tensor:
    """Return the whole of a tensor sharded like `like`, given this rank's `shard` of it. Collective, like `whole`."""
    if not isinstance(like, DTensor):
        return shard
    sharded = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()
