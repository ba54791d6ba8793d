"""Domain layers: versions of layers that mix rows, for bands of rows.

A domain layer is a subclass of the serial layer and replaces it by changing the instance's class, so parameters, names
and hooks stay unchanged. It computes once, from the heights that the serial layer works on, which rows it needs
(`bind`), and then applies the arithmetic of the serial layer to local rows.
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
    """Mixin of every domain layer.

    `row_dim` is the dimension of rows in the layer's input and output, which are one tensor each. What else a layer gets,
    by keyword, has no rows.
    """

    row_dim: ClassVar[int] = 1

    def levels(self, _height_in: int, _height_out: int) -> list[Level]:
        """Return the heights of the layer with the units that it requires of their bands."""
        return []

    def rows_out(self, height_out: int) -> Rows:
        """Return which rows of the output each rank has: by default the band of the output's height."""
        return Rows(DOMAIN_LAYERS[type(self)].row_dim, height_out)

    def bind(self, manager: DomainManager, height_in: int, height_out: int) -> None:
        """Compute the exchange plans for an image of these heights."""
        raise NotImplementedError

    def _set(self, manager: DomainManager, **plans: RowPlan) -> None:
        """Store the manager and the plans.

        They are plain attributes because forward must not modify state (recomputation, compilation).
        """
        object.__setattr__(self, "manager", manager)
        for name, plan in plans.items():
            object.__setattr__(self, name, plan)

    manager: DomainManager


DOMAIN_LAYERS: dict[type[nn.Module], type[DomainLayer]] = {}
"""The domain layer of every serial layer that has one."""


_Layer = TypeVar("_Layer", bound=type[DomainLayer])


def domain_layer(serial: type[nn.Module]) -> Callable[[_Layer], _Layer]:
    """Register a class as the domain layer of `serial`, of which it must be a subclass."""

    def register(layer: _Layer) -> _Layer:
        assert issubclass(layer, serial), f"{layer.__name__} is no subclass of {serial.__name__}"
        DOMAIN_LAYERS[serial] = layer
        return layer

    return register
