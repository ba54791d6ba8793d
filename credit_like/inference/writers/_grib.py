"""The GRIB files of a forecast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from credit_like.data.aliases import find
from credit_like.data.sources._conventions import PERIOD
from credit_like.data.sources._grib_files import library, locked
from credit_like.data.times import calendar_of
from credit_like.data.units import conversion, same, same_dimensions
from credit_like.derive.fields import PL
from credit_like.errors import UserError
from credit_like.grid import ROUNDING, Grid, turn
from credit_like.inference.layout import ForecastLayout
from credit_like.inference.writers._base import Fields, FilePerInit, ForecastKey

_NUMBERS = ("1", "level", "levels")
"""Units of the numbers of model levels."""
_ELSE = "use netcdf (in `credit-like forecast`: -o FILE.nc)"
_MOST_MEMBERS = 255
"""What the eight bits of GRIB's fields for members count."""
_MISSING = 9999.0  # ecCodes marks points with this value as missing in the bitmap
# ECMWF's parameter database, https://codes.ecmwf.int/grib/param-db/
_PARAMETERS = {
    "temperature": 130, "u_component_of_wind": 131, "v_component_of_wind": 132, "specific_humidity": 133,
    "geopotential": 129, "vertical_velocity": 135, "relative_humidity": 157, "vorticity": 138, "divergence": 155, "wind_speed": 10,
    "2m_temperature": 167, "2m_dewpoint_temperature": 168, "10m_u_component_of_wind": 165, "10m_v_component_of_wind": 166,
    "surface_pressure": 134, "mean_sea_level_pressure": 151, "sea_surface_temperature": 34, "sea_ice_cover": 31,
    "total_precipitation": 228, "total_column_water_vapour": 137, "total_column_water": 136, "total_cloud_cover": 164,
    "geopotential_at_surface": 129, "land_sea_mask": 172, "snow_depth": 141, "skin_temperature": 235,
    "surface_net_solar_radiation": 176, "surface_net_thermal_radiation": 177, "top_net_solar_radiation": 178,
    "top_net_thermal_radiation": 179, "surface_sensible_heat_flux": 146, "surface_latent_heat_flux": 147,
    "toa_incident_solar_radiation": 212, "evaporation": 182,
}  # fmt: skip
_SUMS = (146, 147, 176, 177, 178, 179, 182, 212, 228)
"""Parameters that are sums over time, up to a lead."""


class GribWriter(FilePerInit):
    """Writer of `<initial time>.grib.part`, which is renamed when all its members and leads are written."""

    suffix = ".grib"
    _files: dict[int, BinaryIO]

    def __init__(self, layout: ForecastLayout, folder: Path, bits_per_value: int) -> None:
        super().__init__(layout, folder, 1)
        self.bits_per_value = bits_per_value
        self.eccodes = library()
        self.grid = _grid_keys(layout.grid)
        if layout.timestep % 3600:
            raise UserError(
                f"inference.output.type: expected steps of whole hours for grib, got {layout.timestep} s; {_ELSE}"
            )
        if layout.members > _MOST_MEMBERS:
            raise UserError(
                f"inference.output.type: expected at most {_MOST_MEMBERS} members for grib, got {layout.members}; {_ELSE}"
            )
        if layout.init.dtype.kind != "M":
            raise UserError(
                f"inference.output.type: expected the standard calendar for grib, got {calendar_of(layout.init)}; {_ELSE}"
            )
        with locked():
            parameters = {name: _parameter(name) for name in layout.chosen}
            self.kinds = {name: self._kind(name, parameter) for name, parameter in parameters.items()}
        self.levels = {
            name: {level: self._level_keys(name, level) for level in levels or ()}
            for name, levels in layout.chosen.items()
        }
        self.hours = {name: self._hours(name) for name, parameter in parameters.items() if parameter in _SUMS}

    def _hours(self, name: str) -> int:
        """Return the hours over which a variable is a sum: those that its data declare, or else the time step.

        Raises UserError for parts of an hour, and for sums that begin before the initial time.
        """
        step = self.layout.timestep / 3600
        hours, first = (
            float(self.layout.variable_attrs.get(name, {}).get(PERIOD) or step),
            step * min(self.layout.leads),
        )
        if hours % 1 or hours > first:
            raise UserError(
                f"inference.output.type: expected {name} as sums over whole hours, at most the first lead ({first:g} h), for grib, "
                f"got sums over {hours:g} h; {_ELSE}"
            )
        return int(hours)

    def _kind(self, name: str, parameter: int) -> tuple[int, float, float]:
        """Return the parameter of a variable, and (a, b) of the values to write, a · x + b.

        Raises UserError for units that are absent, unknown or no other form of those of the parameter.
        """
        handle = self._message(parameter, bool(self.layout.chosen[name]))
        wanted = str(self.eccodes.codes_get(handle, "units"))
        self.eccodes.codes_release(handle)
        given = str(self.layout.variable_attrs.get(name, {}).get("units") or "")
        if not given and not same("1", wanted):
            raise UserError(
                f"inference.output.type: expected units of {name} for grib, got none; give the variable `units: {wanted}` or those "
                f"that it has, or {_ELSE}"
            )
        try:
            return parameter, *conversion(given, wanted)
        except UserError as error:
            raise UserError(
                f"inference.output.type: expected {name} in {wanted} for grib, got {given}; {_ELSE}"
            ) from error

    def _message(self, parameter: int, on_levels: bool) -> Any:
        """Return a message of the parameter without values; the caller releases it."""
        codes = self.eccodes
        handle = codes.codes_grib_new_from_samples("GRIB2")
        summed, of_many = parameter in _SUMS, self.layout.members > 1
        template = (11 if of_many else 8) if summed else int(of_many)
        codes.codes_set(handle, "productDefinitionTemplateNumber", template)
        codes.codes_set(handle, "typeOfLevel", "isobaricInhPa" if on_levels else "surface")
        codes.codes_set(handle, "paramId", parameter)
        return handle

    def _level_keys(self, name: str, level: float) -> dict[str, Any]:
        """Return the keys of a level: pressure in whole hPa or else whole Pa, or the number of a model level.

        Raises UserError for other levels.
        """
        attrs = self.layout.variable_attrs.get(f"level_{name}", {})
        units = str(attrs.get("units", ""))
        kind = attrs.get("standard_name")
        if kind == "air_pressure" and same_dimensions(units, "Pa"):
            pascals = round(level * conversion(units, "Pa")[0], 6)
            if pascals % 100 == 0:
                return {"typeOfLevel": "isobaricInhPa", "level": int(pascals) // 100}
            if pascals % 1 == 0:
                return {"typeOfLevel": "isobaricInPa", "level": int(pascals)}
        elif level % 1 == 0 and (kind == "model_level_number" or (units in _NUMBERS and kind != "air_pressure")):
            return {"typeOfLevel": "hybrid", "level": int(level)}
        cure = "" if units else "give the levels of the files `units` (hPa, or 1 for numbers of model levels), or "
        raise UserError(
            f"inference.output.type: expected levels of whole Pa or numbers of model levels for grib, got {level:g} "
            f"{units or 'without units'} of {name}; {cure}{_ELSE}"
        )

    def chunks(self, name: str) -> tuple[int, ...]:
        """Return chunks of one lead, since every message is one field."""
        front = (1,) * len(self.layout.dims)
        return (*front, *self.layout.field_shape(name))

    def _store(self, name: str, places: Sequence[ForecastKey], leads: slice, values: Fields) -> None:
        levels = self.layout.chosen[name] or (None,)
        for (init, member), part in zip(places, values, strict=True):
            if init not in self._files:
                self._files[init] = self._partial(init).open("wb")
            for lead, fields in zip(range(leads.start, leads.stop), part, strict=True):
                for level, field in zip(levels, fields.reshape(len(levels), *fields.shape[-2:]), strict=True):
                    self._append(name, init, member, self.layout.leads[lead], level, field)

    def _append(
        self, name: str, init: int, member: int, lead: int, level: float | None, field_HW: NDArray[np.float32]
    ) -> None:
        """Append one field to the file of an initial time."""
        codes, end = self.eccodes, lead * self.layout.timestep // 3600
        parameter, factor, offset = self.kinds[name]
        time = self.layout.init[init].astype("datetime64[s]").item()
        keys: dict[str, Any] = {
            "dataDate": int(f"{time:%Y%m%d}"),
            "dataTime": int(f"{time:%H%M}"),
            "stepUnits": "h",
            "stepRange": f"{end - self.hours[name]}-{end}" if name in self.hours else str(end),
            **({} if level is None else self.levels[name][level]),
            **(
                {}
                if self.layout.members == 1
                else {"number": member, "numberOfForecastsInEnsemble": self.layout.members}
            ),
            **self.grid,
        }
        values = factor * field_HW.astype(np.float64) + offset
        missing = ~np.isfinite(values)
        if self.bits_per_value == 32:
            keys |= {"packingType": "grid_ieee", "precision": 1}
        else:
            keys |= {"packingType": "grid_simple", "bitsPerValue": self.bits_per_value}
        # After the packing: ecCodes packs the values of its sample again, and reports that all of them are missing.
        keys |= {"bitmapPresent": int(missing.any()), "missingValue": _MISSING}
        with locked():
            handle = self._message(parameter, level is not None)
            try:
                for key, value in keys.items():
                    codes.codes_set(handle, key, value)
                codes.codes_set_values(handle, np.where(missing, _MISSING, values).ravel())
                content = codes.codes_get_message(handle)
            finally:
                codes.codes_release(handle)
        self._files[init].write(content)


def _parameter(name: str) -> int:
    """Return the parameter of a variable in ECMWF's table. Raises UserError for a variable without one here."""
    known = find(name.removesuffix(PL), _PARAMETERS)  # on pressure levels it is the same parameter as on the model's
    if known is None:
        raise UserError(
            f"inference.output.type: expected variables of ECMWF's parameter table for grib, got {name!r}; choose "
            f"others with inference.output.variables and inference.derive, or {_ELSE}"
        )
    return _PARAMETERS[known]


def _grid_keys(grid: Grid) -> dict[str, Any]:
    """Return the keys of a regular or Gaussian latitude-longitude grid.

    Raises UserError for rows or columns that are neither.
    """
    latitude, longitude = grid.latitude, grid.longitude % 360.0
    columns, rows = turn(np.diff(grid.longitude)), np.diff(latitude)
    if len(columns) and len(rows) and np.ptp(columns) < 1e-3:
        keys: dict[str, Any] = {
            "Ni": grid.width,
            "Nj": grid.height,
            "latitudeOfFirstGridPointInDegrees": latitude[0],
            "latitudeOfLastGridPointInDegrees": latitude[-1],
            "longitudeOfFirstGridPointInDegrees": longitude[0],
            "longitudeOfLastGridPointInDegrees": longitude[-1],
            "iDirectionIncrementInDegrees": float(abs(columns[0])),
            "iScansNegatively": int(columns[0] < 0),
            "jScansPositively": int(latitude[0] < latitude[-1]),
        }
        regular_ll = {"gridType": "regular_ll", **keys, "jDirectionIncrementInDegrees": float(abs(rows[0]))}
        apart = np.abs(latitude - np.linspace(latitude[0], latitude[-1], grid.height)).max()
        if apart < ROUNDING:
            return regular_ll
        # The more rows there are, the nearer they are to even spacing: 1e-3 degrees at N1280.
        gaussian = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(grid.height)[0]))
        if grid.height % 2 == 0 and np.abs(np.sort(latitude) - gaussian).max() < min(apart, 1e-3):
            return {"gridType": "regular_gg", "N": grid.height // 2, **keys}
        if np.ptp(rows) < 1e-3:
            return regular_ll
    raise UserError(f"inference.output.type: expected a regular or Gaussian grid for grib, got another; {_ELSE}")
