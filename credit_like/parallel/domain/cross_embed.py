"""Domain layer of the cross-embedding layer. Tensors are (B, H, W, C)."""

from __future__ import annotations

from torch import Tensor

from credit_like import ops
from credit_like.nn import cross_embed
from credit_like.parallel.domain.conv import window_rows
from credit_like.parallel.domain.layer import DomainLayer, domain_layer
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.rows import RowPlan


@domain_layer(cross_embed.CrossEmbed)
class DomainCrossEmbed(DomainLayer, cross_embed.CrossEmbed):
    """Cross-embedding on a band, with one exchange for all kernels.

    The exchange fetches the halo of the widest kernel, from as many neighbours as it reaches, and moves from the bands
    of the input to those of the output.
    """

    plan: RowPlan

    def bind(self, manager: DomainManager, height_in: int, height_out: int) -> None:
        widest = self.kernel_sizes[-1]
        before, _ = cross_embed.zero_padding(widest, self.stride)
        want = [window_rows(*band, height_in, widest, self.stride, before) for band in manager.bands(height_out)]
        self._set(manager, plan=manager.plan(manager.lists(height_in), want))

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, h, W, C) to (B, this rank's rows, floor(W/s), dim)."""
        x_BHWC = self.manager.fetch(x_BHWC, self.plan, 1)
        columns = cross_embed.zero_padding(self.kernel_sizes[-1], self.stride)
        return ops.cross_embed(x_BHWC, *self.weights(), self.stride, pad_rows=(0, 0), pad_cols=columns, layer=self)
