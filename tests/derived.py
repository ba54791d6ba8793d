"""A small world on hybrid levels: the common start of the tests of derived fields."""

from pathlib import Path

import numpy as np
import xarray as xr
import yaml

from credit_like.schema.experiment import Experiment

LEVELS = 12
HEIGHT, WIDTH, STEPS = 9, 16, 30
SIGMA = np.linspace(0, 1, LEVELS + 1)
A, B = 20_000 * SIGMA * (1 - SIGMA) + np.where(SIGMA == 0, 10.0, 0.0), SIGMA**1.5


def make_world(folder: Path, levels: tuple[int, ...] = tuple(range(1, LEVELS + 1))) -> Path:
    """Write `data.nc` and `levels.yml`, and return the folder: smooth fields on hybrid levels over mountains."""
    (folder / "levels.yml").write_text(yaml.safe_dump({"a": A.tolist(), "b": B.tolist()}))
    rng = np.random.default_rng(2)
    latitude, longitude = np.linspace(90, -90, HEIGHT), np.arange(WIDTH) * 360 / WIDTH
    time = np.datetime64("2000-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h")
    phase = np.deg2rad(longitude) + 0.3 * np.arange(STEPS)[:, None, None]
    wave = np.cos(np.deg2rad(latitude))[:, None] * np.sin(2 * phase)
    ground = 9.80665 * 2800 * np.cos(np.deg2rad(latitude))[:, None] ** 2 * np.clip(np.cos(np.deg2rad(longitude)), 0, 1)
    surface = 101_300 * np.exp(-ground / (287 * 280)) * (1 + 0.01 * wave)
    pressure = ((A[1:] + A[:-1]) / 2)[:, None, None] + ((B[1:] + B[:-1]) / 2)[:, None, None] * surface[:, None]

    def noise(scale):
        return scale * rng.standard_normal(pressure.shape)

    warmth = np.maximum(288 * (pressure / 101_300) ** 0.19, 210) + 4 * wave[:, None] + noise(0.3)
    fields = {
        "temperature": (warmth, "K"),
        "specific_humidity": (
            np.clip(0.01 * (pressure / 101_300) ** 3 * (1 + 0.2 * wave[:, None]), 0, None),
            "kg kg-1",
        ),
        "u": (10 + 8 * wave[:, None] + noise(1.0), "m s-1"),
        "v": (5 * wave[:, None] + noise(1.0), "m s-1"),
    }
    chosen = [level - 1 for level in levels]
    dims = ("time", "level", "latitude", "longitude")
    dataset = xr.Dataset(
        {
            name: (dims, values[:, chosen].astype(np.float32), {"units": units})
            for name, (values, units) in fields.items()
        },
        {"time": time, "level": list(levels), "latitude": latitude, "longitude": longitude},
    )
    dataset["surface_pressure"] = (("time", "latitude", "longitude"), surface.astype(np.float32), {"units": "Pa"})
    dataset["geopotential_at_surface"] = (("latitude", "longitude"), ground.astype(np.float32), {"units": "m2 s-2"})
    dataset.to_netcdf(folder / "data.nc")
    return folder


def make_experiment(world: Path, save_loc: Path, levels: tuple[int, ...] = (), **sections) -> Experiment:
    """Return an experiment over the data of `make_world`, with a model that predicts persistence."""
    data = {
        "source": {"type": "netcdf", "path": str(world / "data.nc")},
        "timestep": "6h",
        "levels": list(levels or range(1, LEVELS + 1)),
        "prognostic": {"level": ["temperature", "specific_humidity", "u", "v"], "surface": ["surface_pressure"]},
        "static": {"surface": ["geopotential_at_surface"]},
        "train": ["2000-01-01", "2000-01-04"],
        "valid": ["2000-01-04T06", "2000-01-05T18"],
        "test": ["2000-01-06", "2000-01-08"],
    }
    plain = {"name": "derived", "save_loc": str(save_loc), "data": data, "model": {"type": "persistence"}, **sections}
    return Experiment.model_validate(plain)


def everything(world: Path, **more) -> list:
    """Return a `derive` key with every field, on three pressure levels."""
    return [
        {"pressure_levels": [850, 250, 500], "model_levels": str(world / "levels.yml"), **more},
        *("geopotential", "mean_sea_level_pressure", "wind_speed", "relative_humidity", "vorticity", "divergence"),
        "total_column_water",
    ]
