"""Parameters of which every tensor rank holds a copy: they stay equal, and a difference is found and named.

Tensor ranks have the same samples, so the gradients of such parameters are equal in exact arithmetic. On GPUs some kernels
add in an order that varies, which gives other bits on every rank; AdamW then turns the difference of a small gradient into
one of the size of an update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from credit_like.errors import UserError
from credit_like.parallel.collectives import allreduce_grads_avg
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.shards import local


def copied_over_tensor(parameters: Mapping[str, Tensor], runtime: Runtime) -> dict[str, Tensor]:
    """Return the parameters that are not split over the tensor ranks; none with a single tensor rank."""
    if runtime.tensor_size == 1:
        return {}
    return {name: parameter for name, parameter in parameters.items() if not _is_split(parameter)}


def _is_split(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, parameter.placements, strict=True)) if names else {}
    return not isinstance(placements.get("tp", Replicate()), Replicate)


def average_gradients(copied: Mapping[str, Tensor], runtime: Runtime) -> None:
    """Replace the gradients of copied parameters by their averages over the tensor ranks, with one message per dtype."""
    gradients = [local(p.grad) for p in copied.values() if p.grad is not None]
    if gradients:
        allreduce_grads_avg(gradients, runtime.submeshes["tp"].get_group())


@torch.no_grad()
def check_copies(copied: Mapping[str, Tensor], runtime: Runtime) -> None:
    """Compare the copies bit by bit. Collective over the tensor ranks, and over all ranks.

    Raises UserError, on all ranks, naming a parameter that differs and by how much.
    """
    if runtime.tensor_size == 1:
        return
    group = runtime.submeshes["tp"].get_group()
    shards = {name: local(parameter).detach() for name, parameter in copied.items()}
    worst, error = "", 0.0
    flats: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, shard in shards.items():
        if shard.numel():
            flats.setdefault(shard.dtype, []).append((name, shard))
    for members in flats.values():
        flat = torch.cat([shard.reshape(-1) for _, shard in members])
        reference = flat.clone()
        dist.broadcast(reference, group_src=0, group=group)
        # NaN is equal to NaN here: it is the same on all ranks or it is found by the step's own check.
        differs = ~((flat == reference) | (flat.isnan() & reference.isnan()))
        if not bool(differs.any()):
            continue
        sizes = [shard.numel() for _, shard in members]
        for (name, _), mine, first in zip(members, flat.split(sizes), reference.split(sizes), strict=True):
            by = float((mine - first).abs().nan_to_num(nan=float("inf")).max())
            if by > error:
                worst, error = name, by
    if not runtime.agree(int(bool(worst))):
        return
    reports = runtime.gather((worst, error))
    rank = max(range(runtime.world), key=lambda rank: reports[rank][1])
    name, by = reports[rank]
    raise UserError(
        f"{name}: expected the same values on all {runtime.tensor_size} tensor ranks, got a difference of up to {by:.3g} on rank "
        f"{rank}; start the run again from its newest checkpoint, which holds one copy"
    )
