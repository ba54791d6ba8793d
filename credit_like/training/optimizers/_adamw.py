"""AdamW on local shards, with an update that the device itself may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from credit_like.parallel.shards import local


class AdamWConfig(Protocol):
    """The parameters of AdamW."""

    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...


class AdamW:
    """m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², p ← (1 − ηλ)p − η m̂ / (√v̂ + ε); λ only for ≥ 2 dimensions.

    Loshchilov and Hutter, Decoupled weight decay regularization, 2019. Every parameter has its state from the start, so
    that a checkpoint has the same tensors whether or not a parameter ever received a gradient. The fused kernel runs on
    the local shards; no sharded-tensor dispatch is involved.
    """

    def __init__(self, config: AdamWConfig, parameters: Mapping[str, Tensor]) -> None:
        self.config = config
        self.parameters = dict(parameters)
        with torch.no_grad():
            shards = {name: local(parameter) for name, parameter in parameters.items()}
        self.exp_avg = {name: torch.zeros_like(shard) for name, shard in shards.items()}
        self.exp_avg_sq = {name: torch.zeros_like(shard) for name, shard in shards.items()}
        self.steps = {name: torch.zeros((), dtype=torch.float32, device=shard.device) for name, shard in shards.items()}

    @torch.no_grad()
    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Update the parameters, or nothing at all where `skip` (an fp32 scalar on the device) is 1."""
        for name, p in self.parameters.items():
            if p.grad is not None and not self.exp_avg[name].numel():
                # A rank without rows of a parameter counts too, because any rank's count may be the one that is saved.
                self.steps[name] += 1 - skip
        for decayed in (True, False):
            names = [
                name
                for name, p in self.parameters.items()
                if p.grad is not None and (p.ndim >= 2) is decayed and self.exp_avg[name].numel()
            ]
            if not names:
                continue
            adamw(
                [local(self.parameters[name]) for name in names],
                [gradient_of(self.parameters[name]) for name in names],
                [self.exp_avg[name] for name in names],
                [self.exp_avg_sq[name] for name in names],
                [],
                [self.steps[name] for name in names],
                fused=True,
                found_inf=skip,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=learning_rate,
                weight_decay=self.config.weight_decay if decayed else 0.0,
                eps=self.config.eps,
                maximize=False,
            )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the live local state: parameter → kind → tensor. Tensors of one element are the same on all ranks."""
        return {
            name: {"exp_avg": self.exp_avg[name], "exp_avg_sq": self.exp_avg_sq[name], "step": self.steps[name]}
            for name in self.parameters
        }


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)
