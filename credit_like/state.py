"""`Sample` and `State`, the data that pass through training and forecasts; both validate themselves.

Shape suffixes: B batch, C channels, T frames of history, L lead steps, H latitude rows, W longitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

from torch import Tensor
from torch import device as Device


@dataclass(frozen=True, eq=False)
class _Batch:
    def to(self, device: Device | str, non_blocking: bool = True) -> Self:
        """Return a copy on another device."""
        return self._each(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory (the loader calls this if there is a GPU)."""
        return self._each(lambda x: x.pin_memory())

    def tensors(self) -> list[Tensor]:
        """Return all tensors, without those that are None."""
        return [x for f in fields(self) if (x := getattr(self, f.name)) is not None]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


@dataclass(frozen=True, eq=False)
class Sample(_Batch):
    """A batch of windows in physical units; missing points are NaN.

    prognostic (B, Cp, T, H, W) at times t − (T−1)·dt … t; forcing (B, Cf, T + L − 1, H, W) at t − (T−1)·dt … t +
    (L−1)·dt; target (B, Cp + Cd, L, H, W) at t + dt … t + L·dt; index (B,) int64, the position of t on the source's
    time axis, or −1 for a padding sample of weight 0, which keeps this rank's collectives in step with the others. With
    domain parallelism H counts the rows of this rank.
    """

    prognostic: Tensor
    forcing: Tensor
    target: Tensor
    index: Tensor

    def __post_init__(self) -> None:
        frames, leads = self.prognostic.shape[2], self.target.shape[2]
        batch, rows, columns = self.prognostic.shape[0], *self.prognostic.shape[-2:]
        if self.forcing.shape[2] != frames + leads - 1:
            raise ValueError(f"expected forcing at {frames + leads - 1} times, got {self.forcing.shape[2]}")
        for name, x in (("forcing", self.forcing), ("target", self.target)):
            if (x.shape[0], *x.shape[-2:]) != (batch, rows, columns):
                raise ValueError(
                    f"expected {name} of {(batch, rows, columns)} samples, rows, columns, got {tuple(x.shape)}"
                )

    @property
    def leads(self) -> int:
        return self.target.shape[2]

    def shortened(self, leads: int) -> Self:
        """Return the sample with its first `leads` targets alone."""
        frames = self.prognostic.shape[2]
        return replace(self, forcing=self.forcing[:, :, : frames + leads - 1], target=self.target[:, :, :leads])


@dataclass(frozen=True, eq=False)
class State(_Batch):
    """The atmosphere at one time t, in physical units; points without data hold the channel's mean.

    prognostic (B, Cp, T, H, W), newest frame last; diagnostic (B, Cd, H, W), the diagnostic output of the
    step that led to this state (zeros for an initial state); index (B,) int64 as in `Sample`; key (B,) int64, of the
    noise and the dropout of the next step, None for a model without either.
    """

    prognostic: Tensor
    diagnostic: Tensor
    index: Tensor
    key: Tensor | None = None

    def detach(self) -> Self:
        """Return the same state without its history of gradients."""
        return replace(self, prognostic=self.prognostic.detach(), diagnostic=self.diagnostic.detach())

    @property
    def now(self) -> Tensor:
        """Newest frame (B, Cp, H, W)."""
        return self.prognostic[:, :, -1]
