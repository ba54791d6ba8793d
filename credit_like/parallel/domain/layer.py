"""What a domain layer is: the sharded version of a layer that mixes rows.

It is a subclass of the serial layer that takes its place by changing the instance's class: parameters, names and
hooks stay as they are. It works out once, from the heights that the serial layer sees, which rows it wants
(`bind`), and then calls the arithmetic of the serial layer on local rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from torch import nn

from credit_like.bands import Level
from credit_like.parallel.domain.manager import DomainManager
from credit_like.parallel.domain.rows import RowPlan
from credit_like.parallel.domain.rules import Rows


class DomainLayer(nn.Module):
    """Mixed into every domain layer. `row_dim`: the dimension of rows in the layer's input and output, one tensor each."""

    row_dim: ClassVar[int] = 1

    def levels(self, height_in: int, height_out: int) -> list[Level]:
        """Heights with the units that this layer asks of their bands."""
        return []

    def rows_out(self, height_out: int) -> Rows:
        """Which rows the output has on each rank: the band of its height, unless the layer says otherwise."""
        return Rows(DOMAIN_LAYERS[type(self)].row_dim, height_out)

    def bind(self, manager: DomainManager, height_in: int, height_out: int) -> None:
        """Work out the plans for an image of these heights."""
        raise NotImplementedError

    def _set(self, manager: DomainManager, **plans: RowPlan) -> None:
        """Plain attributes: a forward must not change anything (recomputation, compilation)."""
        object.__setattr__(self, "manager", manager)
        for name, plan in plans.items():
            object.__setattr__(self, name, plan)

    manager: DomainManager


DOMAIN_LAYERS: dict[type[nn.Module], type[DomainLayer]] = {}
"""The domain layer of every serial layer that has one."""


_Layer = TypeVar("_Layer", bound=type[DomainLayer])


def domain_layer(serial: type[nn.Module]) -> Callable[[_Layer], _Layer]:
    """Register a class as the domain layer of a serial class, of which it must be a subclass."""

    def register(layer: _Layer) -> _Layer:
        assert issubclass(layer, serial), f"{layer.__name__} is no subclass of {serial.__name__}"
        DOMAIN_LAYERS[serial] = layer
        return layer

    return register
