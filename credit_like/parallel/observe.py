"""What an operation sends: its kind, its group and its bytes, for those who count."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

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


class Message(NamedTuple):
    """A collective: `bytes` are those of the whole tensor that is gathered, reduced or sent away by this rank.

    all-gather: the gathered tensor; reduce-scatter and all-reduce: the tensor that is reduced; all-to-all: what this
    rank gives away; broadcast: the tensor. `waits` says that the next operation needs the result at once.
    """

    kind: str
    ranks: tuple[int, ...]
    bytes: int
    waits: bool


def kind_of(func: Any) -> str | None:
    """The kind of collective that a dispatched operation is, None where it is none."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    return _KINDS.get(func.name().partition("::")[2].partition(".")[0])


def wraps_others(types: Iterable[type]) -> bool:
    """Whether an operation is on sharded or awaited tensors, and comes again as operations on what this rank holds."""
    return any(map(_wraps_others, types))


@functools.cache
def _wraps_others(kind: type) -> bool:
    return issubclass(kind, DTensor | AsyncCollectiveTensor)


def message(kind: str, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> Message:
    """What a dispatched collective sends."""
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


@contextmanager
def simulated_ddp() -> Iterator[None]:
    """DistributedDataParallel without peers: nothing is compared with them, and buckets go through the same all-reduce.

    A group that answers at once gives its reducer no result to wait for, so a hook hands the bucket back.
    """
    from torch.nn.parallel import distributed

    def reduced(world: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(world)
        dist.all_reduce(buffer)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    # It looks at the types of a hook, which have to be types and not their names.
    reduced.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}

    def build(wrapper: Any, *arguments: Any, **options: Any) -> None:
        original(wrapper, *arguments, **options)
        wrapper.register_comm_hook(dist.get_world_size(wrapper.process_group), reduced)

    original = distributed.DistributedDataParallel.__init__
    replaced: list[tuple[Any, str, Any]] = [
        (distributed, "_verify_param_shape_across_processes", lambda *_: None),
        (distributed, "_sync_module_states", lambda *_, **__: None),
        (distributed.DistributedDataParallel, "__init__", build),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """A process group of `world` ranks without peers: every collective returns at once, with any values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if world > 1:
            dist.destroy_process_group()
