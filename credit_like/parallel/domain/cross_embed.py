"""Domain layer of the cross-embedding layer. Tensors are (B, H, W, C)."""

from __future__ import annotations

from torch import Tensor

from credit_like import ops
from credit_like.nn import cross_embed
from credit_like.parallel.domain.conv import window_rows
from credit_like.parallel.domain.layer import DomainLayer, domain_layer
from credit_like.parallel.domain.manager import Axis
from credit_like.parallel.domain.rows import RowPlan


@domain_layer(cross_embed.CrossEmbed)
class DomainCrossEmbed(DomainLayer, cross_embed.CrossEmbed):
    """Cross-embedding on a band, with one exchange along each axis for all kernels.

    The exchange fetches the halo of the widest kernel, from as many neighbours as it reaches, and moves from the bands
    of the input to those of the output.
    """

    def plan(self, axis: Axis, size_in: int, size_out: int) -> RowPlan:
        widest = self.kernel_sizes[-1]
        before, _ = cross_embed.zero_padding(widest, self.stride)
        want = [window_rows(*band, size_in, widest, self.stride, before) for band in axis.bands(size_out)]
        return axis.plan(axis.lists(size_in), want)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, h, w, C) to (B, this rank's rows, this rank's columns, dim)."""
        zeros = cross_embed.zero_padding(self.kernel_sizes[-1], self.stride)
        x_BHWC = self.fetch(x_BHWC)
        pad_rows, pad_cols = self.rest(zeros, zeros)
        return ops.cross_embed(x_BHWC, *self.weights(), self.stride, pad_rows=pad_rows, pad_cols=pad_cols, layer=self)
