"""Ensembles: Gaussian random fields (`random_field`), added to the initial state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.inference.random_field import SphericalRandomField
from credit_like.schema.checks import ensemble_findings
from credit_like.schema.inference import Ensemble
from credit_like.transforms import Transforms
from credit_like.variables import Variables


def perturbations(
    ensemble: Ensemble,
    variables: Variables,
    statistics: Statistics,
    store: FieldStore,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Callable[[Sequence[int]], Callable[[Tensor, Sequence[int]], Tensor]]:
    """Return a function from the members of a batch to the `perturb` argument of `rollout`.

    Adds the fields of `gaussian_fields`. Raises UserError as that function does.
    """
    fields = gaussian_fields(ensemble, variables, statistics, store, rows, columns)
    transforms = Transforms(variables.role("prognostic"))

    def for_members(members: Sequence[int]) -> Callable[[Tensor, Sequence[int]], Tensor]:
        def perturb(newest_BCHW: Tensor, init: Sequence[int]) -> Tensor:
            drawn = fields(members, init)
            changed = transforms.forward(newest_BCHW, torch) + torch.from_numpy(drawn).to(newest_BCHW.device)
            perturbed: Tensor = transforms.inverse(changed, torch)
            return perturbed

        return perturb

    return for_members


def gaussian_fields(
    ensemble: Ensemble,
    variables: Variables,
    statistics: Statistics,
    store: FieldStore,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]:
    """Return a function from members and initial positions to perturbations (B, C, H, W) of the transformed values.

    The noise of (seed, member, initial time, channel) is the same in every batch, order and layout, and in data that begin
    at another time. Its standard deviation is `amplitude[variable]` times the channel's own change per step. Member 0 is
    the unperturbed control. Raises UserError for an amplitude of a variable that is not prognostic, and if all members
    would be the same.
    """
    prognostic = variables.role("prognostic")
    perturbed = ensemble.model_copy(update={"from_": "perturbations"})
    for _, message in ensemble_findings(perturbed, [variable.name for variable in prognostic]):
        raise UserError(f"inference.ensemble.amplitude: {message}")
    _, _, change_std = statistics.select(prognostic)
    amplitude = [ensemble.amplitude.get(variable.name, 0.0) for variable in prognostic for _ in variable.channels]
    size_C = np.array(amplitude) * change_std
    grid = store.grid
    field = SphericalRandomField(grid, ensemble.length_scale_km)

    def noise(member: int, init: int) -> NDArray[np.float32]:
        result = np.zeros((len(size_C), grid.height, grid.width), np.float32)
        for channel in np.flatnonzero(size_C) if member else ():
            time = int(store.seconds[init]) % 2**64  # a seed is not negative, unlike seconds before 1970
            rng = np.random.default_rng((ensemble.seed, member, time, int(channel)))
            result[channel] = size_C[channel] * field.draw(rng)
        return result[:, rows, columns]

    return lambda members, init: np.stack([noise(member, i) for member, i in zip(members, init, strict=True)])
