"""Waves that travel eastward, each with its own speed: data that are made where they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from credit_like.schema.base import Section

if TYPE_CHECKING:
    import xarray


class Config(Section):
    type: Literal["waves"] = "waves"
    latitudes: int = Field(default=16, ge=4)
    steps: int = Field(default=40, ge=1)


def open_dataset(config: Config) -> xarray.Dataset:
    """`u` and `v`: (time, latitude, longitude), six-hourly from 2000-01-01."""
    import xarray

    latitude = np.linspace(90, -90, 2 * config.latitudes + 1)[1::2]
    longitude = np.arange(0, 360, 180 / config.latitudes)
    time = np.arange(config.steps)
    phase = np.deg2rad(longitude)[None, None] - 0.1 * time[:, None, None] + 0.05 * latitude[None, :, None]
    dims = ("time", "latitude", "longitude")
    return xarray.Dataset(
        {
            "u": (dims, (10 * np.sin(2 * phase)).astype("float32"), {"units": "m s-1"}),
            "v": (dims, (10 * np.cos(3 * phase)).astype("float32"), {"units": "m s-1"}),
        },
        coords={
            "time": np.datetime64("2000-01-01", "ns") + time * np.timedelta64(6, "h"),
            "latitude": ("latitude", latitude, {"units": "degrees_north"}),
            "longitude": ("longitude", longitude, {"units": "degrees_east"}),
        },
    )
