"""Bilinear resize of an image (B, C, H, W)."""

from __future__ import annotations

from torch import Tensor, nn


class BilinearResize(nn.Module):
    """Bilinear interpolation to (height, width) with align_corners=False; the identity if the sizes agree."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, h, w) to (B, C, height, width)."""
        if x_BCHW.shape[-2:] == (self.height, self.width):
            return x_BCHW
        return nn.functional.interpolate(x_BCHW, size=(self.height, self.width), mode="bilinear", align_corners=False)
