"""The place of every variable, with its levels and units, in the data sets of the configured sources."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like import registry
from credit_like.data import aliases, units
from credit_like.data.sources._conventions import DIFFERS, DIMS, PERIOD, listed, own_name
from credit_like.data.times import Times, nearest_in_year, seconds, to_text
from credit_like.errors import UserError
from credit_like.variables import Variable

Problems = list[tuple[tuple[str | int, ...], str]]
"""Messages with their places in the experiment."""
ORIGIN = "credit_like_origin"
"""Attribute of a copy or a mean of a variable: what `FieldStore.origin` says of the data from which it was made."""
_ATTRS = ("units", "long_name", "standard_name", "cell_methods", "positive")
_YEAR = 366 * 86400  # s
_COMPARED = 20  # times at which fields that are called static are compared
_LOG = logging.getLogger(__name__)
IN_MEMORY = "the data set given"


@dataclass(frozen=True)
class InMemory:
    """A dataset in memory, in place of a configured source; messages name it by its `type`."""

    dataset: xr.Dataset
    type: str = IN_MEMORY
    model_fields: ClassVar[dict[str, Any]] = {}


@dataclass(frozen=True)
class Source:
    """A configured source; `position` maps the store's times to the source's own, None if they are the same."""

    config: Any
    place: tuple[str | int, ...]
    """Where the experiment describes it: an entry of `data.source`, or the `path` of a variable."""
    settings: str
    """Key of the entry of `data.source` with its settings, as messages spell it."""
    position: NDArray[np.int64] | None = None

    @property
    def where(self) -> str:
        return self.paths[0] if len(self.paths) == 1 else self.config.type

    @property
    def paths(self) -> list[str]:
        """Return the configured paths; none of data that are not in files."""
        path = getattr(self.config, "path", "")
        return [path] if isinstance(path, str) and path else list(path)

    def open(self) -> xr.Dataset:
        """Open all variables of the source lazily. Raises UserError that lists the available names if one is absent."""
        if isinstance(self.config, InMemory):
            return self.config.dataset
        try:
            dataset: xr.Dataset = registry.of("source", self.config).open_dataset(self.config)
        except UserError as error:
            error.args = (self._spelled(str(error)),)
            raise
        return dataset

    def _spelled(self, message: str) -> str:
        """Return a message of a source, which does not know its place in the experiment, with this one's keys."""
        if self.place[:2] != ("data", "source"):
            message = message.replace("data.source.path", ".".join(map(str, self.place)))
        return message.replace("data.source.", f"{self.settings}.")


@dataclass(frozen=True)
class Place:
    """Location of the values of one variable; target = factor · stored + offset."""

    source: int
    var: str
    dims: tuple[str, ...]
    levels: tuple[int, ...]
    factor: float
    offset: float
    attrs: dict[str, str]
    cyclic: bool = False
    still: int | None = None
    """For a static field, the position on its time axis, if it has one, of the time that is read."""
    level_attrs: dict[str, str] = field(default_factory=dict)
    sum_over: int | None = None
    """Seconds over which the values are sums, by what the files declare: 0 = the spacing of the files, None = no sums."""
    valid: tuple[float, float] = (-np.inf, np.inf)
    """The lowest and the highest value that the files call valid."""
    copy_of: str = ""
    """Of a store that `preprocess --rechunk` wrote, the origin of the data that were copied."""

    @property
    def varies(self) -> bool:
        """Return whether the field depends on time."""
        return "time" in self.dims and self.still is None


@dataclass
class Refused:
    """The sources of variables that exist but do not fit the experiment."""

    sources: set[int] = field(default_factory=set)
    sources_with_times: set[int] = field(default_factory=set)

    def add(self, variable: Variable, source: int, dataset: xr.Dataset, stored: xr.DataArray) -> None:
        """Keep the source if its grid, and its times, are those of other variables too."""
        if {"latitude", "longitude"} <= set(stored.dims):
            self.sources.add(source)
            if variable.role != "static" and variable.spec.fill != "cyclic" and "time" in stored.dims:
                self.sources_with_times |= {source} if "time" in dataset.coords else set()


def locate(
    variable: Variable,
    among: Sequence[int],
    sources: Sequence[Source],
    datasets: Sequence[xr.Dataset],
    refused: Refused,
) -> Place:
    """Find a variable in the first source that has it, with the levels and in the units of the experiment.

    The source of a variable that is there but does not suit is added to `refused`. Raises UserError that lists the available
    names, FurtherDimension or OtherLevel.
    """
    var = variable.spec.var or variable.name
    available = [str(name) for i in among for name in datasets[i].data_vars]
    others: list[str] = []
    for i in among:
        names = [str(name) for name in datasets[i].data_vars]
        found = var if var in names else (None if variable.spec.var else aliases.find(var, names))
        if found is None:
            continue
        if found != var and (told := aliases.other_quantity(var, datasets[i][found].attrs)):
            others.append(f"{found} of {sources[i].where}, which is {told!r}")
            refused.add(variable, i, datasets[i], datasets[i][found])
            continue
        if found != var:
            _LOG.info("%s is read from %s, which is its name in %s", variable.name, found, sources[i].where)
        try:
            return _place(variable, i, found, datasets[i], sources[i])
        except UserError:
            refused.add(variable, i, datasets[i], datasets[i][found])
            raise
    if others:
        raise UserError(
            f"expected {var}, got {', '.join(others)}; write {var} into the files, or name the variable to read instead: "
            f"{{name: {variable.name}, var: …}}"
        )
    known = sorted(set(available))
    where = ", ".join(dict.fromkeys(sources[i].where for i in among))
    hint = registry.did_you_mean(var, known)
    raise UserError(f"expected a variable of {where} ({', '.join(known)}), got {var!r}{hint}")


def _place(variable: Variable, number: int, var: str, dataset: xr.Dataset, source: Source) -> Place:
    stored, where = dataset[var], source.where
    dims = tuple(map(str, stored.dims))
    if missing := {"latitude", "longitude"} - set(dims):
        raise UserError(
            f"expected {var} of {where} on latitude and longitude, got dimensions {dims} without {sorted(missing)[0]}"
        )
    if other := sorted(set(dims) - set(DIMS)):
        raise FurtherDimension(dataset, var, other[0], source)
    if files := stored.attrs.get(DIFFERS):
        raise UserError(
            f"expected {var}, which has no time, to be the same in all files of {where}, got different fields in {files}; give "
            "the variable the `path` of one file, or write a time axis into the files"
        )
    still = (_constant(stored, var) if stored.sizes.get("time", 1) > 1 else 0) if variable.role == "static" else None
    if variable.role != "static" and "time" not in dims:
        raise UserError(f"expected {var} of {where} on time, got dimensions {dims}; move it to static")
    if "time" in dims and "time" not in dataset.coords and variable.role != "static":
        raise UserError(
            f"expected times of {var} in {where}, got a time dimension without a coordinate; name it in "
            f"{source.settings}.dims.time"
        )
    if stored.dtype.kind not in "iufb":
        raise UserError(f"expected real numbers in {var} of {where}, got {stored.dtype}; make the store anew")
    attrs = {key: str(stored.attrs[key]) for key in _ATTRS if key in stored.attrs}
    if "long_name" not in attrs and "description" in stored.attrs:  # its name in WRF
        attrs["long_name"] = str(stored.attrs["description"])
    factor, offset = 1.0, 0.0
    if variable.spec.units and "units" in attrs:
        factor, offset = units.conversion(attrs["units"], variable.spec.units)
    attrs.update({"units": variable.spec.units} if variable.spec.units else {})
    levels = _levels(variable, var, dims, dataset, where)
    cyclic = variable.spec.fill == "cyclic"
    if cyclic:
        _refuse_several_years(stored, dataset["time"].values, var, where)
    of_level = dataset["level"].attrs if "level" in dataset.coords else {}
    level_attrs = {key: str(of_level[key]) for key in _ATTRS if key in of_level}
    over = _sum_over(var, stored.attrs, where, source.settings)
    copy_of = str(stored.attrs.get(ORIGIN, ""))
    valid = _valid_range(stored.attrs, factor, offset)
    return Place(number, var, dims, levels, factor, offset, attrs, cyclic, still, level_attrs, over, valid, copy_of)


def _valid_range(attrs: Mapping[Any, Any], factor: float, offset: float) -> tuple[float, float]:
    """Return the valid range of CF's attributes in converted values; without limits where they do not say it in numbers."""
    limits = (attrs.get("valid_min", -np.inf), attrs.get("valid_max", np.inf))
    try:
        low, high = np.asarray(attrs.get("valid_range", limits), np.float64)
    except (TypeError, ValueError):
        return -np.inf, np.inf
    return factor * float(low) + offset, factor * float(high) + offset


def _refuse_several_years(stored: xr.DataArray, times: Times, var: str, where: str) -> None:
    """Raise UserError for different years, of which the first would be repeated instead of the mean.

    A year that is continued at its ends, or repeated along the axis of other data as in a copy of such data, is one year. Two
    fields after the first year tell whether it is repeated.
    """
    after = np.flatnonzero(seconds(times) - seconds(times[:1]) > _YEAR)
    if not len(after):
        return
    later = after[[0, -1]]
    first = nearest_in_year(times, times[later])
    again = [(int(a), int(b)) for a, b in zip(first, later, strict=True) if a != b]
    if not again or not all(
        np.array_equal(stored.isel(time=a).values, stored.isel(time=b).values, equal_nan=True) for a, b in again
    ):
        raise UserError(
            f"expected one climatological year of {var} in {where}, got {to_text(times[0])} to {to_text(times[-1])}; make a mean "
            "year, give its file as `path`, or use fill: persist"
        )


def _sum_over(var: str, attrs: Mapping[Any, Any], where: str, settings: str) -> int | None:
    """Return the seconds over which a variable is a sum: 0 where its files do not say this, None for one that is no sum.

    Raises UserError for sums over several periods in one variable.
    """
    if not _is_sum(var, attrs):
        return None
    periods = str(attrs.get(PERIOD, "")).split()
    if len(periods) > 1:
        raise UserError(
            f"expected {var} of {where} over one period, got {', '.join(periods)} h; read it from a source of its own with "
            f"{settings}.select.period: {periods[0]}"
        )
    return round(3600 * float(periods[0])) if periods else 0


def _is_sum(var: str, attrs: Mapping[Any, Any]) -> bool:
    """Return whether attributes, or the unit of precipitation or of a flux, say that a variable is a sum over time."""
    if "time: point" in str(attrs.get("cell_methods", "")) or "instant" in (
        attrs.get("GRIB_stepType"),
        attrs.get("stepType"),
    ):
        return False
    unit = "".join(str(attrs.get("units", "")).replace("**", "").split())
    return (
        PERIOD in attrs
        or "time: sum" in str(attrs.get("cell_methods", ""))
        or "accum" in (attrs.get("GRIB_stepType"), attrs.get("stepType"))
        # The energy of a column of air has the unit of a sum of fluxes.
        or (
            unit in ("Jm-2", "J/m2", "Jm^-2")
            and "vertical_integral" not in f"{var} {attrs.get('long_name', '')}".lower().replace(" ", "_")
        )
        or (aliases.find("total_precipitation", [var]) is not None and unit in ("m", "mm", "kgm-2"))
    )


class FurtherDimension(UserError):
    """A variable has a dimension of which the experiment does not select a value."""

    def __init__(self, dataset: xr.Dataset, var: str, dim: str, source: Source) -> None:
        self.var, self.key, self.place = var, (source.where, dim), source.place
        first = dataset[dim].values[0] if dim in dataset.variables else 0
        name = own_name(dim)
        self.got = (
            f"of {source.where} on time, level, latitude, longitude, got dimension {name!r} ({listed(dataset, dim)}); set "
            f"{source.settings}.select: {{{name}: {first}}} to read one, or name it in {source.settings}.dims"
        )
        super().__init__(f"expected {var} {self.got}")


def merged_dimensions(found: Sequence[FurtherDimension]) -> Problems:
    """Return one problem for each dimension of a source, with all the variables that have it."""
    by_key: dict[tuple[str, str], list[FurtherDimension]] = {}
    for problem in found:
        by_key.setdefault(problem.key, []).append(problem)
    return [
        (group[0].place, f"expected {', '.join(dict.fromkeys(one.var for one in group))} {group[0].got}")
        for group in by_key.values()
    ]


class OtherLevel(UserError):
    """A variable does not have a level of the experiment."""

    def __init__(self, var: str, where: str, there: NDArray[Any], wanted: Sequence[float]) -> None:
        self.var = var
        self.place: tuple[str | int, ...] = ()
        known = ", ".join(f"{value:g}" for value in there)
        absent = [level for level in wanted if not np.isclose(there, level, rtol=1e-6, atol=0).any()]
        near = [there[np.argmin(np.abs(there - level))] for level in absent]
        line = ""
        for factor in (100.0, 0.01):  # Pa in the file and hPa in the experiment, or the reverse
            if all(np.isclose(there, level * factor, rtol=1e-6, atol=0).any() for level in wanted):
                near = [level * factor for level in absent]
                line = f"; change it to levels: [{', '.join(f'{level * factor:g}' for level in wanted)}]"
        got, cure = (", ".join(f"{level:g}" for level in values) for values in (absent, near))
        # Neighbours that are far, or the same for two levels, are no guess at what was meant.
        close = len(set(near)) == len(near) and all(
            one != 0 and 0.5 < level / one < 2 for level, one in zip(near, absent, strict=True)
        )
        self.got = f"in {where} ({known}), got {got}" + (
            f"; did you mean {cure}?{line}" if line or close else "; change it"
        )
        super().__init__(f"expected levels of {var} {self.got}")


def merged_levels(found: Sequence[OtherLevel]) -> Problems:
    """Return one problem for the same levels of several variables."""
    by_key: dict[tuple[tuple[str | int, ...], str], list[str]] = {}
    for problem in found:
        by_key.setdefault((problem.place, problem.got), []).append(problem.var)
    return [
        (where, f"expected levels of {', '.join(dict.fromkeys(names))} {got}") for (where, got), names in by_key.items()
    ]


def _constant(stored: xr.DataArray, var: str) -> int:
    """Return the position of a time at which a static field with a time axis has data, as those of CAM and WRF do at all.

    Archives may have an axis that begins before their data and ends after them. Raises UserError if the fields at some times,
    spread over the axis, that have data differ.
    """
    times, is_float = stored.sizes["time"], stored.dtype.kind == "f"
    first, field = 0, None
    for t in sorted({0, times // 2, *np.linspace(0, times - 1, _COMPARED).astype(int).tolist()}):
        other = stored.isel(time=t).values
        if is_float and not np.isfinite(other).any():
            continue
        if field is None:
            first, field = t, other
        elif not np.array_equal(field, other, equal_nan=is_float):
            raise UserError(f"expected a static field, got {times} times of {var}; move it to dynamic_forcing")
    return first


def _levels(variable: Variable, var: str, dims: tuple[str, ...], dataset: xr.Dataset, where: str) -> tuple[int, ...]:
    """Return the positions of the wanted levels on the level axis of the file."""
    wanted = variable.levels
    if "level" not in dims:
        if wanted:
            raise UserError(f"expected {var} of {where} on levels, got dimensions {dims}; move it to `surface`")
        return ()
    there = dataset["level"].values if "level" in dataset.coords else np.arange(1, dataset.sizes["level"] + 1)
    if not wanted:
        if variable.spec.levels and len(variable.spec.levels) == 1:
            wanted = variable.spec.levels  # a surface field that is stored as one level of the file
        elif len(there) == 1:
            return (0,)
        else:
            raise UserError(
                f"expected {var} of {where} without levels, got {len(there)}; "
                "move it to `level` or give one in `levels`"
            )
    matches = [np.flatnonzero(np.isclose(there, level, rtol=1e-6, atol=0)) for level in wanted]
    if not all(map(len, matches)):
        raise OtherLevel(var, where, there, wanted)
    return tuple(int(match[0]) for match in matches)
