"""Normalisation over channels (per point) and over groups of channels (per image). Tensors are (B, H, W, C)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn.layer import Layer


class ChannelNorm(Layer):
    """LayerNorm over the channels of each point: eps 1e-5, biased variance."""

    eps = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each point of (..., C); the shape stays the same."""
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def initial(self, leaf: str, shape: tuple[int, ...], _generator: torch.Generator) -> Tensor:
        """Return the values of the identity: weight 1, bias 0."""
        return torch.ones(shape) if leaf == "weight" else torch.zeros(shape)


@ops.fusible
class GroupNorm(Layer):
    """GroupNorm: mean and variance over the image and each of `groups` groups of channels; eps 1e-5, biased variance.

    Besides the loss, this is the only layer that reduces over the whole image.
    """

    eps = 1e-5

    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        assert channels % groups == 0, f"{channels} channels do not split into {groups} groups"
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Normalise (B, H, W, C); the shape stays the same."""
        x_BCHW = x_BHWC.permute(0, 3, 1, 2)
        y_BCHW = nn.functional.group_norm(x_BCHW, self.groups, self.weight, self.bias, self.eps)
        return y_BCHW.permute(0, 2, 3, 1)

    def initial(self, leaf: str, shape: tuple[int, ...], _generator: torch.Generator) -> Tensor:
        """Return the values of the identity: weight 1, bias 0."""
        return torch.ones(shape) if leaf == "weight" else torch.zeros(shape)
