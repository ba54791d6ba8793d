"""Forecasts as one zarr v3 store; every initial time and member is a region, and any process may write it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from credit_like.inference.writers import WriterConfig

if TYPE_CHECKING:
    from credit_like.inference.layout import ForecastLayout
    from credit_like.inference.writers._zarr import ZarrWriter


by_member = True
"""See `credit_like.inference.writers`."""


class Config(WriterConfig):
    type: Literal["zarr"] = "zarr"


def open_writer(config: Config, layout: ForecastLayout, folder: Path) -> ZarrWriter:
    """Return a writer of `folder/forecast.zarr`, called `forecast.zarr.part` until every initial time is complete."""
    from credit_like.inference.writers._zarr import ZarrWriter

    return ZarrWriter(layout, folder, int(config.chunk_mib * 2**20))


def finished_path(folder: Path) -> Path:
    """Return the store of a finished run."""
    return folder / "forecast.zarr"
