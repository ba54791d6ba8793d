"""What training and forecasts have in common: one argument in place of seven."""

from __future__ import annotations

from dataclasses import dataclass, field

from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.parallel.runtime import Runtime
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
