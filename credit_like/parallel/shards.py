"""What this rank holds of a parameter: the local shard, its place in the whole, how often it exists; and the whole."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes


def local(x: Tensor) -> Tensor:
    """This rank's part: the tensor itself where it is not sharded. Writing to it writes to the parameter."""
    return x._local_tensor if isinstance(x, DTensor) else x


def copies(x: Tensor) -> int:
    """How many ranks of the world hold the same values as this one."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(x, DTensor):
        return world
    mesh = x.device_mesh
    sizes = [mesh.size(dim) for dim, placement in enumerate(x.placements) if not isinstance(placement, Replicate)]
    return world // math.prod(sizes)


def box(x: Tensor) -> tuple[slice, ...]:
    """Where the local shard lies in the whole tensor, a slice per dimension; a shard is always one box.

    Sharding first over tensor ranks and then over data ranks cuts a block into blocks, so this holds for strided
    placements too.
    """
    if not isinstance(x, DTensor):
        return tuple(slice(0, size) for size in x.shape)
    # Index arithmetic on small tensors: real ones, also where the parameters are simulated.
    with _disable_current_modes():
        shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def whole(x: Tensor) -> Tensor:
    """The whole tensor on every rank. Collective over the ranks that share it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def slice_like(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, shaped as the local shard of `like`."""
    return full[box(like)]


def whole_of_shards(shard: Tensor, like: Tensor) -> Tensor:
    """The whole of a tensor that is sharded as `like` is, from this rank's `shard` of it. Collective as `whole` is."""
    if not isinstance(like, DTensor):
        return shard
    sharded = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()
