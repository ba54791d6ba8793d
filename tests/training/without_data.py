"""A trainer as training builds it, but without files: zeros as static fields, and samples that a test makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from credit_like import build
from credit_like.grid import Grid
from credit_like.parallel.apply import materialise as with_weights
from credit_like.parallel.runtime import Runtime
from credit_like.plan.simulate import _NoData, _trainer, sample_of
from credit_like.schema.experiment import Experiment
from credit_like.state import Sample
from credit_like.training.trainer import Trainer
from credit_like.variables import Variables

NARROW_MODEL = {
    "type": "wxformer",
    "dim": [8, 16, 32, 64],
    "depth": [1, 1, 1, 1],
    "dim_head": 4,
    "use_spectral_norm": True,
}
"""A small model that several ranks can share in any way."""


def global_grid(height: int, width: int) -> Grid:
    return Grid(90 - (np.arange(height) + 0.5) * 180 / height, np.arange(width) * 360 / width)


def small_experiment(grid: Grid, data: dict[str, Any], **sections: Any) -> Experiment:
    """An experiment on a grid, with the variables that `data` names, and sections of its own."""
    return Experiment.model_validate(
        {
            "name": "small",
            "save_loc": "runs/small",
            "data": {
                "source": {"type": "synthetic", "latitudes": grid.height, "longitudes": grid.width},
                "timestep": "6h",
                "levels": [1, 2],
                "static": {"surface": ["orography"]},
                "train": ["2000-01-01", "2000-01-05"],
                "valid": ["2000-01-06", "2000-01-07"],
                "test": ["2000-01-08", "2000-01-09"],
                **data,
            },
            **sections,
        }
    )


def trainer_without_data(
    experiment: Experiment,
    grid: Grid,
    runtime: Runtime,
    materialise: Callable[[nn.Module, Runtime, int], nn.Module] = with_weights,
) -> tuple[Trainer, Sample]:
    """The trainer of this rank, by default with real weights, and an empty micro-batch for it."""
    variables = Variables(experiment.data)
    store = _NoData(grid, variables)
    model = build.parallel_model(experiment, variables, store, runtime)
    trainer = _trainer(model, experiment, runtime, variables, store, grid, materialise)
    return trainer, sample_of(experiment, variables, grid, trainer.context.rows, trainer.context.columns)
