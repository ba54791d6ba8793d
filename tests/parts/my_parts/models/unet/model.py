"""The layers of credit_like, put together in another way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit_like.nn.cross_embed import CrossEmbed
from credit_like.nn.upblock import UpBlock, UpHead


class UNet(nn.Module):
    """x ── down ── e0 ── down ── up ─┬─ head ── y, with e0 joined at ┬."""

    def __init__(self, dim: int, in_channels: int, out_channels: int, frames: int, height: int, width: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.frames = in_channels, out_channels, frames
        self.height, self.width = height, width
        self.down = nn.ModuleList(
            [CrossEmbed(in_channels * frames, dim, (2, 4), 2), CrossEmbed(dim, 2 * dim, (2, 4), 2)]
        )
        self.up = UpBlock(2 * dim, dim, groups=2)
        self.head = UpHead(2 * dim, out_channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        x_BHWC = x_BCTHW.flatten(1, 2).movedim(1, -1)
        first = self.down[0](x_BHWC)
        again = self.up(self.down[1](first))
        return self.head(torch.cat([first, again], -1)).movedim(-1, 1)[:, :, None]
