"""The module that supplies a correction with the global mean, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.nn.area import AreaMean, identity
from credit_like.physics._correction import Correction
from credit_like.variables import Variables

Mean = Callable[[Tensor], Tensor]
Correct = Callable[..., Tensor]
"""(after, before, mean) → corrected; `mean` turns (B, H, W) into the global mean (B, 1, 1), float64."""


class Fix(nn.Module):
    """Module that calls `correct` with the area mean over the points that have data in all channels of `budget`.

    `changes` names what the correction changes: the channels of each variable. `areas` are their area means, in the same
    order, each channel's over the points where it has data.
    """

    needs_forcing = False

    def __init__(
        self,
        correct: Correct,
        variables: Variables,
        store: FieldStore,
        statistics: Statistics,
        *,
        config: Correction,
        changes: Mapping[str, slice],
        budget: Sequence[slice] = (),
        rows: slice = slice(None),
        reduce: Callable[[Tensor], Tensor] = identity,
        columns: slice = slice(None),
        **_: Any,
    ) -> None:
        super().__init__()
        self.correct, self.changes = correct, dict(changes)
        self.kind: str = getattr(config, "type", "correction")
        self.after_epochs = config.after_epochs
        self._added: list[Tensor] | None = None
        valid_CHW = torch.from_numpy(statistics.mask(variables.outputs))
        weights_H1 = torch.from_numpy(store.grid.latitude_weights())[:, None]

        def area(valid: Tensor) -> AreaMean:
            return AreaMean(weights_H1 * valid, rows, reduce, columns)

        self.areas = nn.ModuleList(area(valid_CHW[where]) for where in changes.values())
        # A variable that is not in the budget, such as one of the oceans alone, takes no points from it.
        self.area = area(torch.cat([valid_CHW[where] for where in budget]).all(0)) if budget else None

    def forward(self, after_BCHW: Tensor, before_BCHW: Tensor) -> Tensor:
        return self._record(self.correct(after_BCHW, before_BCHW, self._mean), after_BCHW)

    def record(self) -> None:
        """Record from now on what every call changes."""
        self._added = []

    def taken(self) -> Tensor:
        """Return this rank's part of the global mean change of each of `changes`, (n,), averaged over the recorded calls.

        Recording ends.
        """
        added, self._added = self._added or [], None
        return torch.stack(added).mean(0)

    def _record(self, corrected_BCHW: Tensor, after_BCHW: Tensor) -> Tensor:
        # Nothing is recorded where backward computes a correction again.
        if self._added is not None and torch._C._current_graph_task_id() < 0:
            change = [
                area.part((corrected_BCHW[:, where] - after_BCHW[:, where]).detach()).mean()
                for where, area in zip(self.changes.values(), cast("list[AreaMean]", self.areas), strict=True)
            ]
            self._added.append(torch.stack(change) if change else corrected_BCHW.new_zeros(0))
        return corrected_BCHW

    def _mean(self, x_BHW: Tensor) -> Tensor:
        # A mean of pressures of 1e5 Pa in float32 would be off by more than what a step changes. The corrected field is in
        # float32 all the same: up to half of its spacing, 0.004 Pa, is left of a constant that is added everywhere.
        assert self.area is not None, "a correction that uses a mean gives its budget"
        mean: Tensor = self.area(x_BHW.double()[:, None])
        return mean[:, 0, None, None]


class ForcedFix(Fix):
    """A `Fix` whose `correct` also takes the dynamic forcing at the time before the step, (B, C, H, W), as its last argument."""

    needs_forcing = True

    def forward(self, after_BCHW: Tensor, before_BCHW: Tensor, forcing_BCHW: Tensor) -> Tensor:  # type: ignore[override]
        return self._record(self.correct(after_BCHW, before_BCHW, self._mean, forcing_BCHW), after_BCHW)
