"""What training and forecasts have in common: one argument in place of seven."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from credit_like import registry
from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.nn.noise import NoiseKeys
from credit_like.parallel.runtime import Runtime
from credit_like.schema.checks import has_dropout, has_noise
from credit_like.schema.experiment import Experiment
from credit_like.stepper import Stepper
from credit_like.variables import Variables


@dataclass(frozen=True)
class Context:
    """An experiment with its data and its model, as one process has them."""

    experiment: Experiment
    runtime: Runtime
    variables: Variables
    store: FieldStore
    statistics: Statistics
    stepper: Stepper
    rows: slice = field(default_factory=lambda: slice(None))
    """The rows of the grid that this process has: a band of latitude with domain > 1, else all."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        experiment: Experiment,
        runtime: Runtime,
        variables: Variables,
        store: FieldStore,
        statistics: Statistics,
        rows: slice = slice(None),
    ) -> Context:
        """Return the context of a model that has its values: add corrections, normalisation, and the keys of its noise."""
        physics = [
            registry.of("physics", config).build(
                config, variables, store, statistics, rows=rows, reduce=runtime.sum_over_domain
            )
            for config in experiment.physics
        ]
        noise = None
        if has_noise(experiment) or has_dropout(experiment):
            noise = NoiseKeys(store.seconds, experiment.seed)
        predict = experiment.model.predict
        stepper = Stepper(model, variables, statistics, store.static(rows), predict, physics, rows, noise)
        if any(tensor.device != runtime.device for tensor in (*stepper.parameters(), *stepper.buffers())):
            stepper = stepper.to(runtime.device)  # which replaces parameters even if they stay where they are
        return cls(experiment, runtime, variables, store, statistics, stepper, rows)
