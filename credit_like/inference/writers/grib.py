"""Forecasts as GRIB edition 2 files, one per initial time, with ecCodes (`pip install 'credit-like[grib]'`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.inference.writers import WriterConfig

if TYPE_CHECKING:
    from credit_like.inference.layout import ForecastLayout
    from credit_like.inference.writers._grib import GribWriter


class Config(WriterConfig):
    type: Literal["grib"] = "grib"
    bits_per_value: int = Field(default=16, ge=8, le=32)
    """Bits of simple packing, which divides the range of each field into 2^bits steps; 32 stores float32 as it is."""


def open_writer(config: Config, layout: ForecastLayout, folder: Path) -> GribWriter:
    """Return a writer of `folder/forecast/<initial time>.grib`; a file has the ending `.part` until it is complete.

    Raises UserError for a grid, a variable, units, levels or times that GRIB or its tables do not have.
    """
    from credit_like.inference.writers._grib import GribWriter

    return GribWriter(layout, folder, config.bits_per_value)


def finished_path(folder: Path) -> Path:
    """Return the folder of a finished run's files."""
    return folder / "forecast"
