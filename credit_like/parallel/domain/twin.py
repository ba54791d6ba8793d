"""What a sharded twin of a space-mixing layer is.

A twin is a subclass of the serial layer that takes its place by changing the instance's class: parameters, names and
hooks stay as they are. It works out once, from the heights that the serial layer sees, which rows it wants
(`bind`), and then calls the arithmetic of the serial layer on local rows.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.partition import Level
from credit_like.parallel.domain.rows import RowPlan


class Twin(nn.Module):
    """Mixed into every twin. `row_dim`: the dimension of rows in the layer's input and output."""

    row_dim: ClassVar[int] = 1

    def levels(self, height_in: int, height_out: int) -> list[Level]:
        """Heights with the units that this layer asks of their bands."""
        return []

    def bind(self, manager: DomainManager, height_in: int, height_out: int, width_in: int) -> None:
        """Work out the plans for an image of these sizes."""
        raise NotImplementedError

    def _set(self, manager: DomainManager, **plans: RowPlan) -> None:
        """Plain attributes: a forward must not change anything (recomputation, compilation)."""
        object.__setattr__(self, "manager", manager)
        for name, plan in plans.items():
            object.__setattr__(self, name, plan)

    manager: DomainManager
