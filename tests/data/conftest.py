"""Small stores on disk, with every variable known in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from credit_like.schema.data import DataSection
from credit_like.variables import Variables

LEVELS = [100.0, 500.0, 850.0, 1000.0]


def make_dataset(
    steps: int = 40,
    height: int = 9,
    width: int = 12,
    start: str = "2001-01-01",
    hours: int = 6,
    ascending: bool = False,
    calendar: str = "standard",
    seed: int = 0,
) -> xr.Dataset:
    """u, t on four levels, sp, rain at the surface, orography and a mask; noise around different means."""
    random = np.random.default_rng(seed)
    latitude = np.linspace(-80, 80, height)
    time = xr.date_range(start, periods=steps, freq=f"{hours}h", calendar=calendar, use_cftime=calendar != "standard")
    on_levels, flat = ("time", "level", "latitude", "longitude"), ("time", "latitude", "longitude")

    def noise(dims: tuple[str, ...], mean: float, spread: float) -> tuple[tuple[str, ...], Any]:
        sizes = {"time": steps, "level": len(LEVELS), "latitude": height, "longitude": width}
        return dims, (mean + spread * random.standard_normal([sizes[d] for d in dims])).astype(np.float32)

    return xr.Dataset(
        {
            "u": noise(on_levels, 5, 10),
            "t": noise(on_levels, 250, 15),
            "sp": noise(flat, 1e5, 900),
            "rain": noise(flat, 2, 1),
            "sst": noise(flat, 290, 3),
            "orography": noise(flat[1:], 300, 200),
            "lsm": noise(flat[1:], 0.4, 0.1),
        },
        {
            "time": time,
            "level": LEVELS,
            "latitude": latitude if ascending else latitude[::-1],
            "longitude": np.arange(width) * 360.0 / width,
        },
    )


def make_data(path: Any, **changes: Any) -> DataSection:
    """A data section for what `make_dataset` makes."""
    section: dict[str, Any] = {
        "source": {"type": "zarr", "path": str(path)},
        "timestep": "6h",
        "levels": [500, 850],
        "prognostic": {"level": ["u", "t"], "surface": ["sp"]},
        "diagnostic": {"surface": ["rain"]},
        "dynamic_forcing": {"surface": ["sst", {"name": "sun", "compute": "solar"}]},
        "static": {"surface": ["orography", "lsm"]},
        "train": ["2001-01-01", "2001-01-06T18"],
        "valid": ["2001-01-07", "2001-01-08T18"],
        "test": ["2001-01-09", "2001-01-10T18"],
    }
    return DataSection.model_validate({**section, **changes})


@pytest.fixture(scope="session")
def dataset():
    return make_dataset


@pytest.fixture(scope="session")
def data_section():
    return make_data


@pytest.fixture
def stored(tmp_path):
    """stored(dataset, **section changes): dataset, data section, variables and open store, one chunk a time."""
    from credit_like.data.store import open_store

    def make(ds: xr.Dataset | None = None, **changes: Any):
        ds = make_dataset() if ds is None else ds
        path = tmp_path / "store.zarr"
        encoding = {name: {"chunks": (1, *v.shape[1:])} for name, v in ds.items() if "time" in v.dims}
        ds.to_zarr(path, encoding=encoding, consolidated=False)
        data = make_data(path, **changes)
        variables = Variables(data)
        return ds, data, variables, open_store(data, variables)

    return make
