"""Area-weighted means, the only reduction of fields to numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from credit_like.errors import UserError


def identity(x: Tensor) -> Tensor:
    """Return x: the sum over ranks in a run of one process."""
    return x


def _without_copies(weights: Tensor) -> Tensor:
    """Return the weights with every dimension along which they are constant reduced to size 1.

    A mask that is true everywhere leaves one number for each latitude.
    """
    for dim in range(weights.ndim):
        first = weights.narrow(dim, 0, 1)
        if dim != weights.ndim - 2 and bool((weights == first).all()):
            weights = first
    return weights.clone()


class AreaMean(nn.Module):
    """Weighted mean over latitude and longitude of the points that have data.

    `weights` (H, W) or (C, H, W): area weight × validity, for the whole grid; `rows` and `columns` select this rank's part.
    Where they have one value along a row, or 0 at points without data, that value and a mask are all that is held of them.
    Each rank computes its part of the mean (local sum over the global denominator); `reduce` adds the parts where the global
    mean is needed.

    Missing values follow WeatherBench2: a point without data has weight zero and never counts as a zero error. Raises UserError
    for a channel without data.
    """

    weights: Tensor
    precise: Tensor
    """The weights in float64, on the device of the fields, for sums in float64."""
    valid: Tensor | None
    """Mask of the points that have data, if the weights do not contain it."""

    def __init__(
        self,
        weights: Tensor,
        rows: slice = slice(None),
        reduce: Callable[[Tensor], Tensor] = identity,
        columns: slice = slice(None),
    ) -> None:
        super().__init__()
        weights = weights.double()
        total = weights.sum((-2, -1), keepdim=True)
        if not bool((total > 0).all()):
            raise UserError("expected every channel to have data somewhere, got a channel without any; check the mask")
        weights = (weights / total)[..., rows, columns]
        there = weights > 0
        of_rows = weights.amax(-1, keepdim=True)
        apart = not bool(there.all()) and bool(((weights == of_rows) | ~there).all())
        weights = _without_copies(of_rows if apart else weights)
        self.register_buffer("valid", _without_copies(there) if apart else None, persistent=False)
        self.register_buffer("weights", weights.to(torch.float32), persistent=False)
        self.register_buffer("precise", weights, persistent=False)
        self.reduce = reduce

    def part(self, x_BCHW: Tensor) -> Tensor:
        """Return this rank's part of the mean, (B, C); differentiable and without communication."""
        weights = self.weights if x_BCHW.dtype != torch.float64 else self.precise
        valid = weights > 0 if self.valid is None else self.valid
        return (torch.where(valid, x_BCHW, 0) * weights).sum((-2, -1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the mean over the whole grid, (B, C), on every rank."""
        return self.reduce(self.part(x_BCHW))
