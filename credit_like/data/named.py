"""Fields in memory as data sets like those of files, from which a store reads the same variables again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xarray as xr
from numpy.typing import NDArray

from credit_like.errors import UserError
from credit_like.variables import Variable, Variables

Attrs = Callable[[Variable], Mapping[str, str]]


def datasets(
    variables: Sequence[Variable],
    fields: NDArray[Any],
    axes: Mapping[str, Any],
    attrs: Attrs,
    level_attrs: Attrs = lambda _: {},
) -> list[xr.Dataset]:
    """Return the fields (…, C, H, W) of variables under their names in the files, one data set for each name.

    `axes` are the coordinates of the dimensions but for channels. Fields at the surface that are levels of one variable of the
    files become that variable. Raises UserError for several of one name that are no levels of one variable in the same units.
    """
    *front, latitude, longitude = axes
    found: dict[str, xr.Dataset] = {}
    for variable, channels in zip(variables, Variables.slices(variables).values(), strict=True):
        name, part = variable.spec.var or variable.name, fields[..., channels, :, :]
        levels = variable.levels or variable.spec.levels
        if levels:
            coordinates = {**axes, "level": ("level", list(levels), level_attrs(variable))}
            made = xr.Dataset({name: ((*front, "level", latitude, longitude), part, attrs(variable))}, coordinates)
        else:
            made = xr.Dataset({name: (tuple(axes), part[..., 0, :, :], attrs(variable))}, axes)
        if name not in found:
            found[name] = made
            continue
        try:
            same = found[name][name].attrs.get("units") == made[name].attrs.get("units")
            if not (same and levels and "level" in found[name].dims):
                raise xr.MergeError(name)
            found[name] = xr.merge([found[name], made], compat="no_conflicts", join="outer")
        except xr.MergeError as error:
            raise UserError(
                f"expected variables with different names in the files, or levels of one variable in the same units, "
                f"got several {name}, change `var` and the files"
            ) from error
    return list(found.values())
