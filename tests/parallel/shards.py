"""Whole tensors from the parts that ranks hold, gathered by other means than those of the package."""

from torch.distributed.tensor import DTensor


def whole_of_shards(shard, like):
    """The whole of a tensor sharded like `like`, given this rank's `shard` of it; collective."""
    if not isinstance(like, DTensor):
        return shard
    sharded = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()
