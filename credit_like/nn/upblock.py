"""The decoder's blocks, each of which doubles height and width. Tensors are (B, H, W, C)."""

from __future__ import annotations

from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.conv import Conv2d, ConvTranspose2d
from credit_like.nn.layer import Layer
from credit_like.nn.norms import GroupNorm

UPSAMPLE = ("pixel_shuffle", "transpose")


class Refine(nn.Module):
    """SiLU(GroupNorm(conv(x))), twice."""

    def __init__(self, channels: int, groups: int, *, spectral_norm: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList(Conv2d(channels, channels, spectral_norm=spectral_norm) for _ in range(2))
        self.norms = nn.ModuleList(GroupNorm(groups, channels) for _ in range(2))

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Apply the block to (B, H, W, C); the shape stays the same."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            assert isinstance(norm, GroupNorm)
            x_BHWC = ops.norm_silu(conv(x_BHWC), norm)
        return x_BHWC


class UpBlock(Layer):
    """A block of the decoder: (B, H, W, in) to (B, 2H, 2W, out).

    pixel_shuffle: y = shuffle(conv(x)), y <- y + sharp(y), y + refine(y). transpose: y = transposed conv(x), y +
    refine(y).
    """

    shard_unit = True
    recompute = "kernels"  # save only the images between the convolutions, which are the most expensive to recompute

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        groups: int,
        *,
        upsample: str = "pixel_shuffle",
        spectral_norm: bool = False,
    ) -> None:
        super().__init__()
        assert upsample in UPSAMPLE, upsample
        self.upsample = upsample
        if upsample == "pixel_shuffle":
            self.up: nn.Module = Conv2d(in_channels, 4 * out_channels, subpixel=2, spectral_norm=spectral_norm)
            self.sharp = Conv2d(out_channels, out_channels, spectral_norm=spectral_norm)
        else:
            self.up = ConvTranspose2d(in_channels, out_channels, 2, spectral_norm=spectral_norm)
        self.refine = Refine(out_channels, groups, spectral_norm=spectral_norm)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, H, W, in) to (B, 2H, 2W, out)."""
        y_BHWC = self.up(x_BHWC)
        if self.upsample == "pixel_shuffle":
            y_BHWC = ops.pixel_shuffle(y_BHWC, 2)
            y_BHWC = y_BHWC + self.sharp(y_BHWC)
        return y_BHWC + self.refine(y_BHWC)


class UpHead(Layer):
    """The last block: (B, H, W, in) to (B, 2H, 2W, out), without normalisation.

    pixel_shuffle: conv(shuffle(conv(x))), with `hidden` channels between the two, by default as many as the output.
    transpose: one transposed convolution 4 x 4, stride 2, padding 1.
    """

    shard_unit = True
    recompute = "never"  # backward starts here, so everything that was not saved would be recomputed at once
    full_precision = True  # its output is the predicted field

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden: int | None = None,
        upsample: str = "pixel_shuffle",
        spectral_norm: bool = False,
    ) -> None:
        super().__init__()
        assert upsample in UPSAMPLE, upsample
        self.upsample = upsample
        if upsample == "pixel_shuffle":
            hidden = hidden or out_channels
            self.up: nn.Module = Conv2d(in_channels, 4 * hidden, subpixel=2, spectral_norm=spectral_norm)
            self.last = Conv2d(hidden, out_channels, spectral_norm=spectral_norm)
        else:
            self.up = ConvTranspose2d(in_channels, out_channels, 4, padding=1, spectral_norm=spectral_norm)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, H, W, in) to (B, 2H, 2W, out)."""
        y_BHWC = self.up(x_BHWC)
        return self.last(ops.pixel_shuffle(y_BHWC, 2)) if self.upsample == "pixel_shuffle" else y_BHWC
