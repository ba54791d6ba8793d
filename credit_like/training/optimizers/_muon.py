"""Muon on sharded matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from credit_like.parallel.deal import Dealt, deal, from_owners, to_owners
from credit_like.parallel.shards import local
from credit_like.training.optimizers._adamw import AdamW, AdamWConfig, gradient_of

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class MuonConfig(AdamWConfig, Protocol):
    """The parameters of Muon, and those of AdamW for everything else."""

    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...


class Muon:
    """m ← μm + (1 − μ)g; p ← (1 − ηλ)p − 0.2 η √max(rows, columns) · orthogonal((1 − μ)g + μm).

    Jordan et al., Muon: an optimizer for hidden layers, 2024; the factor gives updates AdamW's typical size (Liu et
    al., arXiv:2502.16982). For matrices: two dimensions, or a kernel of one point. Everything else goes to AdamW.

    The momentum is sharded as its parameter. Matrices are dealt to the ranks: the owner of one gathers the whole update,
    makes it orthogonal and sends each rank its part, so a sharded step is the step of one process, and every matrix is
    iterated once. The momentum has the parameter's precision: in bfloat16 the rounding of a gathered value would grow to
    1e-2 of the update, and runs in two layouts would diverge.
    """

    def __init__(self, config: MuonConfig, parameters: Mapping[str, Tensor]) -> None:
        self.config = config
        self.matrices = {name: p for name, p in parameters.items() if is_matrix(p)}
        self._dealt: dict[str, Dealt] | None = None
        self.rest = AdamW(config, {name: p for name, p in parameters.items() if not is_matrix(p)})
        with torch.no_grad():
            self.momentum = {name: torch.zeros_like(local(p)) for name, p in self.matrices.items()}

    @torch.no_grad()
    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Update the parameters, or nothing at all where `skip` (an fp32 scalar on the device) is 1."""
        names = [name for name, parameter in self.matrices.items() if parameter.grad is not None]
        if names:
            self._step(names, learning_rate, skip)
        self.rest.step(learning_rate, skip)

    def _step(self, names: list[str], learning_rate: float, skip: Tensor) -> None:
        """Update the matrices `names`, with few operations for all of them, so that a GPU does not wait for the host."""
        mu, decay = self.config.momentum, self.config.weight_decay
        weights = [local(self.matrices[name]) for name in names]
        gradients = [gradient_of(self.matrices[name]) for name in names]
        momenta = [self.momentum[name] for name in names]
        after = torch._foreach_lerp(momenta, gradients, 1 - mu)
        updates = torch._foreach_lerp(gradients, after, mu) if self.config.nesterov else after
        parts = dict(zip(names, updates, strict=True))
        dealt = {name: self._deal()[name] for name in names}
        found = from_owners(_orthogonal(to_owners(parts, dealt)), parts, dealt)
        directions = [found[name] for name in names]
        shapes = [dealt[name].shape for name in names]
        moves = torch._foreach_mul(directions, [-learning_rate * 0.2 * max(shape[:2]) ** 0.5 for shape in shapes])
        torch._foreach_add_(moves, weights, alpha=1 - learning_rate * decay)
        # Not arithmetic with the flag: 0 × NaN is NaN.
        skipped = skip.bool()
        for kept, new in ((momenta, after), (weights, moves)):
            torch._foreach_copy_(kept, [torch.where(skipped, x, y) for x, y in zip(kept, new, strict=True)])

    def _deal(self) -> dict[str, Dealt]:
        """Return the owners of the matrices; the cost of one is that of its products."""
        if self._dealt is None:
            cost = {name: min(p.shape[:2]) ** 2 * max(p.shape[:2]) for name, p in self.matrices.items()}
            self._dealt = deal(self.matrices, cost)
        return self._dealt

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the live local state: parameter → kind → tensor."""
        return {name: {"momentum": momentum} for name, momentum in self.momentum.items()} | self.rest.state()


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter has two dimensions of more than one element, and only ones after them."""
    shape = parameter.shape
    return len(shape) >= 2 and min(shape[:2]) > 1 and parameter.numel() == shape[0] * shape[1]


def _orthogonal(owned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `orthogonal` of every matrix; those of one shape are computed together."""
    groups: dict[object, list[str]] = {}
    for name, full in owned.items():
        groups.setdefault((full.shape, full.dtype), []).append(name)
    result: dict[str, Tensor] = {}
    for names in groups.values():
        shape = owned[names[0]].shape
        together = orthogonal(torch.stack([owned[name].flatten(1) for name in names]))
        result |= {name: x.reshape(shape) for name, x in zip(names, together.unbind(), strict=True)}
    return result


def orthogonal(matrices: Tensor) -> Tensor:
    """Return about UVᵀ of the singular value decomposition USVᵀ of matrices (n, rows, columns).

    It is a quintic Newton-Schulz iteration, X ← aX + (bA + cA²)X with A = XXᵀ; singular values end between about 0.7 and 1.2.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(_ITERATIONS):
        a = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x
