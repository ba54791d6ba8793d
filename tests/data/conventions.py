"""Files as the CDS, CMIP6, CAM and WRF write them, with smooth fields that are known in closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np

STEPS = 40
HOURS = 6


@dataclass
class Made:
    """A folder of files, the `data` keys that read it, and the values (T, H, W) or (H, W) of some of its variables."""

    data: dict[str, Any]
    expected: dict[str, np.ndarray] = field(default_factory=dict)


def values(steps: int, height: int, width: int, mean: float, spread: float, seed: int) -> np.ndarray:
    """Return (T, H, W) float32 noise."""
    noise = np.random.default_rng(seed).standard_normal((steps, height, width))
    return (mean + spread * noise).astype(np.float32)


def coordinate(file, name, data, kind="f8", **attrs):
    file.createDimension(name, len(data))
    variable = file.createVariable(name, kind, (name,))
    variable.setncatts(attrs)
    variable[:] = data


def variable(file, name, dims, data, kind="f4", packed=False, **attrs):
    if packed:
        low, high = float(data.min()), float(data.max())
        made = file.createVariable(name, "i2", dims, fill_value=-32767)
        made.scale_factor, made.add_offset = (high - low) / 65000, (high + low) / 2
    else:
        made = file.createVariable(name, kind, dims, fill_value=attrs.pop("_FillValue", None))
    made.setncatts(attrs)
    made[:] = data


def periods(first: str = "2001-01-01") -> dict[str, Any]:
    year, month = first[:4], first[5:7]
    return {
        "train": [f"{year}-{month}-01", f"{year}-{month}-06T18"],
        "valid": [f"{year}-{month}-07", f"{year}-{month}-08T18"],
        "test": [f"{year}-{month}-09", f"{year}-{month}-10T18"],
    }


def cds(folder: Path, height: int = 9, width: int = 12, overlap: int = 0) -> Made:
    """netCDF of the CDS: `valid_time`, a scalar `number`, `expver` as text by time, streams and parts by time.

    The statics have one time of 1940 and a dimension `number`; some files are packed, as those of older conversions.
    The second part begins with `overlap` times of the first.
    """
    start = 978307200  # 2001-01-01 in s since 1970
    hours = start + np.arange(STEPS) * HOURS * 3600
    t = np.stack([values(STEPS, height, width, 250, 10, level) for level in range(3)], 1)
    flat = {"t2m": values(STEPS, height, width, 280, 9, 4), "sp": values(STEPS, height, width, 1e5, 900, 5)}
    tp = np.abs(values(STEPS, height, width, 0, 1e-3, 6))
    orography, mask = values(1, height, width, 900, 50, 7), values(1, height, width, 0.5, 0.1, 8)

    def begun(path, at, number_dim=False):
        file = netCDF4.Dataset(folder / path, "w")
        coordinate(
            file, "valid_time", at, "i8", units="seconds since 1970-01-01", calendar="proleptic_gregorian",
            standard_name="time", long_name="time",
        )  # fmt: skip
        coordinate(file, "latitude", np.linspace(87, -87, height), units="degrees_north", standard_name="latitude")
        coordinate(file, "longitude", np.arange(width) * 360 / width, units="degrees_east", standard_name="longitude")
        if number_dim:
            coordinate(file, "number", [0], "i8", standard_name="realization", units="1")
        else:
            file.createVariable("number", "i8", ())[:] = 0
        made = file.createVariable("expver", str, ("valid_time",))
        made[:] = np.array(["0001"] * len(at), dtype=object)
        return file

    half = STEPS // 2
    for part, span in (("01", slice(0, half)), ("02", slice(half - overlap, STEPS))):
        with begun(f"pl_{part}.nc", hours[span]) as file:
            coordinate(file, "pressure_level", [1000.0, 500.0, 300.0], units="hPa", positive="down", axis="Z")
            dims = ("valid_time", "pressure_level", "latitude", "longitude")
            variable(file, "t", dims, t[span], units="K", coordinates="number valid_time expver")
        with begun(f"instant_{part}.nc", hours[span]) as file:
            for name, data in flat.items():
                variable(file, name, ("valid_time", "latitude", "longitude"), data[span], packed=True, units="1")
        with begun(f"accum_{part}.nc", hours[span]) as file:
            variable(file, "tp", ("valid_time", "latitude", "longitude"), tp[span], units="m", GRIB_stepType="accum")
    with begun("static.nc", [-946771200], number_dim=True) as file:
        dims = ("valid_time", "number", "latitude", "longitude")
        variable(file, "z", dims, orography[:, None], units="m**2 s**-2")
        variable(file, "lsm", dims, mask[:, None], units="(0 - 1)")
    data = {
        "source": {"type": "netcdf", "path": f"{folder}/*.nc"},
        "timestep": "6h",
        "levels": [300, 500],
        "prognostic": {"level": ["t"], "surface": ["t2m", "sp"]},
        "diagnostic": {"surface": ["tp"]},
        "static": {"surface": ["z", "lsm"]},
        **periods(),
    }
    return Made(data, {"t": t[:, 2], "tp": tp, "z": orography[0], "lsm": mask[0]})


def cmip6(folder: Path, height: int = 9, width: int = 12) -> Made:
    """CMIP6 files of two years in a 360-day calendar: one variable each, bounds, a scalar height, pressure in Pa, `fx`."""
    fields = {
        "ta": np.stack([values(STEPS, height, width, 250, 10, level) for level in range(2)], 1),
        "tas": values(STEPS, height, width, 280, 9, 4),
        "ps": values(STEPS, height, width, 1e5, 900, 5),
    }
    orog = values(1, height, width, 900, 50, 7)[0]

    def begun(path, days):
        file = netCDF4.Dataset(folder / path, "w")
        file.createDimension("bnds", 2)
        coordinate(file, "lat", np.linspace(-87, 87, height), units="degrees_north", standard_name="latitude", axis="Y")
        coordinate(
            file, "lon", np.arange(width) * 360 / width, units="degrees_east", standard_name="longitude", axis="X"
        )
        variable(file, "lat_bnds", ("lat", "bnds"), np.zeros((height, 2)), "f8")
        variable(file, "lon_bnds", ("lon", "bnds"), np.zeros((width, 2)), "f8")
        if days is not None:
            coordinate(
                file, "time", days, units="days since 1850-01-01", calendar="360_day", standard_name="time", axis="T"
            )
            variable(file, "time_bnds", ("time", "bnds"), np.stack([days, days], 1), "f8")
        return file

    days = (2001 - 1850) * 360 + np.arange(STEPS) * HOURS / 24
    half = STEPS // 2
    missing = np.float32(1e20)
    for name, data in fields.items():
        for years, span in (("200101", slice(0, half)), ("200102", slice(half, STEPS))):
            with begun(f"{name}_6hr_MODEL_historical_r1i1p1f1_gn_{years}.nc", days[span]) as file:
                dims = ("time", "lat", "lon")
                if data.ndim == 4:
                    coordinate(file, "plev", [85000.0, 50000.0], units="Pa", standard_name="air_pressure", axis="Z")
                    dims = ("time", "plev", "lat", "lon")
                elif name == "tas":
                    file.createVariable("height", "f8", ())[:] = 2.0
                variable(file, name, dims, data[span], _FillValue=missing, missing_value=missing, units="1")
    with begun("orog_fx_MODEL_historical_r1i1p1f1_gn.nc", None) as file:
        variable(file, "orog", ("lat", "lon"), orog, units="m")
    data = {
        "source": {"type": "netcdf", "path": f"{folder}/*_gn*.nc"},
        "timestep": "6h",
        "levels": [85000, 50000],
        "prognostic": {"level": ["ta"], "surface": ["tas", {"name": "sp"}]},
        "static": {"surface": ["orog"]},
        **periods(),
    }
    return Made(data, {"ta": fields["ta"][:, 0], "sp": fields["ps"], "orog": orog})


def cam(folder: Path, height: int = 9, width: int = 12) -> Made:
    """History files of CAM: hybrid levels with their interfaces, statics at every time, noleap, `date` and `datesec`."""
    t = np.stack([values(STEPS, height, width, 250, 10, level) for level in range(3)], 1)
    ps = values(STEPS, height, width, 1e5, 900, 5)
    phis = values(1, height, width, 900, 50, 7)[0]
    hybrid = "atmosphere_hybrid_sigma_pressure_coordinate"
    for part in range(2):
        with netCDF4.Dataset(folder / f"case.cam.h1.2001-01-{part * 5 + 1:02d}-00000.nc", "w") as file:
            coordinate(file, "ilev", [0.0, 10.0, 500.0, 1000.0], units="hPa", positive="down", standard_name=hybrid)
            coordinate(file, "lev", [5.0, 250.5, 750.25], units="hPa", positive="down", standard_name=hybrid)
            coordinate(file, "lat", np.linspace(-87, 87, height), units="degrees_north", long_name="latitude")
            coordinate(file, "lon", np.arange(width) * 360 / width, units="degrees_east", long_name="longitude")
            file.createDimension("nbnd", 2)
            span = slice(part * 20, part * 20 + 20)
            days = np.arange(STEPS)[span] * HOURS / 24
            file.createDimension("time", None)
            time = file.createVariable("time", "f8", ("time",))
            time.setncatts({"units": "days since 2001-01-01 00:00:00", "calendar": "noleap", "bounds": "time_bnds"})
            time[:] = days
            variable(file, "time_bnds", ("time", "nbnd"), np.stack([days, days], 1), "f8")
            variable(file, "date", ("time",), 20010101 + days.astype(int), "i4")
            variable(file, "hyam", ("lev",), np.zeros(3), "f8")
            variable(file, "hyai", ("ilev",), np.zeros(4), "f8")
            file.createVariable("P0", "f8", ())[:] = 1e5
            variable(file, "T", ("time", "lev", "lat", "lon"), t[span], units="K", mdims="1")
            variable(file, "PS", ("time", "lat", "lon"), ps[span], units="Pa")
            variable(file, "PHIS", ("time", "lat", "lon"), np.stack([phis] * 20), units="m2/s2")
    data = {
        "source": {"type": "netcdf", "path": f"{folder}/case.cam.h1.*.nc"},
        "timestep": "6h",
        "levels": [250.5, 750.25],
        "prognostic": {"level": ["T"], "surface": ["PS"]},
        "static": {"surface": ["PHIS"]},
        **periods(),
    }
    return Made(data, {"T": t[:, 1], "PS": ps, "PHIS": phis})


def wrf(folder: Path, height: int = 9, width: int = 12, curved: float = 0.0) -> Made:
    """Output of WRF on a Mercator grid: times as text, latitude and longitude as fields, staggering.

    `curved` tilts the rows by so many degrees of latitude, as on a Lambert grid.
    """
    t = np.stack([values(STEPS, height, width, 250, 10, level) for level in range(2)], 1)
    t2, hgt = values(STEPS, height, width, 280, 9, 4), values(1, height, width, 900, 50, 7)
    latitude = np.linspace(-60, 60, height)[:, None] + curved * np.linspace(0, 1, width)
    longitude = np.broadcast_to(-180 + np.arange(width) * 360 / width, (height, width))
    texts = [f"2001-01-{step * HOURS // 24 + 1:02d}_{step * HOURS % 24:02d}:00:00" for step in range(STEPS)]
    for first in range(0, STEPS, 8):
        span = slice(first, first + 8)
        with netCDF4.Dataset(folder / f"wrfout_d01_{texts[first]}", "w") as file:
            for name, size in (
                ("Time", None), ("DateStrLen", 19), ("west_east", width), ("south_north", height), ("bottom_top", 2),
                ("bottom_top_stag", 3), ("west_east_stag", width + 1), ("soil_layers_stag", 4),
            ):  # fmt: skip
                file.createDimension(name, size)
            text = file.createVariable("Times", "S1", ("Time", "DateStrLen"))
            text[:] = netCDF4.stringtochar(np.array(texts[span], "S19"))
            plane, moments = ("Time", "south_north", "west_east"), np.ones((8, 1, 1))
            variable(file, "XLAT", plane, latitude * moments, units="degree_north", description="LATITUDE")
            variable(file, "XLONG", plane, longitude * moments, units="degree_east", description="LONGITUDE")
            minutes = np.arange(first, first + 8) * 360
            variable(file, "XTIME", ("Time",), minutes, units="minutes since 2001-01-01 00:00:00")
            variable(file, "T", ("Time", "bottom_top", *plane[1:]), t[span], units="K", stagger="")
            variable(
                file, "U", ("Time", "bottom_top", "south_north", "west_east_stag"), 0.0, units="m s-1", stagger="X"
            )
            variable(file, "PH", ("Time", "bottom_top_stag", *plane[1:]), 0.0, units="m2 s-2", stagger="Z")
            variable(file, "TSLB", ("Time", "soil_layers_stag", *plane[1:]), 0.0, units="K", stagger="Z")
            variable(file, "T2", plane, t2[span], units="K", coordinates="XLONG XLAT XTIME")
            variable(file, "HGT", plane, hgt * moments, units="m")
    data = {
        "source": {"type": "netcdf", "path": f"{folder}/wrfout_d01_*"},
        "timestep": "6h",
        "levels": [1, 2],
        "prognostic": {"level": ["T"], "surface": ["T2"]},
        "static": {"surface": ["HGT"]},
        **periods(),
    }
    return Made(data, {"T": t[:, 0], "T2": t2, "HGT": hgt[0]})


MAKERS = {"cds": cds, "cmip6": cmip6, "cam": cam, "wrf": wrf}
