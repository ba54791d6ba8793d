"""The feed-forward residual block. Tensors are (B, H, W, C)."""

from __future__ import annotations

from torch import Tensor

from credit_like import ops
from credit_like.nn.layer import Layer
from credit_like.nn.linear import Linear
from credit_like.nn.norms import ChannelNorm


class FeedForward(Layer):
    """x + contract(GELU(expand(norm(x)))), width C -> 4 C -> C."""

    tensor_columns = ("expand",)
    tensor_rows = ("contract",)

    def __init__(self, dim: int, *, spectral_norm: bool = False) -> None:
        super().__init__()
        self.norm = ChannelNorm(dim)
        self.expand = Linear(dim, 4 * dim, spectral_norm=spectral_norm)
        self.contract = Linear(4 * dim, dim, spectral_norm=spectral_norm)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Apply the block to (B, H, W, C); the shape stays the same."""
        return ops.feed_forward_block(x_BHWC, self.norm, self.expand, self.contract)
