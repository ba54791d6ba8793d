"""Where the forecasts of an experiment are; needs no torch."""

from __future__ import annotations

from pathlib import Path

from credit_like import registry
from credit_like.schema.experiment import Experiment


def forecast_path(experiment: Experiment) -> Path:
    """Return the path that `evaluate` opens: a zarr store or a folder of netCDF files."""
    output = experiment.inference.output
    path: Path = registry.of("writer", output).finished_path(experiment.forecast_folder)
    return path
