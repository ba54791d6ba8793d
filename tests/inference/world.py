"""A small world on disk, and a stepper for it: the common start of the tests of forecasts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import nn

from credit_like.context import Context
from credit_like.data.statistics import fit_statistics
from credit_like.data.store import open_store
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.stepper import Stepper
from credit_like.variables import Variables

HEIGHT, WIDTH, STEPS = 8, 16, 48


class Stir(nn.Module):
    """A model whose output depends on every input: a fixed 1 × 1 map, then a shift to the east."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, generator=generator) * 0.3)

    def forward(self, x_BCTHW):
        mixed = torch.einsum("oc,bchw->bohw", self.weight, x_BCTHW[:, :, -1]).tanh()
        return mixed.roll(1, -1)[:, :, None]


def make_data(path: Path, masked: bool = False, steps: int = STEPS) -> Path:
    """A netCDF file of smooth moving fields with noise: u, t on two levels, sp, rain, a forcing and a static field."""
    rng = np.random.default_rng(1)
    latitude = np.linspace(90 - 90 / HEIGHT, -90 + 90 / HEIGHT, HEIGHT)
    longitude = np.arange(WIDTH) * 360 / WIDTH
    time = np.datetime64("2000-01-01", "ns") + np.arange(steps) * np.timedelta64(6, "h")
    phase = np.deg2rad(longitude)[None, None, None] - 0.2 * np.arange(steps)[:, None, None, None]
    wave = np.cos(np.deg2rad(latitude))[None, None, :, None] * np.sin(2 * phase + np.arange(2)[None, :, None, None])

    def field(scale, offset, noise=0.1):
        return (offset + scale * (wave + noise * rng.standard_normal(wave.shape))).astype(np.float32)

    four, three = ("time", "level", "latitude", "longitude"), ("time", "latitude", "longitude")
    dataset = xr.Dataset(
        {
            "u": (
                four,
                field(10, 5),
                {"units": "m s-1", "long_name": "eastward wind", "standard_name": "eastward_wind"},
            ),
            "temperature": (four, field(5, 280), {"units": "K"}),
            "sp": (three, field(500, 1e5)[:, 0], {"units": "Pa"}),
            "rain": (three, np.abs(field(1, 0)[:, 1]), {"units": "kg m-2", "standard_name": "precipitation_amount"}),
            "sst": (three, field(2, 290)[:, 0], {"units": "K"}),
            "oro": (("latitude", "longitude"), field(100, 300)[0, 0], {"units": "m"}),
        },
        {
            "time": time,
            "level": ("level", [500.0, 850.0], {"units": "hPa"}),
            "latitude": latitude,
            "longitude": longitude,
        },
    )
    if masked:
        for name in ("u", "temperature", "sp", "rain"):
            dataset[name].values[..., :2, :3] = np.nan
    dataset["latitude"].attrs = {"units": "degrees_north"}
    dataset["longitude"].attrs = {"units": "degrees_east"}
    dataset.to_netcdf(path)
    return path


def make_experiment(data: Path, save_loc: Path, **inference) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "stirred",
            "save_loc": str(save_loc),
            "data": {
                "source": {"type": "netcdf", "path": str(data)},
                "timestep": "6h",
                "levels": [500, 850],
                "prognostic": {"level": ["u", "temperature"], "surface": ["sp"]},
                "diagnostic": {"surface": ["rain"]},
                "dynamic_forcing": {"surface": ["sst"]},
                "static": {"surface": ["oro"]},
                "train": ["2000-01-01", "2000-01-06"],
                "valid": ["2000-01-07", "2000-01-08"],
                "test": ["2000-01-09", "2000-01-12"],
            },
            "model": {"type": "persistence"},
            "inference": {"lead": "1d", **inference},
        }
    )


def make_context(experiment: Experiment) -> Context:
    """Return the experiment with its data and a model that stirs, in one process."""
    variables = Variables(experiment.data)
    store = open_store(experiment.data, variables)
    statistics = fit_statistics(store, variables, experiment.data)
    model = Stir(variables.in_channels, variables.out_channels)
    stepper = Stepper(model, variables, statistics, store.static(), "increment")
    return Context(experiment, Runtime(), variables, store, statistics, stepper)


def forecasts_of_truth(store, variables, init, leads, change=lambda truth: truth) -> xr.Dataset:
    """Return forecasts from the positions `init` that are the truth, or what `change` makes of it, (init, leads, levels, H, W)."""
    coords = {
        "time": store.times[init].astype("datetime64[ns]"),
        "prediction_timedelta": np.arange(1, leads + 1) * np.timedelta64(6, "h").astype("timedelta64[ns]"),
        "level": [500.0, 850.0],
        "latitude": store.grid.latitude,
        "longitude": store.grid.longitude,
    }
    dataset, dims = xr.Dataset(coords=coords), tuple(coords)
    for variable in variables.outputs:
        values = change(np.stack([store.read([variable], range(i + 1, i + 1 + leads)) for i in init])).astype("f4")
        dataset[variable.name] = (dims, values) if variable.levels else (dims[:2] + dims[3:], values[:, :, 0])
    return dataset
