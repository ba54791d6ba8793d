"""The feed-forward residual block. Tensors are (B, H, W, C)."""

from __future__ import annotations

from torch import Tensor, nn

from credit_like.nn import kernels
from credit_like.nn.linear import Linear
from credit_like.nn.norms import ChannelNorm


class FeedForward(nn.Module):
    """x + contract(GELU(expand(norm(x)))), width C -> 4 C -> C."""

    _tp_col = ("expand",)
    _tp_row = ("contract",)

    def __init__(self, dim: int, *, spectral_norm: bool = False) -> None:
        super().__init__()
        self.norm = ChannelNorm(dim)
        self.expand = Linear(dim, 4 * dim, spectral_norm=spectral_norm)
        self.contract = Linear(4 * dim, dim, spectral_norm=spectral_norm)

    def is_fused(self, x_BHWC: Tensor) -> bool:
        """Whether this is one function, which knows what it needs for backward."""
        return type(self.expand) is Linear and type(self.contract) is Linear and kernels.use_fused(x_BHWC)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """(B, H, W, C) to (B, H, W, C)."""
        if self.is_fused(x_BHWC):
            weight, factor = self.expand.factors()
            contract = (*self.contract.factors(), self.contract.bias)
            return kernels.feed_forward_block(x_BHWC, self.norm.times(factor), (weight, self.expand.bias), contract)
        return x_BHWC + self.contract(nn.functional.gelu(self.expand(self.norm(x_BHWC))))
