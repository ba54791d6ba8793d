"""Muon on sharded matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credit_like.parallel.shards import local, slice_like, whole_of_shards
from credit_like.training.optimizers._adamw import AdamW

if TYPE_CHECKING:
    from credit_like.training.optimizers.muon import Config

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon:
    """m ← μm + (1 − μ)g; p ← (1 − ηλ)p − 0.2 η √max(rows, columns) · orthogonal((1 − μ)g + μm).

    Jordan et al., Muon: an optimizer for hidden layers, 2024; the factor gives updates AdamW's typical size (Liu et
    al., arXiv:2502.16982). For matrices: two dimensions, or a kernel of one point. Everything else goes to AdamW.

    The momentum is sharded as its parameter. Each rank gathers the whole update, makes it orthogonal and applies its
    part, so a sharded step is the step of one process. The momentum has the parameter's precision: in bfloat16 the
    rounding of a gathered value would grow to 1e-2 of the update, and runs in two layouts would diverge.
    """

    def __init__(self, config: Config, parameters: Mapping[str, Tensor]) -> None:
        self.config = config
        self.matrices = {name: p for name, p in parameters.items() if is_matrix(p)}
        self.rest = AdamW(config, {name: p for name, p in parameters.items() if not is_matrix(p)})
        with torch.no_grad():
            self.momentum = {name: torch.zeros_like(local(p)) for name, p in self.matrices.items()}

    @torch.no_grad()
    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Update the parameters, or nothing at all where `skip` (an fp32 scalar on the device) is 1."""
        mu, skipped = self.config.momentum, skip.bool()
        for name, parameter in self.matrices.items():
            if parameter.grad is None:
                continue
            gradient, momentum = local(parameter.grad), self.momentum[name]
            after = momentum.lerp(gradient, 1 - mu)
            update = gradient.lerp(after, mu) if self.config.nesterov else after
            full = whole_of_shards(update, parameter)
            direction = slice_like(orthogonal(full.flatten(1)).reshape(full.shape), parameter)
            scale = 0.2 * max(full.shape[0], full.shape[1]) ** 0.5
            weight = local(parameter)
            moved = weight * (1 - learning_rate * self.config.weight_decay) - learning_rate * scale * direction
            # Not arithmetic with the flag: 0 × NaN is NaN.
            momentum.copy_(torch.where(skipped, momentum, after))
            weight.copy_(torch.where(skipped, weight, moved))
        self.rest.step(learning_rate, skip)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the live local state: parameter → kind → tensor."""
        return {name: {"momentum": momentum} for name, momentum in self.momentum.items()} | self.rest.state()


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter has two dimensions of more than one element, and only ones after them."""
    shape = parameter.shape
    return len(shape) >= 2 and min(shape[:2]) > 1 and parameter.numel() == shape[0] * shape[1]


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about UVᵀ of the singular value decomposition USVᵀ of a matrix, by a quintic Newton-Schulz iteration.

    X ← aX + (bA + cA²)X with A = XXᵀ; singular values end between about 0.7 and 1.2.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(_ITERATIONS):
        a = x @ x.T
        x = _A * x + (_B * a + _C * a @ a) @ x
    return x.T if tall else x
