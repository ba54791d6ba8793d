"""Muon: momentum made orthogonal for hidden matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.training.optimizers import Decay, Eps, OptimizerConfig, Rate
from credit_like.training.optimizers.adamw import Beta

if TYPE_CHECKING:
    from torch import Tensor

    from credit_like.training.optimizers._muon import Muon


class Config(OptimizerConfig):
    """`learning_rate` is that of an AdamW run: updates of matrices are scaled to AdamW's typical size."""

    type: Literal["muon"] = "muon"
    learning_rate: Rate = Field(default=1e-3)
    """Learning rate at the top of the schedule; updates of matrices are scaled to AdamW's typical size."""
    weight_decay: Decay = Field(default=0.0)
    """Applied to matrices and convolution kernels only."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the momentum of matrices."""
    nesterov: bool = True
    """Look ahead by one step of the momentum."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the moments of AdamW, which updates all parameters that are not matrices."""
    eps: Eps = Field(default=1e-8)
    """Added to the root of the second moment, against a division by zero."""


def build(config: Config, parameters: Mapping[str, Tensor]) -> Muon:
    """Return the optimiser of these named parameters, with its state at zero."""
    from credit_like.training.optimizers._muon import Muon

    return Muon(config, parameters)
