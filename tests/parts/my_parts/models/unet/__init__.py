"""A small U-Net: two levels down, two up, one skip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.schema.base import Section

if TYPE_CHECKING:
    from torch import nn


class Config(Section):
    type: Literal["unet"] = "unet"
    dim: int = Field(default=8, ge=4)
    predict: Literal["increment", "state"] = "increment"

    def check(self, height: int, width: int, *, in_channels: int = 1, out_channels: int = 1) -> list[str]:
        """Both axes are halved twice, and doubled again."""
        sizes = {"rows": height, "columns": width}
        return [f"expected a multiple of 4 {axis}, got {size}" for axis, size in sizes.items() if size % 4]


def build(config: Config, *, in_channels: int, out_channels: int, frames: int, height: int, width: int) -> nn.Module:
    """(B, in_channels, frames, height, width) to (B, out_channels, 1, height, width)."""
    from .model import UNet

    return UNet(config.dim, in_channels, out_channels, frames, height, width)
