"""A linear map of the last dimension, optionally divided by its spectral norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit_like.nn import init
from credit_like.nn.spectral_norm import SpectralNorm


class Linear(nn.Linear):
    """y = x W^T + b on the last dimension; weight (out, in)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, spectral_norm: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.spectral = SpectralNorm(tuple(self.weight.shape)) if spectral_norm else None

    def effective_weight(self) -> Tensor:
        """The weight that multiplies: W, or W/sigma."""
        return self.weight if self.spectral is None else self.spectral(self.weight)

    def factors(self) -> tuple[Tensor, float]:
        """What multiplies as a matrix and a number: W and 1, or W and 1/sigma."""
        return (self.weight, 1.0) if self.spectral is None else self.spectral.factors(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return nn.functional.linear(x, self.effective_weight(), self.bias)

    def initial(self, leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Uniform within 1/sqrt(in)."""
        return init.uniform(shape, self.in_features, generator)
