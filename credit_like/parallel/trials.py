"""The collectives of training, to be issued and timed one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from credit_like.parallel.collectives import all_to_all, sum_over

Trial = tuple[str, int, int]
"""Kind, number of ranks, and bytes as `observe.Message` has them."""


def trials(sizes: Sequence[int]) -> Iterator[tuple[Trial, Callable[[], object]]]:
    """Yield collectives of all ranks and, of an even number from four on, of pairs, and what issues each as training does.

    Training gathers, and scatters reduced gradients, as FSDP2 does; it sums and exchanges as tensor and domain ranks do.
    Collective: all ranks call it, and issue the same.
    """
    for group in _groups():
        n = group.size()
        for size in sizes:
            whole = torch.zeros(max(1, size // 4 // n) * n)
            mine, pieces = torch.zeros(len(whole) // n), [len(whole) // n] * n
            kinds: dict[str, Callable[[], object]] = {
                "all-reduce": partial(sum_over, whole, group),
                "all-to-all": partial(all_to_all, whole, pieces, pieces, group),
                "all-gather": partial(_gather, whole, mine, group),
                "reduce-scatter": partial(_scatter, mine, whole, group),
            }
            for kind, issue in kinds.items():
                yield (kind, n, whole.nbytes), issue


def reducing(parts: Sequence[Sequence[int]]) -> Callable[[Tensor], object]:
    """Return a function that sums a tensor, in place, over the ranks of this one's part. Collective: all ranks name all parts."""
    groups = [dist.new_group(list(part)) for part in parts]
    (mine,) = (group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part)
    return partial(dist.all_reduce, group=mine)


def _gather(whole: Tensor, mine: Tensor, group: ProcessGroup) -> None:
    dist.all_gather_single(whole, mine, group=group)


def _scatter(mine: Tensor, whole: Tensor, group: ProcessGroup) -> None:
    dist.reduce_scatter_single(mine, whole, group=group)


def _groups() -> list[ProcessGroup]:
    """Return the groups of this rank: all ranks, and perhaps a pair."""
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone = dist.group.WORLD
    assert everyone is not None
    if world < 4 or world % 2:
        return [everyone]
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    pair = pairs[rank // 2]
    assert isinstance(pair, ProcessGroup)
    return [everyone, pair]
