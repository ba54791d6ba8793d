"""Short forecasts from a few validation times while a model trains: errors that the loss of one step does not show.

Shape suffixes: B batch, C channels, T frames, H rows (this rank's), W longitudes, L leads.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credit_like.context import Context
from credit_like.data.loading.windows import Windows
from credit_like.errors import UserError
from credit_like.host import from_host
from credit_like.rollout import read_ahead, rollout
from credit_like.schema.base import format_duration
from credit_like.schema.experiment import Experiment
from credit_like.scores import SCORES, area_scores
from credit_like.training.derived import DerivedFields
from credit_like.variables import Variables


class ShortForecasts:
    """RMSE, bias, ACC and activity of forecasts from evenly spread validation times, per channel and lead.

    The channels are those of the model and of `evaluation.derive`. Scores are those of `credit-like evaluate` over the
    globe, with `climatology` (C, H, W; this rank's part) in place of one by day and hour. The initial times are dealt out
    to the data-parallel ranks, each of which takes as many steps as the others. Fields are read while the step before is
    computed, and nothing waits for the device until the last step is done. Raises UserError for a lead that is no whole
    number of steps, or longer than the period, and for derived fields that are not possible.
    """

    def __init__(self, context: Context, amp: bool) -> None:
        experiment, statistics = context.experiment, context.statistics
        self.section, self.batch = experiment.trainer.monitor, experiment.trainer.micro_batch_size
        self.stepper, self.runtime = context.stepper, context.runtime
        self.rows, self.columns = context.rows, context.columns
        self.variables, self.store = context.variables, context.store
        self.history_len, self.amp = experiment.data.history_len, amp
        self.leads = _steps(self.section.lead, experiment.data.timestep)
        self.init = self._initial_times(experiment, statistics.missing_times)
        self.derived = DerivedFields(context)
        mask = self.derived.valid(torch.from_numpy(statistics.mask(self.variables.outputs)), self.init[0])
        self.area = context.area_mean(mask)
        self.valid = mask[:, self.rows, self.columns].to(self.runtime.device)

    def _initial_times(self, experiment: Experiment, missing: Collection[int]) -> list[int]:
        try:
            windows = Windows(
                self.store,
                self.variables,
                experiment.data.valid,
                history_len=self.history_len,
                forecast_len=self.leads,
                missing_times=missing,
                rows=self.rows,
                columns=self.columns,
            )
        except ValueError as error:
            raise UserError(f"trainer.monitor.lead: {error}, or to a shorter lead") from error
        count = min(self.section.init, len(windows))
        return [int(windows.starts[i]) for i in np.linspace(0, len(windows) - 1, count).round().astype(int)]

    @property
    def steps(self) -> int:
        """Return the model steps of one rank; each forecast of a batch counts by itself."""
        return -(-len(self.init) // self.runtime.models[1]) * self.leads

    @torch.no_grad()
    def __call__(self, climatology: Tensor, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return `lead_hours`, `initial_times` and per score and channel a list over leads.

        Returns None where `stop` returned true between two batches.
        """
        runtime = self.runtime
        mine, models = runtime.models
        share = -(-len(self.init) // models)
        dealt = self.init[mine::models]
        # Ranks with fewer forecasts run padding ones of weight 0, so that collectives match.
        counted = [1.0] * len(dealt) + [0.0] * (share - len(dealt))
        dealt = dealt + self.init[:1] * (share - len(dealt))
        shape = (self.leads, len(SCORES), len(self.derived))
        sums = torch.zeros(shape, dtype=torch.float64, device=runtime.device)
        for first in range(0, share, self.batch):
            if stop():
                return None
            some = slice(first, first + self.batch)
            weights = from_host(torch.tensor(counted[some]), runtime.device).to(runtime.device, non_blocking=True)
            self._forecast(dealt[some], weights, climatology, sums)
        # A mean over ranks of sums; the domain ranks have the whole grid's scores each.
        total = runtime.sum_over_data(sums) * runtime.dp_size / runtime.domain_size
        scores = (total / len(self.init)).cpu()
        scores[:, 0] = scores[:, 0].sqrt()
        names = Variables.channel_names(self.derived.outputs)
        hours = self.store.step_seconds / 3600
        result: dict[str, Any] = {
            "lead_hours": [lead * hours for lead in range(1, self.leads + 1)],
            "initial_times": len(self.init),
        }
        for i, score in enumerate(("rmse", *SCORES[1:])):
            result[score] = dict(zip(names, scores[:, i].T.tolist(), strict=True))
        return result

    def _forecast(self, init: list[int], counted_B: Tensor, climatology: Tensor, sums: Tensor) -> None:
        """Add the scores of one batch of forecasts to `sums` (L, scores, C)."""
        device, store, derived = self.runtime.device, self.store, self.derived
        rows, columns = derived.read_part

        def truth(lead: int) -> Tensor:
            """Read (B, C, h, W) at this lead."""
            at = [i + lead for i in init]
            return from_host(torch.from_numpy(store.read(self.variables.outputs, at, rows, columns=columns)), device)

        states = rollout(
            self.stepper,
            store,
            self.variables,
            init,
            self.leads,
            history_len=self.history_len,
            rows=self.rows,
            columns=self.columns,
            amp=self.amp,
            without_gradients=torch.no_grad,
        )
        truths = read_ahead(partial(truth, lead) for lead in range(1, self.leads + 1))
        for (lead, state), truth_BCHW in zip(states, truths, strict=True):
            scores_BSC = area_scores(
                derived.of_part(self.stepper.masked(self.stepper.outputs(state)).float()),
                derived.append(truth_BCHW.to(device, non_blocking=True)),
                climatology,
                self.valid,
                self.area,
                self.runtime.sum_over_domain,
                torch.float64,
            )
            sums[lead - 1] += (scores_BSC * counted_B[:, None, None]).sum(0)


@dataclass
class Allowance:
    """Limit of the time that short forecasts may take: the fraction `share` of the time of the run.

    `estimate` is their cost in seconds before they have run once; from then on it is what they took last.
    """

    share: float
    spent: float = 0.0
    cost: float | None = None

    def affords(self, trained: float, estimate: float) -> bool:
        """Return whether one more set of forecasts stays within the share of `trained` seconds of training."""
        return self.spent + (estimate if self.cost is None else self.cost) <= self.share * trained

    def pay(self, seconds: float) -> None:
        """Record that the forecasts took `seconds`."""
        self.cost = seconds
        self.spent += seconds


def _steps(lead: int | dt.timedelta, timestep: dt.timedelta) -> int:
    steps = lead if isinstance(lead, int) else lead / timestep
    if steps < 1 or steps != int(steps):
        shown = lead if isinstance(lead, int) else format_duration(lead)
        raise UserError(
            f"trainer.monitor.lead: expected a whole number of steps of {format_duration(timestep)}, got {shown}, "
            "change it to a multiple of data.timestep"
        )
    return int(steps)
