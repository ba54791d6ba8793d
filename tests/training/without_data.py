"""A trainer as training builds it, but without files: zeros as static fields, and samples that a test makes."""

from __future__ import annotations

from credit_like import build
from credit_like.plan.simulate import _NoData, _trainer, sample_of
from credit_like.variables import Variables


def trainer_without_data(experiment, grid, runtime):
    """The trainer of this rank, with real weights, and an empty micro-batch for it."""
    variables = Variables(experiment.data)
    store = _NoData(grid, variables)
    model = build.parallel_model(experiment, variables, store, runtime)
    trainer = _trainer(model, experiment, runtime, variables, store, grid)
    return trainer, sample_of(experiment, variables, grid, trainer.context.rows)
