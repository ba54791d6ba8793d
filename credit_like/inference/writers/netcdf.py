"""Forecasts as netCDF-4 files that follow the CF conventions: one file per initial time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.inference.writers import WriterConfig

if TYPE_CHECKING:
    from credit_like.inference.layout import ForecastLayout
    from credit_like.inference.writers._netcdf import NetcdfWriter


class Config(WriterConfig):
    type: Literal["netcdf"] = "netcdf"
    compression: int = Field(default=0, ge=0, le=9)
    """zlib level; 0 = no compression. Compression saves about a fifth of the size, but takes most of the writing time."""


def open_writer(config: Config, layout: ForecastLayout, folder: Path) -> NetcdfWriter:
    """Return a writer of `folder/forecast/<initial time>.nc`; a file has the ending `.part` until it is complete."""
    from credit_like.inference.writers._netcdf import NetcdfWriter

    return NetcdfWriter(layout, folder, int(config.chunk_mib * 2**20), config.compression)


def finished_path(folder: Path) -> Path:
    """Return the folder of a finished run's files."""
    return folder / "forecast"
