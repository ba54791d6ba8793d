"""Names of the same variable in WeatherBench2 and ARCO-ERA5, at ECMWF, in CREDIT, CMIP6, CAM and WRF."""

from __future__ import annotations

from collections.abc import Iterable

ALIASES: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            ("temperature", "t", "T", "ta"),
            ("u_component_of_wind", "u", "U", "ua"),
            ("v_component_of_wind", "v", "V", "va"),
            ("specific_humidity", "q", "Q", "Qtot", "hus"),
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


def find(name: str, available: Iterable[str]) -> str | None:
    """Return the name in `available` that matches `name`: itself or its only alias there; None if there is none."""
    there = set(available)
    if name in there:
        return name
    known = [other for group in ALIASES if name in group for other in group & there]
    return known[0] if len(known) == 1 else None
