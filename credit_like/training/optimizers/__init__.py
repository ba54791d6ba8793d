"""Optimisers: one module each, with a `Config` and `build`. A plug-in has the attributes of `OptimizerPlugin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from credit_like.training.step import Optimizer


class OptimizerPlugin(Protocol):
    """The module of an optimiser; `Config` is a `Section` with its `type` and `learning_rate`."""

    Config: type[Any]

    def build(self, config: Any, parameters: Mapping[str, Tensor]) -> Optimizer:
        """Return the optimiser of these named parameters, with its state at zero.

        Parameters may be distributed tensors. `step(learning_rate, skip)` reads their gradients and changes nothing where
        the tensor `skip` is 1; `state()` gives kind → parameter → tensor, live, which is what a checkpoint holds.
        """
