"""Description of the communication of a dispatched collective: kind, group and bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from credit_like.parallel.ddp import apply_ddp

_KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}

_BUCKET_BYTES = 25 * 2**20
"""DDP's default size of a bucket."""


class Message(NamedTuple):
    """One collective; `bytes` is the size of the whole tensor that this rank gathers, reduces or sends.

    all-gather: the gathered tensor; reduce-scatter and all-reduce: the tensor that is reduced; all-to-all: what this
    rank sends; broadcast: the tensor. `waits`: whether the next operation needs the result immediately.
    """

    kind: str
    ranks: tuple[int, ...]
    bytes: int
    waits: bool


def kind_of(func: Any) -> str | None:
    """Return the kind of collective of a dispatched operation; None if it is not a collective."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    return _KINDS.get(func.name().partition("::")[2].partition(".")[0])


def wraps_others(types: Iterable[type]) -> bool:
    """Return whether an operation on these (sharded or awaited) types is dispatched again on local tensors."""
    return any(map(_wraps_others, types))


@functools.cache
def _wraps_others(kind: type) -> bool:
    return issubclass(kind, DTensor | AsyncCollectiveTensor)


def message(kind: str, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> Message:
    """Return the message of a dispatched collective."""
    group = _group(args, kwargs)
    sizes = [
        leaf.numel() * leaf.element_size() for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)
    ]
    if kind == "all-to-all":
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(args[:2]) if isinstance(leaf, Tensor)]
        size = sizes[-1]
    else:
        size = max(sizes, default=0)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Message(kind, ranks, size, waits=func.namespace == "_c10d_functional")


def _group(args: tuple[Any, ...], kwargs: Any) -> dist.ProcessGroup:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, dist.ProcessGroup):
            return leaf
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
    for leaf in reversed(tree_leaves((args, kwargs))):
        if isinstance(leaf, str) and leaf not in ("sum", "avg", "max", "min"):
            return _resolve_process_group(cast(GroupName, leaf))
    raise AssertionError("a collective without a group")


def apply_simulated_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply DDP in a group without peers: compare nothing, and send buckets through the same all-reduce.

    The fake group returns immediately and gives DDP's reducer no result to wait for, so a hook returns the bucket.
    """

    def reduced(world: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(world)
        dist.all_reduce(buffer, group=mesh.get_group(), async_op=True)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    # The hook's annotations are checked and must be types rather than their names.
    reduced.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    with _meshes_of_real_tensors(), _arranged_buckets():
        wrapped = apply_ddp(model, mesh, compare=False)
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(mesh.size(), reduced)
    return wrapped


@contextmanager
def _arranged_buckets() -> Iterator[None]:
    """Let simulated DDP begin with the buckets that real ranks arrange together in the first step."""
    assign = dist._compute_bucket_assignment_by_size
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, _BUCKET_BYTES]

    def arranged(parameters: list[Tensor], _limits: list[int], sparse: list[bool]) -> tuple[list[Any], list[Any]]:
        indices, sizes = assign(parameters, limits, sparse)
        return indices[::-1], sizes[::-1]  # DDP reverses them, as it takes parameters to be in the order of forward

    dist._compute_bucket_assignment_by_size = arranged  # type: ignore[assignment]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = assign


@contextmanager
def _meshes_of_real_tensors() -> Iterator[None]:
    """Let torch concatenate meshes outside of the simulation.

    DDP of parameters that are split over tensor ranks does so, and looks up the coordinates of this rank in the values.
    """
    concatenate = DeviceMesh._concatenate

    def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
        with _disable_current_modes():
            return concatenate(meshes)

    DeviceMesh._concatenate = staticmethod(concatenated)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign]


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Create a process group of `world` ranks without peers, whose collectives return arbitrary values at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if world > 1:
            dist.destroy_process_group()
