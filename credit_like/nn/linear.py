"""A linear map of the last dimension, optionally divided by its spectral norm or with a low-rank change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.layer import Layer
from credit_like.nn.spectral_norm import SpectralNorm


class Lora(Layer):
    """The low-rank change s B A of a weight (see `credit_like.nn.lora`); `up` is B (out, rank) and `down` is A (rank, in)."""

    def __init__(self, out_features: int, in_features: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.up = nn.Parameter(torch.empty(out_features, rank))
        self.down = nn.Parameter(torch.empty(rank, in_features))

    def initial(self, leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return zeros for `up`, and uniform numbers within 1 / sqrt(in) for `down`."""
        if leaf == "up":
            return torch.zeros(shape)
        return (2 * torch.rand(shape, generator=generator) - 1) * shape[1] ** -0.5

    def forward(self) -> Tensor:
        """Return the change (out, in) of the weight."""
        return self.scale * (self.up @ self.down)


@ops.fusible
class Linear(Layer, nn.Linear):
    """y = x W^T + b on the last dimension; weight (out, in)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, spectral_norm: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.outputs = range(out_features)
        """The output features that this rank computes."""
        self.spectral = SpectralNorm(tuple(self.weight.shape)) if spectral_norm else None
        self.lora: Lora | None = None

    def effective_weight(self) -> Tensor:
        """Return the weight that is applied: W, or W/sigma, and the low-rank change where there is one."""
        weight = self.weight if self.spectral is None else self.spectral(self.weight)
        return weight if self.lora is None else weight + self.lora()

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return nn.functional.linear(x, self.effective_weight(), self.bias)


def stacked_weights(layers: Sequence[Linear]) -> tuple[Tensor, list[Tensor]]:
    """Return the weights of layers of one shape, (layers, out, in), and their u, v and 1/sigma for `normalised_together`.

    Without the latter, the weights are those that are applied.
    """
    spectrals = [layer.spectral for layer in layers if layer.spectral is not None and layer.spectral.in_backward]
    if len(spectrals) < len(layers) or any(layer.lora is not None for layer in layers):
        return ops.stacked([layer.effective_weight() for layer in layers]), []
    states = [ops.stacked([one.get_buffer(name) for one in spectrals]) for name in ("u", "v", "inv_sigma")]
    return ops.stacked([layer.weight for layer in layers]), states
