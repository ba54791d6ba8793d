"""CREDIT's corrections after the network, of both generations, as entries of `physics`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credit_like import registry
from credit_like.derive.levels import HybridLevels
from credit_like.errors import UserError
from credit_like.migrate.blocks import steps
from credit_like.migrate.document import Document, Keys
from credit_like.variables import Variables

# Ours → CREDIT's key in the first generation and in the second.
_NAMES = {
    "surface_pressure": ("surface_pressure_name", "sp_var"),
    "humidity": ("specific_total_water_name", "q_var"),
    "precipitation": ("precipitation_name", "precip_var"),
    "evaporation": ("evaporation_name", "evapor_var"),
    "temperature": ("air_temperature_name", "T_var"),
    "u": ("u_wind_name", "U_var"),
    "v": ("v_wind_name", "V_var"),
    "surface_geopotential": ("surface_geopotential_name", "surface_geopotential_name"),
}
_COLUMN = ("surface_pressure", "humidity")
_BUDGET = (*_COLUMN, "temperature", "u", "v", "surface_geopotential")
_USES = {
    "mass": _COLUMN,
    "moisture": (*_COLUMN, "precipitation", "evaporation"),
    "energy": _BUDGET,
}
_NET = {
    ("top", "down"): ("TOA_net_radiation_flux_name",),
    ("surface", "down"): ("surface_net_radiation_flux_name", "surface_energy_flux_name"),
}
# Sensible and latent heat are positive upward in CREDIT's first generation, positive downward in its second.
_EITHER = {
    ("top", "down"): ("TOA_down_solar_name",),
    ("top", "up"): ("TOA_up_solar_name", "TOA_up_OLR_name"),
    ("surface", "down"): ("surf_down_solar_name", "surf_down_LW_name"),
    ("surface", "up"): ("surf_up_solar_name", "surf_up_LW_name", "surf_SH_name", "surf_LH_name"),
}
_SECOND = {
    ("top", "down"): ("toa_down_solar_input_var",),
    ("top", "up"): ("toa_up_solar_var", "toa_up_olr_var"),
    ("surface", "down"): ("surf_down_solar_var", "surf_down_lw_var", "surf_sh_var", "surf_lh_var"),
    ("surface", "up"): ("surf_up_solar_var", "surf_up_lw_var"),
}
# CREDIT's first generation applies its corrections in this order, regardless of their order in the file.
_ORDER = (
    "tracer_fixer", "global_mass_fixer", "global_water_fixer", "global_energy_fixer", "global_energy_fixer_updown",
)  # fmt: skip
_KINDS = {
    "tracer_fixer": "clip", "global_mass_fixer": "mass", "global_water_fixer": "moisture",
    "global_energy_fixer": "energy", "global_energy_fixer_updown": "energy",
}  # fmt: skip


@dataclass(frozen=True)
class Fixer:
    """A correction of the source: its keys, its kind in CREDIT and which generation's names it has."""

    at: Keys
    kind: str
    second: bool

    @property
    def place(self) -> Keys:
        """Return the key of the correction as a whole."""
        return self.at[:-1] if self.second else self.at

    def names(self, source: Document, key: str) -> list[str]:
        """Return the variables that a key names, without the path of the second generation."""
        found = source.get(*self.at, key, default=[])
        return [str(name).rpartition("/")[2] for name in (found if isinstance(found, list) else [found])]


def corrections(source: Document, variables: Variables) -> list[dict[str, Any]]:
    """Return the corrections after every step that are active; those that cannot be had are listed with the reason."""
    made: list[dict[str, Any]] = []
    for fixer in (*_first_generation(source), *_second_generation(source)):
        entries = _clips(source, fixer) if fixer.kind == "tracer_fixer" else [_conservation(source, fixer)]
        for entry in entries:
            config = registry.module("physics", entry["type"]).Config.model_validate(entry)
            try:
                registry.of("physics", config).find(config, variables)
            except UserError as error:
                source.remark(fixer.place, f"left out: {str(error).removeprefix('physics.')}")
            else:
                made.append(entry)
    return made


def _first_generation(source: Document) -> Iterator[Fixer]:
    at: Keys = ("model", "post_conf")
    post = source.section("model", "post_conf")
    if not post:
        return
    if not source.get(*at, "activate"):
        _not_active(source, at, post)
        return
    if "grid" in post:
        source.remark((*at, "grid"), "areas follow from the latitudes of the data", covered=True)
    names = [name for name in _ORDER if name in post] + [name for name in post if name not in _ORDER]
    for name in names:
        if not isinstance(post[name], Mapping):
            continue
        if name in _ORDER and post[name].get("activate"):
            source.get(*at, name, "activate")
            yield Fixer((*at, name), name, second=False)
        elif name in _ORDER or not post[name].get("activate", True):
            _not_active(source, (*at, name), post[name])
        elif name == "scaling_coefs":
            source.remark(
                (*at, name), "not translated: set the `units` of these variables and the signs of their fluxes in `physics`, so "
                "that the budgets count what CREDIT scales"
            )  # fmt: skip
        else:
            source.remark((*at, name), "not translated: there is no such correction")


def _not_active(source: Document, at: Keys, section: Mapping[str, Any]) -> None:
    """List a section that CREDIT does not use, or one that lacks the key by which CREDIT would know."""
    if "activate" in section:
        source.remark(at, "not active", covered=True)
    else:
        source.remark(at, "left out: it has no `activate`")


def _second_generation(source: Document) -> Iterator[Fixer]:
    for at, block in steps(source, "postblocks"):
        if block.get("type") in _ORDER:
            source.get(*at, "type")
            yield Fixer((*at, "args"), block["type"], second=True)


def _clips(source: Document, fixer: Fixer) -> list[dict[str, Any]]:
    """Return one `clip` for each pair of bounds."""
    at = fixer.at
    if not fixer.second and not source.get(*at, "denorm", default=True):
        source.remark((*at, "denorm"), "thresholds are in physical units: change those of `physics`")
    names = fixer.names(source, "tracer_vars" if fixer.second else "tracer_name")

    def bounds(key: str) -> list[float | None]:
        value = source.get(*at, key)
        listed = value if isinstance(value, list) else [value] * len(names)
        if len(listed) != len(names):
            source.remark((*at, key), f"{len(listed)} bounds of {len(names)} variables: those without one have none")
        return [None if bound is None else float(bound) for bound in (*listed, *[None] * len(names))][: len(names)]

    made: dict[tuple[float | None, float | None], dict[str, Any]] = {}
    for name, low, high in zip(names, bounds("tracer_thres"), bounds("tracer_thres_max"), strict=True):
        if low is None and high is None:
            continue
        limits = {"minimum": low} | ({} if high is None else {"maximum": high})
        made.setdefault((low, high), {"type": "clip", "variables": [], **limits})["variables"].append(name)
    return list(made.values())


def _conservation(source: Document, fixer: Fixer) -> dict[str, Any]:
    """Return the entry of a correction that conserves mass, water or energy."""
    at, kind = fixer.at, _KINDS[fixer.kind]
    entry: dict[str, Any] = {"type": kind}
    for ours in _USES[kind]:
        if named := fixer.names(source, _NAMES[ours][fixer.second]):
            entry[ours] = named[0]
    if kind == "mass":
        source.remark(
            fixer.place, "compare: a constant is added to surface pressure; CREDIT multiplies it, or changes humidity", covered=True
        )  # fmt: skip
        source.get(*at, "fix_level_num")
    elif kind == "moisture":
        entry |= {"water_scale": 1000.0, "evaporation_upward": False}
    else:
        fluxes = _SECOND if fixer.second else _NET if fixer.kind == "global_energy_fixer" else _EITHER
        for (place, direction), keys in fluxes.items():
            if names := [name for key in keys for name in fixer.names(source, key)]:
                entry.setdefault(place, {})[direction] = names
        if fixer.second:
            source.remark(
                fixer.place, "compare: CREDIT takes W m-2 at the top and J m-2 at the surface, here both are J m-2"
            )  # fmt: skip
    hours = source.get(*at, "lead_time_periods")
    if hours is not None:
        source.remark((*at, "lead_time_periods"), "the time step is `data.timestep`", covered=True)
    for key in ("activate_outside_model", "denorm"):
        if source.get(*at, key) is not None:
            source.remark((*at, key), "corrections always follow the model and see physical units", covered=True)
    if source.get(*at, "simple_demo"):
        source.remark((*at, "simple_demo"), "not translated: the grid and the levels are those of the data")
    hybrid = source.get(*at, "grid_type", default="sigma" if fixer.second else "pressure") == "sigma"
    return entry | (_coefficients(source, fixer) if hybrid else {})


def _coefficients(source: Document, fixer: Fixer) -> dict[str, Any]:
    """Return the coefficients of the interfaces of hybrid levels where CREDIT's file of them is at hand."""
    at = fixer.at
    names = source.get(*at, "lon_lat_level_name", default=[])
    where: Keys = (*at, "save_loc_physics") if fixer.second else ("data", "save_loc_physics")
    path = Path(os.path.expandvars(str(source.get(*where, default=""))))
    of_interfaces = source.get(*at, "midpoint", default=fixer.kind == "global_energy_fixer_updown")
    if len(names) >= 4 and of_interfaces and path.is_file():
        from credit_like.data.files import netcdf_files

        dataset = netcdf_files.load(path)
        if {names[2], names[3]} <= set(dataset.variables):
            levels = HybridLevels(dataset[names[2]].values.astype(float), dataset[names[3]].values.astype(float))
            return {"a": [float(f"{a:.9g}") for a in levels.a], "b": [float(f"{b:.9g}") for b in levels.b]}
    found = f" ({names[2]} and {names[3]} of {path})" if len(names) >= 4 else ""
    source.remark(
        fixer.place,
        f"set `a` and `b`, the coefficients of the interfaces{found}, in `physics`: without them levels are taken for hPa",
    )
    return {}
