"""The module that supplies a correction with the global mean, in double precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.nn.area import AreaMean, identity
from credit_like.variables import Variables

Mean = Callable[[Tensor], Tensor]
Correct = Callable[[Tensor, Tensor, Mean], Tensor]
"""(after, before, mean) → corrected; `mean` turns (B, H, W) into the global mean (B, 1, 1), float64."""


class Fix(nn.Module):
    """Module that calls `correct` with the area mean over the points that have data in every predicted channel."""

    def __init__(
        self,
        correct: Correct,
        variables: Variables,
        store: FieldStore,
        statistics: Statistics,
        rows: slice = slice(None),
        reduce: Callable[[Tensor], Tensor] = identity,
    ) -> None:
        super().__init__()
        self.correct = correct
        valid = torch.from_numpy(statistics.mask(variables.outputs).all(0))
        weights = torch.from_numpy(store.grid.latitude_weights())[:, None] * valid
        self.area = AreaMean(weights, rows, reduce)

    def forward(self, after_BCHW: Tensor, before_BCHW: Tensor) -> Tensor:
        return self.correct(after_BCHW, before_BCHW, self._mean)

    def _mean(self, x_BHW: Tensor) -> Tensor:
        # The mean of pressures of 1e5 Pa must hold to 1e-3 Pa, which exceeds the seven digits of float32.
        mean: Tensor = self.area(x_BHW.double()[:, None])
        return mean[:, 0, None, None]
