"""Loss, RMSE and ACC over the validation samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credit_like.data.store import FieldStore
from credit_like.losses._mean import AreaLoss
from credit_like.parallel.runtime import Runtime
from credit_like.scores import SCORES, area_scores
from credit_like.state import Sample
from credit_like.stepper import Stepper
from credit_like.variables import Variables

_CLIMATOLOGY_TIMES = 40


class Validator:
    """Runs the stepper over samples without gradients.

    RMSE = √mean over samples of the area mean of e²; ACC = mean over samples of
    mean_area(f'·t') / √(mean_area(f'²)·mean_area(t'²)), with ' the difference from `climatology` (C, H, W; this rank's
    rows). Both per output channel. Points without data are left out.
    """

    def __init__(
        self, stepper: Stepper, loss: AreaLoss, runtime: Runtime, channels: list[str], climatology: Tensor, amp: bool
    ) -> None:
        self.stepper, self.loss, self.runtime, self.channels, self.amp = stepper, loss, runtime, channels, amp
        self.climatology = climatology.to(runtime.device)

    @torch.no_grad()
    def __call__(self, samples: Iterable[Sample], stop: Callable[[], bool]) -> dict[str, Any] | None:
        """`valid_loss`; `rmse`, `acc` per channel at the first lead, `rmse_last`, `acc_last` at the last of several.

        None where `stop` said, between two batches, to give up.
        """
        losses: list[Tensor] = []
        scores: dict[int, list[Tensor]] = {}
        count = 0
        for sample in samples:
            if stop():
                return None
            real = int(sample.index[0] >= 0)  # else it is here for the collectives alone
            count += real * len(sample.index)
            sample = sample.to(self.runtime.device)
            states = self.stepper.predict_sample(sample)
            total = torch.zeros((), device=self.runtime.device)
            for lead in range(sample.leads):
                with torch.autocast(self.runtime.device.type, torch.bfloat16, enabled=self.amp):
                    prediction, target = next(states)
                total = total + self.loss(prediction, target) / sample.leads
                if lead in (0, sample.leads - 1):
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
        """Over data-parallel replicas, of what all domain ranks of a sample hold alike."""
        return self.runtime.sum_over_data(x / self.runtime.domain_size)

    def _scores(self, prediction_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return (B, scores, C), in the order of `scores.SCORES`."""
        reduce = self.runtime.sum_over_domain
        return area_scores(prediction_BCHW, target_BCHW, self.climatology, self.loss.valid, self.loss.area, reduce)


def time_mean(store: FieldStore, variables: Variables, times: np.ndarray, rows: slice, runtime: Runtime) -> Tensor:
    """(C, h, W): mean of the output channels over up to 40 evenly spaced ones of these times; 0 where there is no data.

    The ranks share the reading.
    """
    chosen = times[np.unique(np.linspace(0, len(times) - 1, min(_CLIMATOLOGY_TIMES, len(times))).round().astype(int))]
    shape = (2, variables.out_channels, store.grid.height, store.grid.width)
    sums = torch.zeros(shape, dtype=torch.float64, device=runtime.device)
    for time in chosen[runtime.dp_rank :: runtime.dp_size]:
        fields = store.read(variables.outputs, [int(time)], rows)[0]
        values = torch.as_tensor(fields).to(sums)
        there = torch.isfinite(values)
        sums[0][:, rows] += torch.where(there, values, 0)
        sums[1][:, rows] += there
    total, count = runtime.sum_over_data(sums)
    return (total / count.clamp_min(1.0 / runtime.dp_size))[:, rows].float()
