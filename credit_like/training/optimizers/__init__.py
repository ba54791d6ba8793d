"""Optimisers: one module each, with a `Config` and `build`. A plug-in has the attributes of `OptimizerPlugin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field

from credit_like.schema.base import Section

if TYPE_CHECKING:
    from torch import Tensor

    from credit_like.training.step import Optimizer


Rate = Annotated[float, Field(gt=0, le=1000)]
Decay = Annotated[float, Field(ge=0, le=1000)]
Eps = Annotated[float, Field(ge=1e-30)]
"""Of single precision, in which a smaller one is 0."""


class Group(Section):
    """Parameters with a learning rate or weight decay of their own."""

    match: str = Field(min_length=1)
    """Pattern of names of parameters, such as `head.*`; a parameter belongs to the first group that matches it."""
    learning_rate: Rate | None = None
    """Learning rate of the group at the top of the schedule. Default: that of the optimiser. All rates of the schedule, also
    `min_lr`, are multiplied by the ratio of the two."""
    weight_decay: Decay | None = None
    """Weight decay of the group. Default: that of the optimiser."""


class OptimizerConfig(Section):
    """Keys that all optimisers share."""

    groups: tuple[Group, ...] = ()
    """Groups of parameters with their own settings; all other parameters use those of the optimiser."""


class OptimizerPlugin(Protocol):
    """The module of an optimiser; `Config` is a `Section` with its `type` and `learning_rate`.

    A `Config` that inherits from `OptimizerConfig` may have groups of parameters; each of them is built by itself.
    """

    Config: type[Any]

    def build(self, config: Any, parameters: Mapping[str, Tensor]) -> Optimizer:
        """Return the optimiser of these named parameters, with its state at zero.

        Parameters may be distributed tensors. `step(learning_rate, skip)` reads their gradients and changes nothing where
        the tensor `skip` is 1; `state()` gives kind → parameter → tensor, live, which is what a checkpoint holds.
        """
