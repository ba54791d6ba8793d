"""A linear map of the last dimension, optionally divided by its spectral norm."""

from __future__ import annotations

from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.layer import Layer
from credit_like.nn.spectral_norm import SpectralNorm


@ops.fusible
class Linear(Layer, nn.Linear):
    """y = x W^T + b on the last dimension; weight (out, in)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, spectral_norm: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.spectral = SpectralNorm(tuple(self.weight.shape)) if spectral_norm else None

    def effective_weight(self) -> Tensor:
        """Return the weight that is applied: W, or W/sigma."""
        return self.weight if self.spectral is None else self.spectral(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return nn.functional.linear(x, self.effective_weight(), self.bias)
