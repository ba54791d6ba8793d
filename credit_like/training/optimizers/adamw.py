"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from credit_like.training.optimizers import Decay, Eps, OptimizerConfig, Rate

if TYPE_CHECKING:
    from torch import Tensor

    from credit_like.training.optimizers._adamw import AdamW

Beta = Annotated[float, Field(ge=0, lt=1)]


class Config(OptimizerConfig):
    type: Literal["adamw"] = "adamw"
    learning_rate: Rate = Field(default=1e-3)
    """Learning rate at the top of the schedule."""
    weight_decay: Decay = Field(default=0.0)
    """Applied to matrices and convolution kernels only; biases, norms and scales are left alone."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and of the second moment."""
    eps: Eps = Field(default=1e-8)
    """Added to the root of the second moment, against a division by zero."""


def build(config: Config, parameters: Mapping[str, Tensor]) -> AdamW:
    """Return the optimiser of these named parameters, with its state at zero."""
    from credit_like.training.optimizers._adamw import AdamW

    return AdamW(config, parameters)
