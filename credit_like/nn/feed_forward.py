"""The feed-forward residual block. Tensors are (B, H, W, C)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from credit_like import ops
from credit_like.nn.dropout import Dropout
from credit_like.nn.layer import Layer
from credit_like.nn.linear import Linear
from credit_like.nn.norms import ChannelNorm


class FeedForward(Layer):
    """x + contract(dropout(GELU(expand(norm(x))))), width C -> 4 C -> C."""

    tensor_columns = ("expand",)
    tensor_rows = ("contract",)

    def __init__(self, dim: int, *, spectral_norm: bool = False, dropout: float = 0.0, site: int = 0) -> None:
        super().__init__()
        self.norm = ChannelNorm(dim)
        self.expand = Linear(dim, 4 * dim, spectral_norm=spectral_norm)
        self.contract = Linear(4 * dim, dim, spectral_norm=spectral_norm)
        self.dropout = Dropout(dropout, site) if dropout else None

    def forward(self, x_BHWC: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Apply the block to (B, H, W, C); the shape stays the same. `key_B` selects what dropout drops."""
        if self.dropout is None:
            return ops.feed_forward_block(x_BHWC, self.norm, self.expand, self.contract)
        if key_B is None:
            # Domain parallelism learns the height of the layer from its call, which returns its input here.
            unchanged: Tensor = self.dropout(ops.feed_forward_block(x_BHWC, self.norm, self.expand, self.contract))
            return unchanged
        hidden = functional.gelu(self.expand(self.norm(x_BHWC)))
        return x_BHWC + self.contract(self.dropout(hidden, key_B=key_B, first_channel=self.expand.outputs.start))
