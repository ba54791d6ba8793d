"""Means over the area of the grid: the only place where fields are reduced to numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from credit_like.errors import UserError


def identity(x: Tensor) -> Tensor:
    """What a sum over ranks is in one process."""
    return x


def _without_copies(weights: Tensor) -> Tensor:
    """Return the weights with one row, column or channel for what is the same in all: a mask that is true everywhere
    leaves one number for each latitude."""
    for dim in range(weights.ndim):
        first = weights.narrow(dim, 0, 1)
        if dim != weights.ndim - 2 and bool((weights == first).all()):
            weights = first
    return weights.clone()


class AreaMean(nn.Module):
    """Weighted mean over latitude, longitude of the points that have data.

    `weights` (H, W) or (C, H, W): area weight × validity, of the whole grid; `rows` are this rank's. Each rank gets
    its part of the mean (local sum over the global denominator); `reduce` adds the parts up where the whole is wanted.

    NaN policy of WeatherBench2: a point without data leaves the weights and never counts as a zero error.
    """

    weights: Tensor
    precise: Tensor
    """The weights in float64, for what is summed in float64; where the fields are."""

    def __init__(
        self, weights: Tensor, rows: slice = slice(None), reduce: Callable[[Tensor], Tensor] = identity
    ) -> None:
        super().__init__()
        weights = weights.double()
        total = weights.sum((-2, -1), keepdim=True)
        if not bool((total > 0).all()):
            raise UserError("expected every channel to have data somewhere, got a channel without any; check the mask")
        weights = _without_copies((weights / total)[..., rows, :])
        self.register_buffer("weights", weights.to(torch.float32), persistent=False)
        self.register_buffer("precise", weights, persistent=False)
        self.reduce = reduce

    def part(self, x_BCHW: Tensor) -> Tensor:
        """(B, C): this rank's part of the mean; differentiable, without communication."""
        weights = self.weights if x_BCHW.dtype != torch.float64 else self.precise
        return (torch.where(weights > 0, x_BCHW, 0) * weights).sum((-2, -1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, C): the mean over the whole grid, on every rank."""
        return self.reduce(self.part(x_BCHW))
