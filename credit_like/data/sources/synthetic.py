"""The embedded dataset: weather simulated on demand by `credit_like.data.sources._shallow_water`, with nothing to download.

Six-hourly, on a Gaussian grid, latitude north to south: wind and height of the free surface in two layers (level 1 is
the upper one), column water, precipitation over the preceding six hours, and orography. Generating it again on the same
machine gives identical bits. It is cached in a folder, one zarr store per configuration.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from credit_like.data.sources._cache import SET_CACHE, cache_folder
from credit_like.errors import UserError, reason
from credit_like.schema.base import Section

if TYPE_CHECKING:
    import xarray


HOURS = 6
SPIN_UP_STEPS = 200  # 50 days, after which the storms are at full strength
CHUNK_STEPS = 8
LAND_ABOVE = 150.0  # m
_MOST_VALUES = 2**26
"""Of one field at all times; a dataset holds eight fields, of eight bytes while it is made."""
_DAYS = (dt.date(1678, 1, 1), dt.date(2261, 12, 31))

# dimensions, units, standard name, long name
VARIABLES: dict[str, tuple[str, str, str | None, str]] = {
    "u": ("time level", "m s-1", "eastward_wind", "eastward wind"),
    "v": ("time level", "m s-1", "northward_wind", "northward wind"),
    "height": ("time level", "m", "geopotential_height", "height of the free surface that exerts the layer's pressure"),
    "column_water": ("time", "kg m-2", "atmosphere_mass_content_of_water_vapor", "column water"),
    "precipitation": ("time", "kg m-2", "precipitation_amount", "precipitation over the preceding six hours"),
    "orography": ("", "m", "surface_altitude", "height of the ground"),
    "land_sea_mask": ("", "1", "land_binary_mask", "1 on land, 0 at sea"),
}


class Config(Section):
    """The embedded dataset: its grid, its length and its initial weather."""

    type: Literal["synthetic"] = "synthetic"
    longitudes: int = Field(default=64, ge=32, le=512)
    """Number of columns, twice that of rows."""
    latitudes: int = Field(default=32, ge=16, le=256)
    """Number of rows."""
    steps: int = Field(default=40, ge=1)
    """Number of times, six hours apart."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weather."""
    start: dt.date = dt.date(2000, 1, 1)
    """Day of the first time."""

    @model_validator(mode="after")
    def _two_to_one(self) -> Config:
        if self.longitudes != 2 * self.latitudes or self.latitudes % 2:
            rows = self.latitudes + self.latitudes % 2
            raise UserError(
                f"expected an even number of latitudes and twice as many longitudes, got latitudes {self.latitudes} "
                f"and longitudes {self.longitudes}; change them to {rows} and {2 * rows}"
            )
        if (most := _most_steps(self)) < self.steps:
            raise UserError(
                f"expected at most {most} steps on a grid of {self.longitudes} × {self.latitudes} from {self.start} (they "
                f"fit into memory, and lie between 1678 and 2261), got {self.steps}; change steps, the grid or start"
            )
        return self


def open_dataset(config: Config) -> xarray.Dataset:
    """Open the whole dataset lazily, generating it if it is not in the cache.

    Dims time, level, latitude (north to south), longitude; float32; units and names in the attributes.
    """
    import xarray

    path = cache_path(config)
    if not os.path.exists(path):  # also where the folder cannot be entered, which `_store` reports
        _store(generate(config), path)
    return xarray.open_zarr(path, chunks=None, consolidated=False)[list(VARIABLES)]


def _most_steps(config: Config) -> int:
    """Return how many times fit into memory and, as nanoseconds, into 64 bits."""
    first, last = _DAYS
    if not first <= config.start <= last:
        return 0
    left = ((last - config.start).days + 1) * 24 // HOURS
    return min(_MOST_VALUES // (config.longitudes * config.latitudes), left)


def cache_path(config: Config) -> Path:
    """Return the path of the cached store for this configuration and this version of the code."""
    here = Path(__file__)
    code = here.read_bytes() + here.with_name("_shallow_water.py").read_bytes()
    key = hashlib.sha256(config.model_dump_json().encode() + code).hexdigest()[:16]
    return cache_folder() / f"synthetic-{config.longitudes}x{config.latitudes}-{config.steps}-{key}.zarr"


def generate(config: Config) -> xarray.Dataset:
    """Integrate the dataset in memory."""
    import xarray

    from credit_like.data.sources import _shallow_water

    sphere = _shallow_water.Sphere(config.longitudes, config.latitudes)
    fields = _shallow_water.simulate(sphere, HOURS * 3600.0, config.steps, SPIN_UP_STEPS, config.seed)
    fields["land_sea_mask"] = np.where(fields["orography"] > LAND_ABOVE, 1.0, 0.0)
    start = np.datetime64(config.start, "ns")
    dataset = xarray.Dataset(
        coords={
            "time": start + np.arange(config.steps) * np.timedelta64(HOURS, "h"),
            "level": ("level", [1, 2], {"long_name": "layer, numbered from the top", "units": "1"}),
            "latitude": ("latitude", np.rad2deg(sphere.latitude), _axis("latitude", "degrees_north")),
            "longitude": ("longitude", np.rad2deg(sphere.longitude), _axis("longitude", "degrees_east")),
        },
        attrs={"Conventions": "CF-1.11", "title": "Embedded two-layer shallow-water weather"},
    )
    for name, (dims, units, standard_name, long_name) in VARIABLES.items():
        attrs = {"units": units, "standard_name": standard_name, "long_name": long_name}
        dataset[name] = ((*dims.split(), "latitude", "longitude"), fields[name].astype("float32"), attrs)
    return dataset


def _axis(name: str, units: str) -> dict[str, str]:
    return {"units": units, "standard_name": name, "long_name": name}


def _store(dataset: xarray.Dataset, path: Path) -> None:
    """Write under a temporary name, then rename: readers see a complete store, and the first of several writers wins.

    Raises UserError where the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise UserError(
            f"expected to keep the generated dataset in {path.parent}, got: {reason(error)}; {SET_CACHE}"
        ) from error
    try:
        chunks = {name: (CHUNK_STEPS, *v.shape[1:]) if "time" in v.dims else v.shape for name, v in dataset.items()}
        encoding = {str(name): {"chunks": shape, "compressors": None} for name, shape in chunks.items()}
        dataset.to_zarr(draft, mode="w", zarr_format=3, consolidated=False, encoding=encoding)
        try:
            draft.rename(path)
        except OSError:
            if not path.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
