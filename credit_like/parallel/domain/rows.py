"""Row exchange, the one primitive of domain parallelism: each rank has some rows of an image and needs others.

Halos, poles, the strides of long attention, re-partitioning, unpadding and resizing are all lists of wanted rows. A
list may repeat rows, name them in any order, and request rows of zeros. The exchange is one all-to-all of exactly the
rows that are needed on other ranks; rows that a rank already has are copied locally. Its derivative is the reverse
exchange.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from credit_like.parallel.collectives import arrived, begin_all_to_all

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
    here: tuple[tuple[RowRun, ...], ...]
    """The runs of own rows and of zeros, which need no other rank; single rows that are neighbours in the output are together."""
    there: tuple[tuple[RowRun, ...], ...]
    """The other runs."""
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
    runs = _runs(pieces)
    together = [
        tuple(group)
        for _, group in itertools.groupby(runs, lambda run: (run.source, run.out if run.length > 1 else None))
    ]
    travels = any(row != ZERO and owner[row][0] != d for d, rows in enumerate(want) for row in rows)
    return RowPlan(
        rank=rank,
        rows_in=len(have[rank]),
        rows_out=len(want[rank]),
        sends=tuple(_lengths(indices) for indices in travelling),
        receives=tuple(len(indices) for indices in arriving),
        runs=tuple(runs),
        here=tuple(group for group in together if group[0].source in (rank, ZERO)),
        there=tuple(group for group in together if group[0].source not in (rank, ZERO)),
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
        flying = _begin([_take(x, runs, dim) for runs in plan.sends], plan.receives, plan, group, dim)
        order, inverse = _memory_order(x)
        if torch.compiler.is_compiling() and plan.runs:
            # One kernel joins all rows and what surrounds the exchange; writes in place would be further kernels.
            parts = [*_end(flying, plan.receives, x, dim)]
            parts[plan.rank] = x
            pieces = [
                x.new_zeros(_shape(x.shape, dim, run.length))
                if run.source == ZERO
                else _rows(parts[run.source], dim, run)
                for run in plan.runs
            ]
            return torch.cat([piece.permute(order) for piece in pieces], order.index(dim)).permute(inverse)
        y = x.new_empty([_shape(x.shape, dim, plan.rows_out)[d] for d in order]).permute(inverse)
        for runs in plan.here:
            _fill(y, x, runs, dim)
        parts = _end(flying, plan.receives, x, dim)
        for runs in plan.there:
            _fill(y, parts[runs[0].source], runs, dim)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        plan, dim = ctx.plan, ctx.dim
        parts = [grad.new_zeros(_shape(ctx.shape, dim, rows)) for rows in plan.receives]
        for run in itertools.chain(*plan.there):
            _rows(parts[run.source], dim, run).add_(grad.narrow(dim, run.out, run.length))
        counts = [sum(length for _, length in runs) for runs in plan.sends]
        flying = _begin(parts, counts, plan, ctx.group, dim)
        order, inverse = _memory_order(grad)
        own = grad.new_zeros([ctx.shape[d] for d in order]).permute(inverse)
        for run in itertools.chain(*plan.here):
            if run.source != ZERO:
                _rows(own, dim, run).add_(grad.narrow(dim, run.out, run.length))
        for runs, part in zip(plan.sends, _end(flying, counts, own, dim), strict=True):
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


def _rows(x: Tensor, dim: int, run: RowRun) -> Tensor:
    """Return the rows of a run in the piece that has them."""
    return x.narrow(dim, run.start, run.length)


def _fill(y: Tensor, x: Tensor, runs: Sequence[RowRun], dim: int) -> None:
    """Write runs of one piece to neighbouring rows of the output."""
    rows = y.narrow(dim, runs[0].out, sum(run.length for run in runs))
    if runs[0].source == ZERO:
        rows.zero_()
    elif len(runs) == 1:
        rows.copy_(_rows(x, dim, runs[0]))
    else:
        rows.copy_(torch.cat([_rows(x, dim, run) for run in runs], dim))


def _begin(
    parts: Sequence[Tensor], rows: Sequence[int], plan: RowPlan, group: ProcessGroup | None, dim: int
) -> Tensor | None:
    """Begin to send parts[d] to rank d and to receive `rows[s]` rows from rank s; None if nothing travels."""
    if not plan.travels:
        return None
    assert group is not None
    sent = [part.numel() for part in parts]
    per_row = math.prod(_shape(parts[0].shape, dim, 1))
    return begin_all_to_all(torch.cat([part.reshape(-1) for part in parts]), [n * per_row for n in rows], sent, group)


def _end(flying: Tensor | None, rows: Sequence[int], like: Tensor, dim: int) -> list[Tensor]:
    """Wait for the exchange that was begun and return the parts from all ranks, of `rows[s]` rows each."""
    shapes = [_shape(like.shape, dim, n) for n in rows]
    if flying is None:
        return [like.new_empty(shape) for shape in shapes]
    return [
        part.view(shape)
        for part, shape in zip(arrived(flying).split(list(map(math.prod, shapes))), shapes, strict=True)
    ]


def fetch_rows(x: Tensor, plan: RowPlan, group: ProcessGroup | None, dim: int) -> Tensor:
    """Return the rows that the plan's rank wants, along `dim`, in the same memory order of dimensions.

    Collective over `group` unless nothing travels. Differentiable.
    """
    assert x.shape[dim] == plan.rows_in, f"expected {plan.rows_in} rows, got {x.shape[dim]} of {tuple(x.shape)}"
    if plan.identity:
        return x
    y: Tensor = _Fetch.apply(x, plan, group, dim % x.ndim)
    return y
