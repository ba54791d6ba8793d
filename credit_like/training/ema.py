"""The exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from credit_like.parallel.shards import local


class Ema:
    """average ← average + (1 − d_n)(weight − average) after optimiser step n = 1, 2, …

    with d_n = min(decay, (1 + n)/(10 + n)).

    The ramp lets a short run forget its random start. The averages are local shards like the weights, on their device.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.parameters = dict(parameters)
        with torch.no_grad():
            self.average = {name: local(p).clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after optimiser step `step`, also where the step was skipped and left the weights as they were."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [local(p) for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1.0 - decay)

    @torch.no_grad()
    def restart(self, parameters: Mapping[str, Tensor]) -> None:
        """Set every average to its weight, as for a run that has not taken a step."""
        for name, parameter in parameters.items():
            self.average[name].copy_(local(parameter))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Exchange the weights for their averages inside the context, and restore them afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            weight = local(parameter)
            kept = weight.clone()
            weight.copy_(self.average[name])
            self.average[name].copy_(kept)
