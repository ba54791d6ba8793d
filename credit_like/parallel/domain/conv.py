"""Domain layers of the decoder's convolutions. Tensors are (B, H, W, C)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor

from credit_like import ops
from credit_like.bands import Level
from credit_like.nn import conv
from credit_like.parallel.domain.layer import DomainLayer, Sizes, domain_layer
from credit_like.parallel.domain.manager import Axis, DomainManager
from credit_like.parallel.domain.rows import ZERO, RowPlan
from credit_like.parallel.domain.rules import Rows


def window_rows(start: int, stop: int, height: int, kernel: int, stride: int, before: int) -> list[int]:
    """Return the input rows (or columns) that outputs [start, stop) of a convolution read; ZERO outside the image."""
    rows = range(start * stride - before, (stop - 1) * stride - before + kernel)
    return [row if 0 <= row < height else ZERO for row in rows]


@domain_layer(conv.Conv2d)
class DomainConv2d(DomainLayer, conv.Conv2d):
    """3 x 3 convolution on a band.

    One exchange along each axis fetches one halo row (or column) from either side, zeros at the edges of the image, and
    moves to the bands of the output. Before a pixel shuffle the output bands are those of the shuffled image, divided by
    the factor.
    """

    def levels(self, _size_in: int, size_out: int) -> list[Level]:
        return [Level(size_out * self.subpixel, self.subpixel, why="pixel shuffle")] if self.subpixel > 1 else []

    def rows_out(self, size_out: int, axis: int) -> Rows:
        """Return the bands of the shuffled image, divided by the factor."""
        return Rows(DomainConv2d.row_dim + axis, size_out * self.subpixel, share=Fraction(1, self.subpixel))

    def plan(self, axis: Axis, size_in: int, size_out: int) -> RowPlan:
        factor = self.subpixel
        outputs = [(start // factor, stop // factor) for start, stop in axis.bands(size_out * factor)]
        want = [window_rows(start, stop, size_in, 3, 1, 1) for start, stop in outputs]
        return axis.plan(axis.lists(size_in), want)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, h, w, in) to (B, this rank's rows, this rank's columns, out)."""
        x_BHWC = self.fetch(x_BHWC)
        pad_rows, pad_cols = self.rest((1, 1), (1, 1))
        weight = self.effective_weight()
        return ops.conv3x3(x_BHWC, weight, self.bias, pad_rows=pad_rows, pad_cols=pad_cols, layer=self)


@domain_layer(conv.ConvTranspose2d)
class DomainConvTranspose2d(DomainLayer, conv.ConvTranspose2d):
    """Transposed convolution on a band.

    One exchange along each axis fetches the input rows (or columns) that contribute to this rank's output; what lies beyond
    is cropped.
    """

    crops: tuple[tuple[int, int], ...]

    def plan(self, axis: Axis, size_in: int, size_out: int) -> RowPlan:
        want = [list(range(*self._inputs(band, size_in))) for band in axis.bands(size_out)]
        return axis.plan(axis.lists(size_in), want)

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        super().bind(manager, sizes)
        crops = [
            self._crop(axis.own(of[1]), of[0]) if of else (self.padding, self.padding)
            for axis, of in zip(manager.axes, sizes, strict=True)
        ]
        self._set(manager, crops=tuple(crops))

    def _crop(self, band: tuple[int, int], size_in: int) -> tuple[int, int]:
        """Return the number of points before and after the band of the output that the fetched inputs give as well."""
        first, end = self._inputs(band, size_in)
        top = first * self.stride - self.padding
        bottom = top + (end - 1 - first) * self.stride + self.kernel
        return band[0] - top, bottom - band[1]

    def _inputs(self, band: tuple[int, int], size_in: int) -> tuple[int, int]:
        """Return the inputs [first, end) that contribute to these outputs."""
        first = math.ceil((band[0] + self.padding - self.kernel + 1) / self.stride)
        end = (band[1] - 1 + self.padding) // self.stride + 1
        return max(first, 0), min(end, size_in)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, h, w, in) to (B, this rank's rows, this rank's columns, out)."""
        x_BHWC = self.fetch(x_BHWC)
        weight = self.effective_weight()
        crop_rows, crop_cols = self.crops
        return ops.conv_transpose(x_BHWC, weight, self.bias, self.stride, crop_rows=crop_rows, crop_cols=crop_cols)
