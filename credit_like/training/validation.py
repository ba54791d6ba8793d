"""Validation: loss, RMSE and ACC over the validation samples, and short forecasts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credit_like.context import Context
from credit_like.data.times import spread
from credit_like.losses._mean import AreaLoss
from credit_like.nn import spectral_norm
from credit_like.nn.area import AreaMean
from credit_like.parallel.fsdp2 import free_gathered
from credit_like.parallel.runtime import Runtime
from credit_like.scores import SCORES, area_scores
from credit_like.state import Sample
from credit_like.stepper import Stepper
from credit_like.training.derived import DerivedFields
from credit_like.training.ema import Ema
from credit_like.training.forecasts import Allowance, ShortForecasts
from credit_like.training.stage import Stage
from credit_like.training.to_device import ToDevice
from credit_like.variables import Variables

log = logging.getLogger(__name__)

_CLIMATOLOGY_TIMES = 40


class Validation:
    """Validates the stepper's model, with averaged weights where there are any, and makes the short forecasts.

    `amp`: compute in bfloat16 autocast. Raises UserError for short forecasts that the data do not allow.
    """

    def __init__(self, context: Context, stage: Stage, ema: Ema | None, amp: bool) -> None:
        monitor = context.experiment.trainer.monitor
        self.context, self.stage, self.ema, self.amp = context, stage, ema, amp
        self.forecasts = ShortForecasts(context, amp) if monitor.every else None
        self.allowance = Allowance(monitor.share)
        self._validator: Validator | None = None
        self._climatology = torch.empty(0)  # read with the first validation

    def begin(self, stage: Stage) -> None:
        """Validate with the loss and the samples of another phase from here on."""
        self.stage = stage
        if self._validator is not None:
            self._validator.loss = stage.loss
            self._validator.members = stage.phase.experiment.trainer.members

    def __call__(
        self, stop: Callable[[], bool], ended: int | None, trained: float, steps: int
    ) -> dict[str, Any] | None:
        """Return the scores: empty without a validation sample, None where `stop` returned true in between.

        `ended`: how many epochs have ended if one has just ended, else None. `trained`: the seconds that the
        `steps` optimiser steps of the run took.
        """
        loader = self.stage.valid_loader
        if not len(loader):
            return {}
        stepper, validator = self.context.stepper, self._made()
        stepper.eval()
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            spectral_norm.refresh(stepper.model)
            row = validator(loader.batches(0), stop)
            if row and self._forecasts_due(ended, trained, steps):
                row = self._forecast(row, self._climatology, stop)
        free_gathered(stepper.model)  # the averages
        spectral_norm.refresh(stepper.model)
        stepper.train()
        return row

    def _made(self) -> Validator:
        """Return the validator; the first call reads the climatology."""
        if self._validator is None:
            context = self.context
            times = context.store.period(context.experiment.data.train)
            self._climatology = time_mean(context, times, self.forecasts.derived if self.forecasts else None)
            climatology = self._climatology[: context.variables.out_channels]
            names = Variables.channel_names(context.variables.outputs)
            self._validator = Validator(
                context.stepper,
                self.stage.loss,
                context.runtime,
                names,
                climatology,
                # Scores are means over area, regardless of the weights of the loss.
                context.area_mean(torch.from_numpy(context.statistics.mask(context.variables.outputs))),
                self.amp,
                self.stage.phase.experiment.trainer.members,
            )
        return self._validator

    def _forecasts_due(self, ended: int | None, trained: float, steps: int) -> bool:
        """Return whether short forecasts go with this validation: at the end of an epoch, if there is time for them."""
        experiment, runtime = self.stage.phase.experiment, self.context.runtime
        trainer = experiment.trainer
        if self.forecasts is None or ended is None or ended % trainer.monitor.every:
            return False
        # A step of training costs about three of the model per sample; once they have run, their own time is known.
        per_sample = trained / max(1, steps) / (trainer.global_batch_size // runtime.dp_size)
        longest = experiment.data.forecast_len
        leads = (1 + longest) / 2 if trainer.random_forecast_len else longest
        estimate = self.forecasts.steps * per_sample / (3 * leads)
        due = runtime.broadcast(self.allowance.affords(trained, estimate))
        if not due:
            seconds, most = self.allowance.cost or estimate, 100 * self.allowance.share
            log.info(
                "short forecasts skipped after epoch %d: another %.3g s would exceed %g %% of the training time in total",
                ended, seconds, most,
            )  # fmt: skip
        return bool(due)

    def _forecast(self, row: dict[str, Any], climatology: Tensor, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return `row` with the scores of short forecasts; None where `stop` returned true in between."""
        assert self.forecasts is not None
        began = time.perf_counter()
        scores = self.forecasts(climatology, stop)
        if scores is None:
            return None
        seconds = time.perf_counter() - began
        self.allowance.pay(seconds)
        return {**row, "forecast": {**scores, "seconds": seconds}}


class Validator:
    """Runs the stepper over samples without gradients.

    RMSE = √mean over samples of the area mean of e²; ACC = mean over samples of
    mean_area(f'·t') / √(mean_area(f'²)·mean_area(t'²)), with ' the difference from `climatology` (C, H, W; this rank's
    part). Both per output channel, and of the mean of the ensemble where there are `members`. Points without data are
    left out.
    """

    def __init__(
        self,
        stepper: Stepper,
        loss: AreaLoss,
        runtime: Runtime,
        channels: list[str],
        climatology: Tensor,
        area: AreaMean,
        amp: bool,
        members: int = 1,
    ) -> None:
        self.members = members
        self.stepper, self.loss, self.runtime, self.channels, self.amp = stepper, loss, runtime, channels, amp
        self.climatology, self.area = climatology.to(runtime.device), area
        self.to_device = ToDevice(runtime.device)

    @torch.no_grad()
    def __call__(self, samples: Iterable[Sample], stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return `valid_loss`, `rmse` and `acc` per channel at the first lead; also at the last (`_last`) of several.

        Returns {} without samples, and None where `stop` returned true between two batches.
        """
        losses: list[Tensor] = []
        scores: dict[int, list[Tensor]] = {}
        count = 0
        members = self.runtime.members(self.members)
        for sample in samples:
            if stop():
                return None
            real = int(sample.index[0] >= 0)  # else it is here for the collectives alone
            count += real * len(sample.index)
            sample = self.to_device(sample)
            states = self.stepper.predict_sample(sample, members=members)
            total = torch.zeros((), device=self.runtime.device)
            for lead in range(sample.leads):
                with torch.autocast(self.runtime.device.type, torch.bfloat16, enabled=self.amp):
                    prediction, target = next(states)
                loss = self.loss.at_lead(self.loss(prediction, target), lead, sample.leads)
                total = total + loss / sample.leads
                if lead in (0, sample.leads - 1):
                    prediction = self.runtime.mean_over_members(prediction.unflatten(0, (-1, len(members))).mean(1))
                    scores.setdefault(lead, []).append(real * self._scores(prediction, target).double().sum(0))
            losses.append(real * total.double() * len(sample.index))
        if not losses:
            return {}
        # Sums over batches, means over ranks: both of what is divided and of the divisor.
        each = self._mean_over_ranks(torch.tensor(float(count), dtype=torch.float64, device=self.runtime.device))
        loss = self.runtime.sum_over_data(torch.stack(losses).sum())
        result: dict[str, Any] = {"valid_loss": float(loss / each)}
        for lead, parts in scores.items():
            values = self._mean_over_ranks(torch.stack(parts).sum(0)) / each
            suffix = "" if lead == 0 else "_last"
            rmse, acc = values[SCORES.index("mse")].sqrt().tolist(), values[SCORES.index("acc")].tolist()
            result[f"rmse{suffix}"] = dict(zip(self.channels, rmse, strict=True))
            result[f"acc{suffix}"] = dict(zip(self.channels, acc, strict=True))
        return result

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        """Average over data-parallel replicas what all ranks of a sample hold alike."""
        return self.runtime.sum_over_data(x / (self.runtime.ensemble_size * self.runtime.domain_size))

    def _scores(self, prediction_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return (B, scores, C), in the order of `scores.SCORES`."""
        reduce = self.runtime.sum_over_domain
        return area_scores(prediction_BCHW, target_BCHW, self.climatology, self.loss.valid, self.area, reduce)


def time_mean(context: Context, times: np.ndarray, derived: DerivedFields | None = None) -> Tensor:
    """Return (C, h, W), the mean of the output channels and `derived` ones over up to 40 of these times; 0 without data.

    The times are spread evenly over the period and the hours of the day, and the ranks share the reading.
    """
    store, runtime = context.store, context.runtime
    rows, columns = (context.rows, context.columns) if derived is None else derived.read_part
    chosen = times[spread(store.seconds[times], _CLIMATOLOGY_TIMES, store.step_seconds)]
    channels = context.variables.out_channels if derived is None else len(derived)
    # In double precision, so on the host: a device would need several times the fields of a state for it.
    sums = torch.zeros((channels, 2, *context.stepper.valid.shape[1:]), dtype=torch.float64)
    first, step = runtime.models
    for position in chosen[first::step]:
        fields = store.read(context.variables.outputs, [int(position)], rows, columns=columns)
        predicted = torch.as_tensor(fields).to(runtime.device)
        values_BCHW = predicted if derived is None else derived.append(predicted)
        for sum_2HW, value_HW in zip(sums, values_BCHW[0].cpu(), strict=True):
            value = value_HW.double()
            valid = torch.isfinite(value)
            sum_2HW[0] += torch.where(valid, value, 0)
            sum_2HW[1] += valid
    result = torch.empty((channels, *sums.shape[2:]), device=runtime.device)
    for channel, sum_2HW in zip(result, sums, strict=True):
        total, count = runtime.sum_over_models(sum_2HW.to(runtime.device))
        channel.copy_(total / count.clamp_min(1))
    return result
