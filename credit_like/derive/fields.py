"""The derived fields of an experiment: what they need, their names and levels, and their values.

Imports no torch, so that `check` can report what is missing; the functions of tensors are imported when fields are
computed. Shape suffixes: B batch, K levels of a variable, H rows, W longitudes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from credit_like.data import units
from credit_like.data.aliases import find
from credit_like.data.declared import check_units, level_factor, parametric
from credit_like.derive.levels import HybridLevels, read_levels
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.schema.data import VariableSpec
from credit_like.schema.derive import Derive
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variable, Variables

if TYPE_CHECKING:
    from torch import Tensor

    from credit_like.data.store import FieldStore

PL = "_pl"
"""Suffix of a predicted variable that is interpolated to pressure levels."""
_T, _Q, _U, _V = "temperature", "specific_humidity", "u_component_of_wind", "v_component_of_wind"
_PS, _T2M, _PHI, _GROUND = "surface_pressure", "2m_temperature", "geopotential", "geopotential_at_surface"
_TOTAL_WATER = "Qtot"
"""Vapour and condensate in CREDIT's data of CAM, in place of specific humidity except in relative humidity."""
_CONDENSATE = (
    "specific_cloud_liquid_water_content",
    "specific_cloud_ice_water_content",
    "specific_rain_water_content",
    "specific_snow_water_content",
)
_HEIGHTS = ("orography", "surface_altitude", "topography", "HGT", "orog")
_ATTRS = {
    _PHI: {"units": "m2 s-2", "standard_name": "geopotential"},
    "mean_sea_level_pressure": {"units": "Pa", "standard_name": "air_pressure_at_mean_sea_level"},
    "wind_speed": {"units": "m s-1", "standard_name": "wind_speed"},
    "relative_humidity": {"units": "1", "standard_name": "relative_humidity"},
    "vorticity": {"units": "s-1", "standard_name": "atmosphere_relative_vorticity"},
    "divergence": {"units": "s-1", "standard_name": "divergence_of_wind"},
    "total_column_water": {"units": "kg m-2", "standard_name": "atmosphere_mass_content_of_water"},
}
_UNITS = {
    **dict.fromkeys((_T, _T2M), "K"),
    **dict.fromkeys((_Q, *_CONDENSATE), "kg kg-1"),
    **dict.fromkeys((_U, _V), "m s-1"),
    _PS: "Pa",
    _PHI: "m2 s-2",
}
"""Units of what fields are computed from."""
_HORIZONTAL = ("vorticity", "divergence")
_OF_ONE_LEVEL = ("wind_speed", "relative_humidity", *_HORIZONTAL)
"""Fields that are computed on each level from that level alone, unless they are interpolated to pressure levels."""
_BLOCK_BYTES = 32 * 2**20  # of one field of a column, in double precision


@dataclass(frozen=True, eq=False)
class Derivation:
    """The fields of a `derive` key. Raises UserError, which names the missing variables, if the model cannot supply one.

    `key` is the key's place in the experiment; `variables` are the model's.
    """

    config: Derive
    variables: Variables
    key: str = "derive"
    hybrid: HybridLevels | None = field(init=False)

    def __post_init__(self) -> None:
        levels = self.config.model_levels
        try:
            object.__setattr__(self, "hybrid", None if levels == "pressure" else read_levels(levels))
        except UserError as error:
            raise UserError(f"{self.key}.model_levels: {error}") from error
        predicted = {variable.name for variable in self.variables.outputs}
        for name in self.config.fields:
            if name in predicted:
                raise UserError(f"{self.key}: expected fields that the model does not predict, got {name}; remove it")
        if not self.outputs:
            raise UserError(f"{self.key}: expected fields or pressure levels, got neither; add some or remove the key")
        for variable in self.outputs:
            self._require(variable.name)

    # --- what there is -----------------------------------------------------------------------------------------------

    @cached_property
    def outputs(self) -> tuple[Variable, ...]:
        """Return the derived variables: interpolated ones, then the fields in the order of the experiment."""
        levels = self.config.pressure_levels
        above = [v.name for v in self.variables.outputs if v.levels] if levels else []
        result = [_variable(f"{name}{PL}", levels) for name in above]
        for name in self.config.fields:
            if name in ("mean_sea_level_pressure", "total_column_water"):
                result.append(_variable(name, ()))
            else:
                base = self.base(name)
                result.append(_variable(name, levels or (base.levels if base else ())))
        return tuple(result)

    def base(self, name: str) -> Variable | None:
        """Return the predicted variable on whose own levels a field with levels is, or is where no pressure levels are given."""
        return self._predicted(_T if name in (_PHI, "relative_humidity") else _U)

    def inputs(self, name: str) -> tuple[Variable, ...]:
        """Return the predicted variables from which a derived one is computed, in the order of the model's outputs."""
        wanted = {found.name for need in self._needs(name) if (found := self._predicted(need)) is not None}
        if name == "total_column_water":
            wanted |= {found.name for found in (*self.condensate, self.lower_end) if found is not None}
        return tuple(variable for variable in self.variables.outputs if variable.name in wanted)

    @cached_property
    def needs_neighbours(self) -> bool:
        """Whether a field of a row depends on the rows beside it."""
        return any(name in _HORIZONTAL for name in self.config.fields)

    def attrs(self, name: str, store: FieldStore) -> dict[str, str]:
        """Return units and standard name of a derived variable."""
        if name.endswith(PL):
            return store.attrs(self.variables[name.removesuffix(PL)])
        return dict(_ATTRS[name])

    def ground(self, store: FieldStore) -> np.ndarray | None:
        """Return the geopotential (H, W) in m² s⁻² of the surface, from a static field of geopotential or of height."""
        from credit_like.derive.vertical import GRAVITY

        variable = self._ground
        if variable is None:
            return None
        values = store.read([variable], [0])[0, 0].astype(np.float64)
        declared = store.attrs(variable).get("units", "")
        if units.same_dimensions(declared, "m"):
            return values * (units.conversion(declared, "m")[0] * GRAVITY)
        if units.same_dimensions(declared, _UNITS[_PHI]):
            return values * units.conversion(declared, _UNITS[_PHI])[0]
        return values * GRAVITY if variable.name in _HEIGHTS else values

    def check_units(self, store: FieldStore) -> None:
        """Raise UserError where the data declare other units than those that the fields are computed from."""
        needed = set(_CONDENSATE) if "total_column_water" in self.config.fields else set()
        needed |= {_PS} if needed and self.lower_end is not None else set()
        for output in self.outputs:
            needs = self._needs(output.name)
            is_computed = self.hybrid is not None and find(output.name.removesuffix(PL), (_T, _PHI)) is not None
            # What is interpolated alone may be in any units.
            needed |= set(needs if is_computed or not output.name.endswith(PL) else needs[1:])
        for name in _UNITS:
            if name in needed:
                predicted = self._predicted(name)
                is_total = predicted is not None and predicted.name == _TOTAL_WATER
                check_units(store, self.key, _TOTAL_WATER if is_total else name, _UNITS[name])
        if any(_GROUND in self._needs(output.name) for output in self.outputs):
            self._check_ground(store)
        of_pressure = {
            need
            for output in self.outputs
            if self.config.pressure_levels or output.name in ("relative_humidity", "total_column_water")
            for need in self._needs(output.name)
        }
        on_levels = [
            variable for need in sorted(of_pressure) if (variable := self._predicted(need)) and variable.levels
        ]
        for variable in on_levels if self.hybrid is None else ():
            if kind := parametric(store, variable):
                raise UserError(
                    f"{self.key}.model_levels: expected the coefficients of the levels of {variable.name}, which are "
                    f"{kind} in the data, got none; set it to era5-137 or a file"
                )
            if level_factor(store, variable, "hPa") not in (None, 1):
                raise UserError(
                    f"{self.key}: expected levels of {variable.name} in hPa, got {store.level_units(variable)!r}; convert those of "
                    "the files"
                )

    def _check_ground(self, store: FieldStore) -> None:
        """Raise UserError where the ground is declared in units of neither height nor geopotential."""
        assert self._ground is not None, "needs are checked when the derivation is made"
        declared = store.attrs(self._ground).get("units", "")
        known = units.same_dimensions(declared, declared) and declared.strip()
        if known and not any(units.same_dimensions(declared, wanted) for wanted in ("m", _UNITS[_PHI])):
            raise UserError(
                f"{self.key}: expected {self._ground.name} in 'm2 s-2' or 'm', got {declared!r}, change it to the geopotential or "
                "the height of the ground"
            )

    # --- values ------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        fields_BKHW: Mapping[str, Tensor],
        ground_HW: Tensor | None,
        grid: Grid,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Compute derived variable → (B, levels, H, W) float32, one level at the surface; all of them, or `names`.

        `fields_BKHW` has the `inputs` on their own levels, on all rows of `grid`. Differentiable. Columns are computed a
        few rows at a time in double precision, so that memory is bounded for many levels.
        """
        import torch

        from credit_like.derive import horizontal

        wanted = [variable.name for variable in self.outputs] if names is None else list(names)
        columns = [name for name in wanted if name not in _HORIZONTAL]
        winds = [_U, _V] if any(name in _HORIZONTAL for name in wanted) else []
        example = next(iter(fields_BKHW.values()))
        batch, _, height, width = example.shape
        levels = max(len(self.hybrid) if self.hybrid else 0, *(x.shape[1] for x in fields_BKHW.values()))
        at_once = max(1, _BLOCK_BYTES // (8 * batch * levels * width))
        parts: dict[str, list[Tensor]] = {}
        for first in range(0, height, at_once):
            rows = slice(first, first + at_once)
            column = _Column(
                self,
                {name: x[:, :, rows].double() for name, x in fields_BKHW.items()},
                None if ground_HW is None else ground_HW[rows].double(),
            )
            for name in columns:
                parts.setdefault(name, []).append(column.field(name))
            for name in winds:
                parts.setdefault(f"wind {name}", []).append(column.on_levels(name))
        whole = {name: torch.cat(part, 2) for name, part in parts.items()}
        for name in wanted:
            if name in _HORIZONTAL:
                whole[name] = getattr(horizontal, name)(whole[f"wind {_U}"], whole[f"wind {_V}"], grid)
        return {name: whole[name].float() for name in wanted}

    # --- needs -------------------------------------------------------------------------------------------------------

    def _needs(self, name: str) -> tuple[str, ...]:
        """Return what a derived variable needs, under the names of WeatherBench2."""
        pressure = (_PS,) if self.hybrid else ()
        column = (_T, _Q, _PS, _GROUND)
        levels = pressure if self.config.pressure_levels else ()
        if name.endswith(PL):
            base = name.removesuffix(PL)
            known = find(base, (_T, _PHI))
            return (base, *(column if known and self.hybrid else pressure))
        return {
            _PHI: column,
            "mean_sea_level_pressure": (_T2M, _PS, _GROUND) if self.config.conventions == "credit" else column,
            "wind_speed": (_U, _V, *levels),
            "vorticity": (_U, _V, *levels),
            "divergence": (_U, _V, *levels),
            "relative_humidity": (_T, _Q, *(column if self.config.pressure_levels and self.hybrid else pressure)),
            "total_column_water": (_Q, *pressure),
        }[name]

    def _require(self, name: str) -> None:
        needs = dict.fromkeys(self._needs(name))
        absent = [need for need in needs if (self._ground if need == _GROUND else self._predicted(need)) is None]
        if name == "relative_humidity" and (water := self._predicted(_Q)) is not None and water.name == _TOTAL_WATER:
            absent.append(_Q)
        if absent:
            raise UserError(
                f"{self.key}: expected {', '.join(needs)} for {name}, got an experiment without {', '.join(absent)}; add "
                f"{'it' if len(absent) == 1 else 'them'} to data{' (static)' if absent == [_GROUND] else ''} or remove {name}"
            )
        if name in (_PHI, "mean_sea_level_pressure") and self.hybrid is None and self.config.conventions != "credit":
            raise UserError(
                f"{self.key}.model_levels: expected hybrid levels for {name}, got levels of pressure; set it to era5-137 "
                f"or a file, or remove {name}"
            )
        for need in needs:
            variable = self._ground if need == _GROUND else self._predicted(need)
            assert variable is not None
            if need not in (_PS, _T2M, _GROUND):
                if variable.levels or need in (_T, _Q, _U, _V):
                    self._require_levels(
                        variable, 1 if name in _OF_ONE_LEVEL and not self.config.pressure_levels else 2
                    )
            elif variable.levels:
                raise UserError(
                    f"{self.key}: expected {variable.name} at the surface for {name}, got it on levels; change it or remove {name}"
                )
        self._require_the_same_levels(name)
        if self.hybrid is None and name != "total_column_water":
            self._require_pressures(needs)

    def _require_pressures(self, needs: Iterable[str]) -> None:
        """Raise UserError for pressure levels beyond those of a variable, where its values are not known."""
        for variable in (self._predicted(need) for need in needs):
            if variable is None or not variable.levels:
                continue
            low, high = min(variable.levels), max(variable.levels)
            outside = [p for p in self.config.pressure_levels if not low * (1 - 1e-6) <= p <= high * (1 + 1e-6)]
            if outside:
                raise UserError(
                    f"{self.key}.pressure_levels: expected pressures within the levels of {variable.name}, {low:g} to {high:g}, "
                    f"got {', '.join(f'{p:g}' for p in outside)}; both are in hPa: change them or convert the levels of the data, "
                    "or set model_levels if data.levels are not pressures"
                )

    def _require_the_same_levels(self, name: str) -> None:
        """Raise UserError where levels of different variables would be combined that are not the same ones."""
        together: tuple[str, ...] = ()
        if name == "total_column_water" and self.hybrid is None:
            together = (_Q, *(variable.name for variable in self.condensate))
        elif not self.config.pressure_levels:
            pairs = {"relative_humidity": (_T, _Q), **dict.fromkeys(("wind_speed", *_HORIZONTAL), (_U, _V))}
            together = pairs.get(name, ())
        found = [variable for need in together if (variable := self._predicted(need)) is not None]
        for other in found[1:]:
            if other.levels != found[0].levels:
                raise UserError(
                    f"{self.key}: expected {other.name} on the levels of {found[0].name} ({found[0].levels_text}) for {name}, "
                    f"got it on {other.levels_text}; change its levels or remove {name}"
                )

    def _require_levels(self, variable: Variable, count: int) -> None:
        """Raise UserError for a variable on fewer levels than `count`, and for numbers that are not levels."""
        if len(variable.levels) < count:
            few = {1: "one level", 2: "two levels"}[count]
            raise UserError(
                f"{self.key}: expected {variable.name} on at least {few}, got {len(variable.levels)}; change data.levels"
            )
        self.positions(variable)

    def positions(self, variable: Variable) -> np.ndarray:
        """Return which of the hybrid levels the levels of a variable are, or the order of its pressure levels.

        Raises UserError for numbers that are not levels.
        """
        levels = np.array(variable.levels)
        if self.hybrid is None:
            if (levels <= 0).any():
                raise UserError(f"{self.key}.model_levels: expected levels in hPa, got {levels.min():g}; change it")
            return np.argsort(levels)
        if (at := self.hybrid.numbers(levels)) is not None:
            return at
        if len(levels) == len(self.hybrid) and not np.array_equal(levels, np.rint(levels)):
            return np.argsort(np.argsort(levels))
        raise UserError(
            f"{self.key}.model_levels: expected levels of {variable.name} from 1 to {len(self.hybrid)}, or their pressures from "
            f"{self.hybrid.nominal[0]:g} to {self.hybrid.nominal[-1]:g} hPa, got {levels.min():g} to {levels.max():g}; change it "
            "to what data.levels are"
        )

    def _predicted(self, name: str) -> Variable | None:
        names = [variable.name for variable in self.variables.outputs]
        found = find(name, names)
        if found is None and name == _Q and _TOTAL_WATER in names:
            found = _TOTAL_WATER
        return None if found is None else self.variables[found]

    @cached_property
    def condensate(self) -> tuple[Variable, ...]:
        """The predicted condensates that humidity does not contain."""
        water = self._predicted(_Q)
        if water is not None and water.name == _TOTAL_WATER:
            return ()
        return tuple(found for name in _CONDENSATE if (found := self._predicted(name)) is not None)

    @cached_property
    def lower_end(self) -> Variable | None:
        """The predicted surface pressure, below which pressure levels hold no water; None on hybrid levels or without it."""
        found = self._predicted(_PS)
        return None if self.hybrid is not None or found is None or found.levels else found

    @cached_property
    def _ground(self) -> Variable | None:
        names = [variable.name for variable in self.variables.role("static")]
        found = next((name for known in (_GROUND, *_HEIGHTS) if (name := find(known, names)) is not None), None)
        return None if found is None else self.variables[found]


def written_derivation(experiment: Experiment, variables: Variables) -> Derivation | None:
    """Return the fields to write with forecasts, or None. Raises UserError for one that is not possible."""
    section = experiment.inference.derive
    return None if section is None else Derivation(section, variables, "inference.derive")


def scored_derivation(experiment: Experiment, variables: Variables) -> Derivation | None:
    """Return the fields to score: of `evaluation.derive`, else of `inference.derive`; None without either.

    Raises UserError for a field that is not possible.
    """
    section = experiment.evaluation.derive
    if section is None:
        return written_derivation(experiment, variables)
    return Derivation(section, variables, "evaluation.derive")


class _Column:
    """Some rows of a batch, with what several derived fields share computed once."""

    def __init__(self, derivation: Derivation, fields_BKHW: Mapping[str, Tensor], ground_HW: Tensor | None) -> None:
        self.of, self.config, self.fields, self._ground_HW = derivation, derivation.config, fields_BKHW, ground_HW

    def field(self, name: str) -> Tensor:
        """Return (B, levels, H, W) of a derived variable that needs no neighbouring points."""
        from credit_like.derive import vertical

        if name.endswith(PL):
            return self.on_levels(name.removesuffix(PL))
        if name == _PHI:
            return self._extended[0] if self.config.pressure_levels else self._own(_T, self._geopotential)
        if name == "mean_sea_level_pressure":
            credit = self.config.conventions == "credit"
            warmth = self.fields[self._name(_T2M)][:, 0] if credit else self._surface_temperature
            return vertical.mean_sea_level_pressure(warmth, self._ground, self._surface)[:, None]
        if name == "wind_speed":
            return vertical.wind_speed(self.on_levels(_U), self.on_levels(_V))
        if name == "relative_humidity":
            return vertical.relative_humidity(self.on_levels(_T), self.on_levels(_Q), self._pressure_of_result)
        water = self._full(self._name(_Q))
        for condensate in self.of.condensate:
            water = water + self._full(condensate.name)
        return vertical.column_water(water, self._thickness)[:, None]

    def on_levels(self, name: str) -> Tensor:
        """Return a predicted variable on the pressure levels, or on its own levels if none are asked for."""
        from credit_like.derive import vertical

        if not self.config.pressure_levels:
            return self.fields[self._name(name)]
        if self.of.hybrid is not None and (known := find(name, (_T, _PHI))) is not None:
            return self._extended[1 if known == _T else 0]
        field_BKHW, pressure_BKHW = self._sorted(self._name(name))
        return vertical.interpolate(field_BKHW, pressure_BKHW, self._wanted)

    @property
    def _wanted(self) -> list[float]:
        return [100.0 * level for level in self.config.pressure_levels]

    def _name(self, name: str) -> str:
        variable = self.of._predicted(name)
        assert variable is not None, "needs are checked when the derivation is made"
        return variable.name

    @property
    def _ground(self) -> Tensor:
        assert self._ground_HW is not None, "needs are checked when the derivation is made"
        return self._ground_HW.expand(self._surface.shape)

    @property
    def _surface(self) -> Tensor:
        return self.fields[self._name(_PS)][:, 0]

    @cached_property
    def _interfaces(self) -> Tensor:
        from credit_like.derive import vertical

        assert self.of.hybrid is not None
        return vertical.interface_pressure(self._surface, self.of.hybrid.a.tolist(), self.of.hybrid.b.tolist())

    @cached_property
    def _pressure(self) -> Tensor:
        from credit_like.derive import vertical

        return vertical.level_pressure(self._interfaces)

    def _sorted(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a variable and its pressure, from the top of the atmosphere to the surface."""
        from credit_like.nn.constants import on_device

        variable, x = self.of.variables[name], self.fields[name]
        positions = self.of.positions(variable)
        if self.of.hybrid is None:
            levels = tuple(100.0 * variable.levels[i] for i in positions)
            pressure = on_device(levels, x.dtype, x.device)
            return _chosen(x, positions), pressure[:, None, None].expand(x.shape)
        order = np.argsort(positions)
        return _chosen(x, order), _chosen(self._pressure, positions[order])

    def _full(self, name: str) -> Tensor:
        """Return a variable on all hybrid levels, those between its own interpolated; pressure levels as they are."""
        from credit_like.derive import vertical

        x, pressure = self._sorted(name)
        if self.of.hybrid is None or x.shape[1] == len(self.of.hybrid):
            return x
        return vertical.interpolate_columns(x, pressure, self._pressure)

    @cached_property
    def _geopotential(self) -> Tensor:
        """Geopotential on all hybrid levels: the predicted one, or the hydrostatic one."""
        from credit_like.derive import vertical

        if self.of._predicted(_PHI) is not None and self._name(_PHI) in self.fields:
            return self._full(self._name(_PHI))
        warmth, humidity = self._full(self._name(_T)), self._full(self._name(_Q))
        return vertical.geopotential(self._ground, warmth, humidity, self._interfaces, self.config.conventions)

    @cached_property
    def _surface_temperature(self) -> Tensor:
        from credit_like.derive import vertical

        warmth = self._full(self._name(_T))
        return vertical.surface_temperature(warmth, self._pressure, self._geopotential, self._ground, self._surface)

    @cached_property
    def _extended(self) -> tuple[Tensor, Tensor]:
        """Geopotential and temperature on the pressure levels, those below ground too."""
        from credit_like.derive import vertical

        pressure, columns = self._pressure, [self._geopotential, self._full(self._name(_T))]
        if self.config.conventions == "standard":  # CREDIT holds the lowest level down to the ground
            pressure = _stack(pressure, self._surface[:, None])
            ends = (self._ground, self._surface_temperature)
            columns = [_stack(x, end[:, None]) for x, end in zip(columns, ends, strict=True)]
        phi, warmth = (vertical.interpolate(x, pressure, self._wanted) for x in columns)
        return vertical.extrapolate_below_ground(
            phi, warmth, self._wanted, self._surface_temperature, self._ground, self._surface
        )

    def _own(self, name: str, full_BKHW: Tensor) -> Tensor:
        """Return, of a field on all hybrid levels, the levels of a variable in its own order."""
        return _chosen(full_BKHW, self.of.positions(self.of.variables[self._name(name)]))

    @property
    def _pressure_of_result(self) -> Tensor:
        from credit_like.nn.constants import on_device

        like = self.fields[self._name(_T)]
        if self.of.hybrid is not None and not self.config.pressure_levels:
            return self._own(_T, self._pressure)
        levels = self.config.pressure_levels or self.of.variables[self._name(_T)].levels
        return on_device(tuple(100.0 * level for level in levels), like.dtype, like.device)[:, None, None]

    @property
    def _thickness(self) -> Tensor:
        """Thickness in Pa of the layers: between interfaces, or from half-way to half-way between pressure levels.

        On pressure levels it is that of the part above the ground, where surface pressure is predicted.
        """
        import torch

        if self.of.hybrid is not None:
            return self._interfaces.diff(dim=-3)
        _, pressure = self._sorted(self._name(_Q))
        middle = (pressure[:, 1:] + pressure[:, :-1]) / 2
        edges = _stack(pressure[:, :1], middle, pressure[:, -1:])
        if self.of.lower_end is not None:
            edges = torch.minimum(edges, self._surface[:, None])
        return edges.diff(dim=-3)


def _chosen(x_BKHW: Tensor, levels: np.ndarray) -> Tensor:
    """Return these levels. An index that is a list would be copied to the device each time, for which the host waits."""
    import torch

    from credit_like.nn.constants import on_device

    return x_BKHW.index_select(1, on_device(tuple(levels.tolist()), torch.int64, x_BKHW.device))


def _stack(*parts: Tensor) -> Tensor:
    import torch

    return torch.cat(parts, -3)


def _variable(name: str, levels: Sequence[float]) -> Variable:
    return Variable(name, "derived", tuple(levels), VariableSpec(name=name))
