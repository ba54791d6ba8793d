"""Sample and State: what flows through training and forecasts. They validate themselves.

Shape suffixes: B batch, C channels, T frames of history, L lead steps, H latitude rows, W longitudes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from torch import Tensor
from torch import device as Device


@dataclass(frozen=True, eq=False)
class _Batch:
    def to(self, device: Device | str, non_blocking: bool = True) -> Self:
        """The same on another device."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return replace(self, **moved)

    def pin_memory(self) -> Self:
        """The same in page-locked memory (called by the loader where there is a GPU)."""
        return replace(self, **{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


@dataclass(frozen=True, eq=False)
class Sample(_Batch):
    """A batch of windows in physical units; missing points are NaN.

    prognostic (B, Cp, T, H, W) at times t − (T−1)·dt … t; forcing (B, Cf, T + L − 1, H, W) at t − (T−1)·dt … t + (L−1)·dt;
    target (B, Cp + Cd, L, H, W) at t + dt … t + L·dt; index (B,) int64, position of t on the source's time axis, or −1 for a
    sample that counts nothing and keeps this rank in step with the others.
    Under domain sharding H is this rank's rows.
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


@dataclass(frozen=True, eq=False)
class State(_Batch):
    """The atmosphere at one time t, in physical units; missing points are NaN.

    prognostic (B, Cp, T, H, W), newest frame last; diagnostic (B, Cd, H, W), what the step that led here produced
    (zero channels where there is none); index (B,) int64 as in `Sample`.
    """

    prognostic: Tensor
    diagnostic: Tensor
    index: Tensor

    @property
    def now(self) -> Tensor:
        """(B, Cp, H, W): the newest frame."""
        return self.prognostic[:, :, -1]
