"""The place of a layer's input in the whole image, for layers whose numbers depend on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Which rows (or columns) of the whole image the input of a layer has: by default all of them.

    They are `count` ranges of one length, whose starts are `apart`, the first of them at `first`.
    """

    first: int = 0
    whole: int = 0
    """The size of the whole image along this axis; 0 if it is that of the input."""
    count: int = 1
    apart: int = 0

    def indices(self, size: int, device: torch.device) -> Tensor:
        """Return the numbers (size,) of the input's rows in the whole image, int64."""
        starts = self.first + self.apart * torch.arange(self.count, device=device)
        return (starts[:, None] + torch.arange(size // self.count, device=device)).flatten()


WHOLE = (Place(), Place())
"""The places of an input that has all rows and all columns."""


def points(places: tuple[Place, Place], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return the numbers (H, W) of the input's points in the whole image, int64, for an input of this shape."""
    rows_H, columns_W = (place.indices(size, device) for place, size in zip(places, shape, strict=True))
    return rows_H[:, None] * (places[1].whole or shape[1]) + columns_W
