"""Domain layers of the decoder's convolutions. Tensors are (B, H, W, C)."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor

from credit_like import ops
from credit_like.bands import Level
from credit_like.nn import conv
from credit_like.parallel.domain.layer import DomainLayer, domain_layer
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.rows import ZERO, RowPlan
from credit_like.parallel.domain.rules import Rows


def window_rows(start: int, stop: int, height: int, kernel: int, stride: int, before: int) -> list[int]:
    """Return the input rows that output rows [start, stop) of a convolution read; ZERO outside the image."""
    rows = range(start * stride - before, (stop - 1) * stride - before + kernel)
    return [row if 0 <= row < height else ZERO for row in rows]


@domain_layer(conv.Conv2d)
class DomainConv2d(DomainLayer, conv.Conv2d):
    """3 x 3 convolution on a band.

    One exchange fetches one halo row from either side (zeros at the poles) and moves to the bands of the output. Before
    a pixel shuffle the output bands are those of the shuffled image, divided by the factor.
    """

    plan: RowPlan

    def levels(self, _height_in: int, height_out: int) -> list[Level]:
        return [Level(height_out * self.subpixel, self.subpixel, why="pixel shuffle")] if self.subpixel > 1 else []

    def rows_out(self, height_out: int) -> Rows:
        """Return the bands of the shuffled image, divided by the factor."""
        return Rows(1, height_out * self.subpixel, share=Fraction(1, self.subpixel))

    def bind(self, manager: DomainManager, height_in: int, height_out: int) -> None:
        factor = self.subpixel
        outputs = [(start // factor, stop // factor) for start, stop in manager.bands(height_out * factor)]
        want = [window_rows(start, stop, height_in, 3, 1, 1) for start, stop in outputs]
        self._set(manager, plan=manager.plan(manager.lists(height_in), want))

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, h, W, in) to (B, this rank's rows, W, out)."""
        x_BHWC = self.manager.fetch(x_BHWC, self.plan, 1)
        weight = self.effective_weight()
        return ops.conv3x3(x_BHWC, weight, self.bias, pad_rows=(0, 0), layer=self)


@domain_layer(conv.ConvTranspose2d)
class DomainConvTranspose2d(DomainLayer, conv.ConvTranspose2d):
    """Transposed convolution on a band.

    One exchange fetches the input rows that contribute to this rank's output rows; output rows beyond these are
    cropped.
    """

    plan: RowPlan

    def bind(self, manager: DomainManager, height_in: int, height_out: int) -> None:
        want = [list(range(*self._inputs(band, height_in))) for band in manager.bands(height_out)]
        start, stop = manager.own(height_out)
        first, end = self._inputs((start, stop), height_in)
        top = first * self.stride - self.padding
        bottom = top + (end - 1 - first) * self.stride + self.kernel
        self.crop_rows = (start - top, bottom - stop)
        self._set(manager, plan=manager.plan(manager.lists(height_in), want))

    def _inputs(self, band: tuple[int, int], height_in: int) -> tuple[int, int]:
        """Return the input rows [first, end) that contribute to these output rows."""
        first = math.ceil((band[0] + self.padding - self.kernel + 1) / self.stride)
        end = (band[1] - 1 + self.padding) // self.stride + 1
        return max(first, 0), min(end, height_in)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, h, W, in) to (B, this rank's rows, stride W + k - stride - 2 padding, out)."""
        x_BHWC = self.manager.fetch(x_BHWC, self.plan, 1)
        crop = (self.padding, self.padding)
        weight = self.effective_weight()
        return ops.conv_transpose(x_BHWC, weight, self.bias, self.stride, crop_rows=self.crop_rows, crop_cols=crop)
