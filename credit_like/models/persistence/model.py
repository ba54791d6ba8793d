"""The model that predicts no change."""

from __future__ import annotations

from torch import Tensor, nn


class Persistence(nn.Module):
    """A model whose increments are zero; each diagnostic output is its climatological mean."""

    def __init__(self, *, in_channels: int, out_channels: int, frames: int, height: int, width: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.frames = in_channels, out_channels, frames
        self.height, self.width = height, width

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Return zeros of shape (B, out_channels, 1, H, W) for an input (B, C, T, H, W)."""
        batch, _, _, height, width = x_BCTHW.shape
        return x_BCTHW.new_zeros(batch, self.out_channels, 1, height, width)
