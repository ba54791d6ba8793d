"""Domain layers: versions of layers that mix rows or columns, for bands of them.

A domain layer is a subclass of the serial layer and replaces it by changing the instance's class, so parameters, names
and hooks stay unchanged. It computes once, from the sizes of the image that the serial layer works on, what it needs of
other ranks along each axis (`plan`), and then applies the arithmetic of the serial layer to what it has. Rows and columns
are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from credit_like.bands import Level
from credit_like.parallel.domain.manager import Axis, DomainManager
from credit_like.parallel.domain.rows import RowPlan
from credit_like.parallel.domain.rules import Rows

Sizes = tuple[int, int]
"""The size of an image along one axis, before a layer and after it."""


class DomainLayer(nn.Module):
    """Mixin of every domain layer.

    `row_dim` is the dimension of rows in the layer's input and output, which are one tensor each; columns are the next. What
    else a layer gets, by keyword, has neither.
    """

    row_dim: ClassVar[int] = 1
    columns: ClassVar[bool] = True
    """Whether the layer can share columns as well."""

    manager: DomainManager
    plans: tuple[RowPlan | None, ...]
    """The exchange along each axis before the layer computes; None along an axis that is not shared."""

    def levels(self, _size_in: int, _size_out: int) -> list[Level]:
        """Return the sizes of the layer along an axis with the units that it requires of their bands."""
        return []

    def rows_out(self, size_out: int, axis: int) -> Rows:
        """Return which rows (or columns) of the output each rank has: by default the band of the output's size."""
        return Rows(DOMAIN_LAYERS[type(self)].row_dim + axis, size_out)

    def plan(self, axis: Axis, size_in: int, _size_out: int) -> RowPlan:
        """Return the exchange along an axis of an image of these sizes: by default none."""
        here = axis.lists(size_in)
        return axis.plan(here, here)

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        """Compute the exchange plans for an image of these sizes along each axis that is shared, None along others."""
        self._set(manager)
        plans = [of and self.plan(axis, *of) for axis, of in zip(manager.axes, sizes, strict=True)]
        self._set(manager, plans=tuple(plans))

    def fetch(self, x: Tensor, plans: Sequence[RowPlan | None] | None = None) -> Tensor:
        """Exchange rows and columns by the layer's plans, or by other ones."""
        for dim, (axis, plan) in enumerate(zip(self.manager.axes, plans or self.plans, strict=True), self.row_dim):
            if plan is not None:
                x = axis.fetch(x, plan, dim)
        return x

    def rest(self, *of_axes: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the remaining work along each axis (such as zeros to add); nothing if an exchange has already done it."""
        return [(0, 0) if plan else amount for plan, amount in zip(self.plans, of_axes, strict=True)]

    def _set(self, manager: DomainManager, **values: object) -> None:
        """Store the manager and the plans.

        They are plain attributes because forward must not modify state (recomputation, compilation).
        """
        object.__setattr__(self, "manager", manager)
        for name, value in values.items():
            object.__setattr__(self, name, value)


class PlacedLayer(DomainLayer):
    """Mixin of domain layers that exchange nothing but need the position of their points in the whole image."""

    def bind(self, manager: DomainManager, sizes: Sequence[Sizes | None]) -> None:
        super().bind(manager, sizes)
        self.places = manager.places(sizes)


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
