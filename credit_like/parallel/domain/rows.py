"""Row exchange, the one primitive of domain parallelism: each rank has some rows of an image and needs others.

Halos, poles, the strides of long attention, re-partitioning, unpadding and resizing are all lists of wanted rows. A
list may repeat rows, name them in any order, and request rows of zeros. The exchange is one all-to-all of exactly the
rows that are needed on other ranks; rows that a rank already has are copied locally. Its derivative is the reverse
exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from credit_like.parallel.collectives import all_to_all

ZERO = -1  # a wanted row of zeros


@dataclass(frozen=True)
class RowRun:
    """A run of consecutive rows: output rows from `out` are `length` rows from `start` of the piece from `source`.

    `source` is a rank, or ZERO for rows of zeros.
    """

    source: int
    start: int
    length: int
    out: int


@dataclass(frozen=True)
class RowPlan:
    """One rank's part in an exchange.

    sends[d]: runs (start, length) of own rows that are sent to rank d, in the order in which rank d stores them.
    receives[s]: number of rows from rank s. runs: how the output is assembled.
    """

    rank: int
    rows_in: int
    rows_out: int
    sends: tuple[tuple[tuple[int, int], ...], ...]
    receives: tuple[int, ...]
    runs: tuple[RowRun, ...]
    travels: bool
    """Whether any rank sends anything. All ranks have the same value, so either all communicate or none does."""

    @property
    def identity(self) -> bool:
        """Return whether the output equals the input on this rank without communication."""
        return (
            not self.travels and self.runs == (RowRun(self.rank, 0, self.rows_in, 0),) and self.rows_in == self.rows_out
        )


def make_plan(have: Sequence[Sequence[int]], want: Sequence[Sequence[int]], rank: int) -> RowPlan:
    """Return the plan of `rank`, given the lists of all ranks.

    Raises ValueError for a wanted row that no rank has.
    """
    owner: dict[int, tuple[int, int]] = {}
    for holder, rows in enumerate(have):
        for index, row in enumerate(rows):
            owner.setdefault(row, (holder, index))
    travelling = [_travelling(owner, wanted, rank, destination) for destination, wanted in enumerate(want)]
    arriving = [_travelling(owner, want[rank], s, rank) for s in range(len(have))]
    places = [{index: n for n, index in enumerate(indices)} for indices in arriving]
    pieces: list[tuple[int, int]] = []
    for row in want[rank]:
        if row == ZERO:
            pieces.append((ZERO, 0))
            continue
        if row not in owner:
            raise ValueError(f"expected only rows that some rank has, got {row}")
        source, index = owner[row]
        pieces.append((source, index if source == rank else places[source][index]))
    travels = any(row != ZERO and owner[row][0] != d for d, rows in enumerate(want) for row in rows)
    return RowPlan(
        rank=rank,
        rows_in=len(have[rank]),
        rows_out=len(want[rank]),
        sends=tuple(_lengths(indices) for indices in travelling),
        receives=tuple(len(indices) for indices in arriving),
        runs=tuple(_runs(pieces)),
        travels=travels,
    )


def _travelling(owner: dict[int, tuple[int, int]], wanted: Sequence[int], source: int, target: int) -> list[int]:
    """Return the local indices of the rows that `source` sends to `target`, ascending and without repetition."""
    if source == target:
        return []
    return sorted({owner[row][1] for row in wanted if row in owner and owner[row][0] == source})


def _lengths(indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending indices as runs (start, length)."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return tuple(runs)


def _runs(pieces: Sequence[tuple[int, int]]) -> list[RowRun]:
    """Join neighbouring output rows that are also neighbours at their source."""
    runs: list[RowRun] = []
    for out, (source, index) in enumerate(pieces):
        last = runs[-1] if runs else None
        if last is not None and last.source == source and (source == ZERO or last.start + last.length == index):
            runs[-1] = RowRun(source, last.start, last.length + 1, last.out)
        else:
            runs.append(RowRun(source, index, 1, out))
    return runs


class _Fetch(torch.autograd.Function):
    """Autograd function of `fetch_rows`.

    Rows are sent in the logical order of dimensions; local rows keep their memory order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: RowPlan, group: ProcessGroup | None, dim: int) -> Tensor:
        ctx.plan, ctx.group, ctx.dim, ctx.shape = plan, group, dim, x.shape
        parts = _exchange([_take(x, runs, dim) for runs in plan.sends], plan.receives, x, plan, group, dim)
        pieces = []
        for run in plan.runs:
            if run.source == ZERO:
                pieces.append(x.new_zeros(_shape(x.shape, dim, run.length)))
            else:
                pieces.append((x if run.source == plan.rank else parts[run.source]).narrow(dim, run.start, run.length))
        if not pieces:
            return x.new_empty(_shape(x.shape, dim, 0))
        order, inverse = _memory_order(x)
        return torch.cat([piece.permute(order) for piece in pieces], order.index(dim)).permute(inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        plan, dim = ctx.plan, ctx.dim
        order, inverse = _memory_order(grad)
        own = grad.new_zeros([ctx.shape[d] for d in order]).permute(inverse)
        parts = [grad.new_zeros(_shape(ctx.shape, dim, rows)) for rows in plan.receives]
        for run in plan.runs:
            if run.source != ZERO:
                target = own if run.source == plan.rank else parts[run.source]
                target.narrow(dim, run.start, run.length).add_(grad.narrow(dim, run.out, run.length))
        counts = [sum(length for _, length in runs) for runs in plan.sends]
        returned = _exchange(parts, counts, own, plan, ctx.group, dim)
        for runs, part in zip(plan.sends, returned, strict=True):
            at = 0
            for start, length in runs:
                own.narrow(dim, start, length).add_(part.narrow(dim, at, length))
                at += length
        return own, None, None, None


def _memory_order(x: Tensor) -> tuple[list[int], list[int]]:
    """Return the permutation that sorts the dimensions by descending stride, and its inverse."""
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))
    return order, [order.index(d) for d in range(x.ndim)]


def _shape(shape: torch.Size, dim: int, rows: int) -> list[int]:
    return [*shape[:dim], rows, *shape[dim + 1 :]]


def _take(x: Tensor, runs: Sequence[tuple[int, int]], dim: int) -> Tensor:
    """Return the rows of the runs along `dim`."""
    if not runs:
        return x.narrow(dim, 0, 0)
    return torch.cat([x.narrow(dim, start, length) for start, length in runs], dim)


def _exchange(
    parts: Sequence[Tensor], rows: Sequence[int], like: Tensor, plan: RowPlan, group: ProcessGroup | None, dim: int
) -> list[Tensor]:
    """Send parts[d] to rank d and return the parts received from all ranks, of `rows[s]` rows each."""
    shapes = [_shape(like.shape, dim, n) for n in rows]
    if not plan.travels:
        return [like.new_empty(shape) for shape in shapes]
    per_row = math.prod(_shape(like.shape, dim, 1))
    flat = torch.cat([part.reshape(-1) for part in parts])
    counts_out = [n * per_row for n in rows]
    assert group is not None
    got = all_to_all(flat, counts_out, [part.numel() for part in parts], group)
    return [part.view(shape) for part, shape in zip(got.split(counts_out), shapes, strict=True)]


def fetch_rows(x: Tensor, plan: RowPlan, group: ProcessGroup | None, dim: int) -> Tensor:
    """Return the rows that the plan's rank wants, along `dim`, in the same memory order of dimensions.

    Collective over `group` unless nothing travels. Differentiable.
    """
    assert x.shape[dim] == plan.rows_in, f"expected {plan.rows_in} rows, got {x.shape[dim]} of {tuple(x.shape)}"
    if plan.identity:
        return x
    y: Tensor = _Fetch.apply(x, plan, group, dim % x.ndim)
    return y
