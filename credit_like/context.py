"""The objects that training and forecasts share, passed as one argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from credit_like import registry
from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.layout import refuse
from credit_like.nn.area import AreaMean, identity
from credit_like.nn.noise import NoiseKeys
from credit_like.nn.place import Place
from credit_like.parallel.runtime import Runtime
from credit_like.schema.checks import column_findings, has_dropout, has_noise, shares_columns
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
    columns: slice = field(default_factory=lambda: slice(None))
    """The columns that it has of these rows: a band of longitude with domain: [rows, columns], else all."""
    whole_rows: Callable[[Tensor], Tensor] = identity
    """Turns this process's part (…, h, w) of a field into its rows with all columns. Collective and differentiable."""

    @property
    def places(self) -> tuple[Place, Place]:
        """Return where this process's rows and columns lie in the grid."""
        grid = self.store.grid
        return Place(self.rows.start or 0, grid.height), Place(self.columns.start or 0, grid.width)

    def area_mean(self, mask_CHW: Tensor, reduce: Callable[[Tensor], Tensor] = identity) -> AreaMean:
        """Return the mean over area of the points of the grid that have data, of this process's rows and columns."""
        weights = torch.from_numpy(self.store.grid.latitude_weights())[:, None] * mask_CHW
        return AreaMean(weights, self.rows, reduce, self.columns).to(self.runtime.device)

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
        columns: slice = slice(None),
        whole_rows: Callable[[Tensor], Tensor] = identity,
        measured: Mapping[int, Mapping[str, NDArray[np.float64]]] = MappingProxyType({}),
    ) -> Context:
        """Return the context of a model that has its values: add corrections, normalisation, and the keys of its noise.

        `measured` has what corrections took from the data of the training, by their position in the experiment; on the whole
        grid.

        Raises UserError for a correction that cannot share columns, where these are shared, or that the data do not suit.
        """
        refuse(column_findings(experiment))
        layout = {"rows": rows, "reduce": runtime.sum_over_domain}
        wide = {"columns": columns, "whole_rows": whole_rows, "column_ranks": runtime.domain_shape[1], **layout}
        physics = []
        for i, config in enumerate(experiment.physics):
            plugin = registry.of("physics", config)
            given: dict[str, Any] = dict(wide if shares_columns(plugin) else layout)
            if measured.get(i):
                given["measured"] = measured[i]
            elif check := getattr(plugin, "check_data", None):
                check(config, store)
            physics.append(plugin.build(config, variables, store, statistics, **given))
        noise = None
        if has_noise(experiment) or has_dropout(experiment):
            noise = NoiseKeys(store.seconds, experiment.seed)
        predict = experiment.model.predict
        static = store.static(rows, columns)
        stepper = Stepper(model, variables, statistics, static, predict, physics, rows, noise, columns, whole_rows)
        if any(tensor.device != runtime.device for tensor in (*stepper.parameters(), *stepper.buffers())):
            stepper = stepper.to(runtime.device)  # which replaces parameters even if they stay where they are
        return cls(experiment, runtime, variables, store, statistics, stepper, rows, columns, whole_rows)
