"""Collectives on tensors: differentiable sums, averages of gradients, and norms over any combination of meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from credit_like.nn.constants import on_device
from credit_like.parallel.shards import copies, local

# Functional operators can be compiled, counted and recomputed.
_ops = torch.ops._c10d_functional


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the group as a new tensor; on the meta device only its shape, without communication."""
    if x.is_meta:
        return x.clone()
    result: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))
    return result


def gather_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return every rank's x, (ranks, …)."""
    result: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous()[None], group.size(), group.group_name))
    return result


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Send `sent[r]` elements of a flat tensor to each rank r and return the received pieces, concatenated."""
    return arrived(begin_all_to_all(x, received, sent, group))


def begin_all_to_all(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Begin `all_to_all`; the pieces must not be read before `arrived` has been called with them."""
    result: Tensor = _ops.all_to_all_single(x, received, sent, group.group_name)
    return result


def arrived(pieces: Tensor) -> Tensor:
    """Return the pieces of `begin_all_to_all` once they have been received."""
    result: Tensor = _ops.wait_tensor(pieces)
    return result


def from_others(x: Tensor, group: ProcessGroup) -> Iterator[Tensor]:
    """Yield the tensors of this shape that the other ranks hold, without gradients, beginning with the rank before.

    Every rank sends its own to one rank after the other, ranks − 1 times in all, and all ranks must take all of them.
    """
    size, rank, flat = group.size(), group.rank(), x.detach().contiguous().reshape(-1)
    for distance in range(1, size):
        received, sent = [0] * size, [0] * size
        received[(rank - distance) % size] = sent[(rank + distance) % size] = flat.numel()
        yield all_to_all(flat, received, sent, group).view(x.shape)


class _AllReduceSum(torch.autograd.Function):
    """Sum over the group, forward and backward: every rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(grad, ctx.group), None


class _CopyToRegion(torch.autograd.Function):
    """Identity forward; backward sums the partial gradients of ranks that used the copy for different parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(grad, ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """Sum of partial results forward; backward is the identity because every rank has the same loss."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return sum_over(x, group)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def all_reduce_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the differentiable sum over ranks whose losses are parts of one loss (domain)."""
    result: Tensor = _AllReduceSum.apply(x, group)
    return result


def copy_to_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Mark where a tensor shared by all ranks enters a computation that is split over them (tensor parallel).

    Forward is the identity; backward sums the gradients.
    """
    result: Tensor = _CopyToRegion.apply(x, group)
    return result


def reduce_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the ranks' parts, where a split computation ends (tensor parallel)."""
    result: Tensor = _ReduceFromRegion.apply(x, group)
    return result


@torch.no_grad()
def allreduce_grads_avg(grads: Iterable[Tensor], group: ProcessGroup) -> None:
    """Replace gradients by their averages over the group, in place.

    Plain gradients are sent in one flat bucket per (dtype, device); sharded ones are reduced on their local shards. All
    reductions are issued before the first is waited for; empty shards are skipped. NCCL averages; with gloo the sum is
    divided here.
    """
    plain: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sharded: list[Tensor] = []
    for grad in grads:
        if grad.numel() == 0 or local(grad).numel() == 0:
            continue
        if isinstance(grad, DTensor):
            sharded.append(local(grad))
        else:
            plain.setdefault((grad.dtype, grad.device), []).append(grad)
    average = dist.get_backend(group) == "nccl"
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    buckets = [(torch.cat([g.reshape(-1) for g in members]), members) for members in plain.values()]
    buffers = [flat for flat, _ in buckets] + sharded
    works = [dist.all_reduce(buffer, op, group=group, async_op=True) for buffer in buffers]
    for work, buffer in zip(works, buffers, strict=True):
        work.wait()
        if not average:
            buffer.div_(group.size())
    for flat, members in buckets:
        for grad, part in zip(members, flat.split([g.numel() for g in members]), strict=True):
            grad.copy_(part.view_as(grad))


@torch.no_grad()
def total_grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients together, the same on all ranks, with one all-reduce.

    Each rank adds |g|^p of its local shards, divided by the number of ranks that hold the same shard, so parameters may
    live on different meshes (plain, data, data × tensor). Plain gradients are assumed equal on all ranks.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    device = local(grads[0]).device
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    shards = [local(g) for g in grads]
    if math.isinf(norm_type):
        parts = [s.abs().max().double() for s in shards if s.numel()]
        total = torch.stack(parts).max() if parts else torch.zeros((), dtype=torch.float64, device=device)
        if distributed:
            dist.all_reduce(total, dist.ReduceOp.MAX)
        return total
    total = torch.zeros((), dtype=torch.float64, device=device)
    held = [(s, copies(g) if distributed else 1) for s, g in zip(shards, grads, strict=True) if s.numel()]
    if held:
        norms = torch.stack(torch._foreach_norm([s for s, _ in held], norm_type, dtype=_wide(held[0][0].dtype)))
        weights = on_device(tuple(1.0 / n for _, n in held), torch.float64, device)
        total = (norms.double() ** norm_type * weights).sum()
    if distributed:
        dist.all_reduce(total)
    return total ** (1.0 / norm_type)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; return the norm before scaling (fp64 scalar).

    As `torch.nn.utils.clip_grad_norm_`, the factor is max_norm / (norm + 1e-6), at most 1.
    """
    parameters = list(parameters)
    norm = total_grad_norm(parameters, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if norm.device.type == "cpu" and not torch.compiler.is_compiling() and factor == 1:
        return norm  # an accelerator would have to be waited for
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            shard = local(p.grad)
            groups.setdefault((shard.dtype, shard.device), []).append(shard)
    for (dtype, device), members in groups.items():
        torch._foreach_mul_(members, factor.to(device, dtype))
    return norm
