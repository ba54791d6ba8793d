"""Channels of physical quantities, and the water in a column of air."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from credit_like.data.aliases import find
from credit_like.data.declared import Scale, check_levels, check_units
from credit_like.errors import UserError
from credit_like.physics._correction import Correction
from credit_like.registry import did_you_mean
from credit_like.variables import Variable, Variables

if TYPE_CHECKING:
    from torch import Tensor

    from credit_like.data.store import FieldStore

GRAVITY = 9.80665
"""m s⁻², the standard acceleration."""
_REFERENCE_PA = 1e5
"""Pa, surface pressure at which interfaces are compared."""


def channels_of(name: str, variables: Sequence[Variable], key: str) -> slice:
    """Return the channels of a variable, given by its own name or an alias. Raises UserError if it is absent."""
    slices = Variables.slices(variables)
    found = find(name, slices)
    if found is None:
        raise UserError(
            f"{key}: expected one of {', '.join(slices)}, got {name!r}{did_you_mean(name, list(slices))}; "
            "change it to a variable of that role"
        )
    return slices[found]


def channel_of(name: str, variables: Sequence[Variable], key: str) -> int:
    """Return the channel of a surface variable, given by name or alias. Raises UserError if it is absent or on levels."""
    where = channels_of(name, variables, key)
    if where.stop - where.start != 1:
        raise UserError(f"{key}: expected a variable at the surface, got {name!r} on levels, change it")
    return where.start


@dataclass(frozen=True)
class Column:
    """Column water W in kg m⁻² (times g in Pa), from humidity on levels or from a variable that holds W itself.

    On hybrid levels the thickness of a layer is Δp = Δa + Δb · p_s with interface coefficients a (Pa) and b. On
    pressure levels it is fixed (b = 0), from half-way to the level above to half-way to the level below. Levels may be in any
    order on pressure levels; hybrid ones are from the top to the surface or the reverse.
    """

    water: slice
    delta_a: tuple[float, ...]
    delta_b: tuple[float, ...]

    def weight(self, x_BCHW: Tensor, pressure_BHW: Tensor) -> Tensor:
        """Return g W (B, H, W) in Pa, float64."""
        return self.fixed(x_BCHW) + self.per_pressure(x_BCHW) * pressure_BHW.double()

    def fixed(self, x_BCHW: Tensor) -> Tensor:
        """Return the part of g W that does not depend on surface pressure: Σ q Δa."""
        return _weighted(x_BCHW[:, self.water], self.delta_a)

    def per_pressure(self, x_BCHW: Tensor) -> Tensor:
        """Return the change of g W per Pa of surface pressure: Σ q Δb."""
        return _weighted(x_BCHW[:, self.water], self.delta_b)


class ColumnConfig(Correction):
    """Variables and levels from which column water is computed."""

    surface_pressure: str = "surface_pressure"
    """Predicted surface pressure in Pa."""
    humidity: str = "specific_humidity"
    """Predicted humidity on levels."""
    humidity_scale: float = Field(default=1.0, gt=0)
    """Units of `humidity` per kg/kg: 1000 for g/kg."""
    column_water: str | None = None
    """A variable in kg m⁻² to use instead of integrating humidity."""
    a: tuple[float, ...] = ()
    """Hybrid levels: coefficients of the interfaces in Pa, in the order of the levels, from the first level's outer one to the
    last level's."""
    b: tuple[float, ...] = ()
    """Hybrid levels: coefficients of the interfaces that are multiplied by surface pressure."""
    level_pa: float = Field(default=100.0, gt=0)
    """Pressure levels: Pa per unit of `levels`."""


def make_column(config: ColumnConfig, variables: Variables) -> Column:
    """Build the column of a correction. Raises UserError if coefficients and levels do not fit."""
    prognostic = variables.role("prognostic")
    if config.column_water is not None:
        water = channel_of(config.column_water, prognostic, "physics.column_water")
        return Column(slice(water, water + 1), (GRAVITY,), (0.0,))
    where, delta_a, delta_b = layers(config, variables)
    return Column(
        where, tuple((delta_a / config.humidity_scale).tolist()), tuple((delta_b / config.humidity_scale).tolist())
    )


def check_column(config: ColumnConfig, store: FieldStore) -> None:
    """Raise UserError where the data declare other units of water, levels or surface pressure than the correction counts on."""
    if config.column_water is not None:
        check_units(store, "physics.column_water", config.column_water, "kg m-2")
        return
    of_humidity = Scale("physics.humidity_scale", config.humidity_scale, inverse=True)
    check_units(store, "physics.humidity", config.humidity, "kg kg-1", of_humidity)
    if config.b:
        check_units(store, "physics.surface_pressure", config.surface_pressure, "Pa")
    else:
        check_levels(store, config.humidity, Scale("physics.level_pa", config.level_pa))


def layers(config: ColumnConfig, variables: Variables) -> tuple[slice, NDArray[np.float64], NDArray[np.float64]]:
    """Return the channels of humidity, and Δa (Pa) and Δb of the layer around each of its levels.

    Raises UserError if coefficients and levels do not fit.
    """
    prognostic = variables.role("prognostic")
    where = channels_of(config.humidity, prognostic, "physics.humidity")
    n, (a, b) = where.stop - where.start, (config.a, config.b)
    if a or b:
        if len(a) != n + 1 or len(b) != n + 1:
            raise UserError(
                f"physics.a: expected {n + 1} interface coefficients a and b for {n} levels of {config.humidity}, "
                f"got {len(a)} and {len(b)}, change their number"
            )
        return where, *_hybrid_layers(a, b)
    if n < 2:
        raise UserError(
            f"physics.humidity: expected a variable on at least two levels, got {config.humidity!r} on {n}, "
            "change it or give column_water"
        )
    name = find(config.humidity, (variable.name for variable in prognostic))
    pressure = np.array(variables[str(name)].levels) * config.level_pa
    order = np.argsort(pressure)
    ascending = pressure[order]
    edges = np.concatenate([ascending[:1], (ascending[1:] + ascending[:-1]) / 2, ascending[-1:]])
    thickness = np.empty(n)
    thickness[order] = np.diff(edges)
    return where, thickness, np.zeros(n)


def _hybrid_layers(a: Sequence[float], b: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Δa and Δb of layers of positive thickness, whether the interfaces go down from the top or up from the surface.

    Raises UserError for interfaces that do neither.
    """
    delta_a, delta_b = np.diff(a), np.diff(b)
    thickness = delta_a + delta_b * _REFERENCE_PA
    if (thickness > 0).all():
        return delta_a, delta_b
    if (thickness < 0).all():
        return -delta_a, -delta_b
    pressure = ", ".join(f"{x + y * _REFERENCE_PA:g}" for x, y in zip(a, b, strict=True))
    raise UserError(
        "physics.a: expected coefficients a and b of interfaces in order, from the top to the surface or from the surface to "
        f"the top, got pressures of {pressure} Pa where the surface has {_REFERENCE_PA:g}, change the coefficients"
    )


def _weighted(x_BCHW: Tensor, weights: Sequence[float]) -> Tensor:
    from credit_like.nn.constants import on_device

    return (x_BCHW.double() * on_device(tuple(weights), x_BCHW.dtype, x_BCHW.device).double()[:, None, None]).sum(1)
