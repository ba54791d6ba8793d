"""Bilinear resize of an image (B, C, H, W)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def bilinear(x_BCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Interpolate to `size` = (height, width) with align_corners=False, in float64.

    In float32 PyTorch computes the coordinates of the points in float32 too. Their rounding error grows with the number of
    rows and columns, and at 100 rows it exceeds that of the values.
    """
    wide = x_BCHW.to(torch.float64)
    return nn.functional.interpolate(wide, size=size, mode="bilinear", align_corners=False).to(x_BCHW.dtype)


class BilinearResize(nn.Module):
    """Bilinear interpolation to (height, width) with align_corners=False; the identity if the sizes agree."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, C, height, width)."""
        if x_BCHW.shape[-2:] == (self.height, self.width):
            return x_BCHW
        return bilinear(x_BCHW, (self.height, self.width))
