"""Comparison of the units that the data declare with those that a computation expects; unknown units are not compared."""

from __future__ import annotations

import datetime as dt
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from credit_like.data import units
from credit_like.data.aliases import find, other_quantity
from credit_like.errors import UserError
from credit_like.schema.base import format_duration

if TYPE_CHECKING:
    from credit_like.data.store import FieldStore
    from credit_like.variables import Variable


@dataclass(frozen=True)
class Scale:
    """A key of the experiment with a number of `wanted` units per unit of the data, or with `inverse` the other way round."""

    key: str
    value: float
    inverse: bool = False


def check_units(
    store: FieldStore,
    key: str,
    name: str,
    wanted: str,
    scale: Scale | None = None,
    rate: str | None = None,
    other: str = "it",
) -> None:
    """Raise UserError where a variable, given by its name or an alias, is in other units than it is taken to be in.

    `key` of the experiment asks for the variable. A variable in units of `rate` is multiplied by the time step. `other` says
    what to change where units are those of something else.
    """
    variable = _variable(store, name)
    if variable is None:
        return
    if variable.name != name and (told := other_quantity(name, store.attrs(variable))):
        raise UserError(f"{key}: expected {name}, got {variable.name}, which is {told!r} in the data, change {other}")
    declared = store.attrs(variable).get("units", "")
    try:
        found = per_step(declared, wanted, rate, store.step_seconds)
    except UserError as error:
        raise UserError(f"{key}: expected {variable.name} in {wanted!r}, got {declared!r}, change {other}") from error
    if found is None:
        return
    factor, offset = found
    if offset or (scale is None and factor != 1):
        raise UserError(
            f"{key}: expected {variable.name} in {wanted!r}, got {declared!r}, give the variable `units: {wanted}`"
        )
    if scale is not None:
        _check_scale(scale, factor, f"{variable.name} in {declared!r}")


def check_sums(store: FieldStore, key: str, name: str, rate: str) -> None:
    """Raise UserError where a variable, given by its name or an alias, is a sum over another time than the step.

    A budget would count a part of the step, or more than it. Units of `rate` are those of a mean, of any time.
    """
    variable = _variable(store, name)
    over = 0 if variable is None else store.other_sums.get(variable.name, 0)
    if variable is None or not over:
        return
    with suppress(UserError):
        if units.between(store.attrs(variable).get("units", ""), rate) is not None:
            return
    each, step = (format_duration(dt.timedelta(seconds=seconds)) for seconds in (over, store.step_seconds))
    raise UserError(
        f"{key}: expected {variable.name} as sums over data.timestep ({step}), got sums over {each}, sum them up in the files or "
        "remove the correction"
    )


def per_step(declared: str, wanted: str, rate: str | None, seconds: int) -> tuple[float, float] | None:
    """Return (a, b) of wanted = a · declared + b, where units of `rate` count over a time step; None for unknown units.

    Raises UserError for units of something else.
    """
    try:
        return units.between(declared, wanted)
    except UserError:
        if rate is None:
            raise
    found = units.between(declared, rate)
    return None if found is None else (found[0] * seconds, found[1])


def check_levels(store: FieldStore, name: str, scale: Scale) -> None:
    """Raise UserError where `scale` is not the number of Pa per unit of the levels of a variable, if these are pressures.

    Raises it also for levels that follow the ground, whose coefficients have to be given.
    """
    variable = _variable(store, name)
    if variable is not None and (kind := parametric(store, variable)):
        raise UserError(
            f"{scale.key}: expected levels of pressure for {name}, got {kind}; give the coefficients a and b"
        )
    if variable is not None and (factor := level_factor(store, variable, "Pa")) is not None:
        _check_scale(scale, factor, f"levels in {store.level_units(variable)!r}")


def parametric(store: FieldStore, variable: Variable) -> str:
    """Return the CF name of the parametric vertical coordinate of a variable, such as hybrid levels; empty if there is none.

    Its values may be in hPa, but are not the pressure at these levels (CF conventions, appendix D).
    """
    name = store.level_attrs(variable).get("standard_name", "")
    return name if "_coordinate" in name else ""


def level_factor(store: FieldStore, variable: Variable, wanted: str) -> float | None:
    """Return the factor from the units of a variable's levels to wanted ones; None where they are unknown or no pressure."""
    try:
        found = units.between(store.level_units(variable), wanted)
    except UserError:  # numbers of levels
        return None
    return None if found is None else found[0]


def _variable(store: FieldStore, name: str) -> Variable | None:
    known = {variable.name: variable for variable in store.variables}
    found = find(name, known)
    return None if found is None else known[found]


def _check_scale(scale: Scale, factor: float, what: str) -> None:
    right = 1 / factor if scale.inverse else factor
    if not math.isclose(right, scale.value, rel_tol=1e-6):
        raise UserError(f"{scale.key}: expected {right:g} for {what}, got {scale.value:g}, change it")
