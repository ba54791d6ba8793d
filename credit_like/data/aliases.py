"""Names of the same variable in WeatherBench2 and ARCO-ERA5, at ECMWF, in CREDIT, CMIP6, CAM and WRF."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ALIASES: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            ("temperature", "t", "T", "ta"),
            ("u_component_of_wind", "u", "U", "ua"),
            ("v_component_of_wind", "v", "V", "va"),
            ("specific_humidity", "q", "Q", "hus"),
            ("specific_cloud_liquid_water_content", "clwc", "CLDLIQ", "clw"),
            ("specific_cloud_ice_water_content", "ciwc", "CLDICE", "cli"),
            ("specific_rain_water_content", "crwc"),
            ("specific_snow_water_content", "cswc"),
            ("geopotential", "z", "Z"),
            ("vertical_velocity", "w", "W", "wap"),
            ("2m_temperature", "t2m", "2t", "VAR_2T", "tas", "TREFHT", "T2"),
            ("2m_dewpoint_temperature", "d2m", "2d", "VAR_2D"),
            ("10m_u_component_of_wind", "u10", "10u", "VAR_10U", "uas"),
            ("10m_v_component_of_wind", "v10", "10v", "VAR_10V", "vas"),
            ("surface_pressure", "sp", "SP", "ps", "PS", "PSFC"),
            ("mean_sea_level_pressure", "msl", "MSL", "psl", "PSL"),
            ("sea_surface_temperature", "sst", "SSTK", "SST"),
            ("sea_ice_cover", "siconc", "ci", "CI"),
            ("total_precipitation", "tp", "TP"),
            ("total_column_water_vapour", "tcwv", "TCWV"),
            ("total_cloud_cover", "tcc", "TCC"),
            ("toa_incident_solar_radiation", "tisr", "tsi"),
            ("geopotential_at_surface", "z_surface", "Z_GDS4_SFC", "PHIS"),
            ("land_sea_mask", "lsm", "LSM"),
            ("snow_depth", "sd", "SD"),
            ("skin_temperature", "skt", "SKT", "ts", "TSK"),
        ),
    )
)

# Words in the attributes of a variable of the same name that is another quantity.
_OTHERS = {
    "temperature": ("potential temperature", "virtual temperature"),
    "geopotential": ("geopotential height",),
    "vertical_velocity": ("upward air velocity", "z-wind component"),
    "specific_humidity": ("relative humidity", "total water"),
}


def find(name: str, available: Iterable[str]) -> str | None:
    """Return the name in `available` that matches `name`: itself or its only alias there; None if there is none."""
    there = set(available)
    if name in there:
        return name
    known = [other for group in ALIASES if name in group for other in group & there]
    return known[0] if len(known) == 1 else None


def other_quantity(name: str, attrs: Mapping[str, object]) -> str:
    """Return the name that attributes give the quantity of a variable found as an alias of `name`; empty unless it is another.

    WRF's `T` is the perturbation of the potential temperature, and `w` is a velocity in m s-1 in many files.
    """
    words = next((words for known, words in _OTHERS.items() if find(known, [name]) is not None), ())
    for key in ("standard_name", "long_name", "description"):
        told = str(attrs.get(key, ""))
        if any(word in told.lower().replace("_", " ") for word in words):
            return told
    return ""
