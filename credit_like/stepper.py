"""The time step State(t) + forcing → State(t + dt), shared by training and forecasts.

Shape suffixes: B batch, C channels, T frames, L leads, H rows (this rank's), W longitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from credit_like.data.statistics import Statistics
from credit_like.errors import UserError
from credit_like.nn.area import identity
from credit_like.nn.noise import NoiseKeys
from credit_like.state import Sample, State
from credit_like.transforms import Transforms
from credit_like.variables import Variables

Results = TypeVar("Results")
Predict = Literal["increment", "state"]


class Stepper(nn.Module):
    """Normalise, concatenate, run the model, denormalise, apply physics.

    The model maps (B, C_in, T, H, W), in the channel order of `Variables`, to (B, C_out, 1, H, W). With
    `predict: increment` its prognostic outputs are the change over one step in units of its standard deviation,
    x(t + dt) = x(t) + change_std · y. With `predict: state`, x(t + dt) = mean + std · y. Diagnostic outputs always use
    the second form. Of a variable with a transform T, x stands for T(x), here and in its statistics; states are always in
    physical units. Points without data hold the channel's mean inside a `State`; `masked` turns them back into NaN.
    """

    mean: Tensor
    std: Tensor
    fill: Tensor
    """The mean in physical units, at points without data."""
    change_std: Tensor
    forcing_mean: Tensor
    forcing_std: Tensor
    static: Tensor
    valid: Tensor

    def __init__(
        self,
        model: nn.Module,
        variables: Variables,
        statistics: Statistics,
        static_CHW: NDArray[np.float32],
        predict: Predict,
        physics: Sequence[nn.Module] = (),
        rows: slice = slice(None),
        noise: NoiseKeys | None = None,
        columns: slice = slice(None),
        whole_rows: Callable[[Tensor], Tensor] = identity,
    ) -> None:
        super().__init__()
        self.model = model
        self.predict = predict
        self.physics = nn.ModuleList(physics)
        self.active = list(self.physics)
        """The corrections in use."""
        self.noise = noise
        """The keys of the noise and the dropout of a model that has any."""
        self.n_prognostic = variables.n("prognostic")
        self.shift = 0
        """Longitude shift in columns, applied before the model and undone after it.

        It is a training augmentation that varies the alignment of the model's attention windows.
        """
        self.recomputes = False
        """Whether backward computes physics and transforms again, instead of keeping their fields."""
        mean, std, change_std = statistics.select(variables.outputs)
        forcing_mean, forcing_std, _ = statistics.select(variables.role("dynamic_forcing"))
        self.transforms, self.prognostic_transforms = (
            Transforms(variables.outputs),
            Transforms(variables.role("prognostic")),
        )
        static_mean, static_std, _ = statistics.select(variables.role("static"))
        static = (static_CHW - static_mean[:, None, None]) / static_std[:, None, None]
        self._buffer("mean", mean[:, None, None])
        self._buffer("std", std[:, None, None])
        self._buffer("fill", self.transforms.inverse(mean, np, 0)[:, None, None])
        self._buffer("change_std", change_std[: self.n_prognostic, None, None])
        self._buffer("forcing_mean", forcing_mean[:, None, None, None])
        self._buffer("forcing_std", forcing_std[:, None, None, None])
        self._buffer("static", np.nan_to_num(static))
        self.columns, self.whole_rows = columns, whole_rows
        mask = statistics.mask(variables.outputs)
        self.width = mask.shape[-1]
        """The columns of the grid, of which this rank may have a part."""
        self.register_buffer("valid", torch.from_numpy(mask[:, rows, columns]), persistent=False)

    def _buffer(self, name: str, value: NDArray[np.floating]) -> None:
        self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)

    def initial(self, prognostic_BCTHW: Tensor, index: Tensor, member: Tensor | None = None) -> State:
        """Return the state at the newest of T analysed frames (B, Cp, T, H, W).

        `member` (B,) int64 selects the noise of each forecast, together with its initial time; 0 by default.
        """
        n = self.n_prognostic
        prognostic = torch.where(self.valid[:n, None], prognostic_BCTHW, self.fill[:n, None])
        diagnostic = prognostic.new_zeros(prognostic.shape[0], len(self.mean) - n, *prognostic.shape[-2:])
        key = None
        if self.noise is not None:
            key = self.noise(index, torch.zeros_like(index) if member is None else member)
        return State(prognostic, diagnostic, index, key)

    def forward(self, state: State, forcing_BCTHW: Tensor) -> State:
        """Advance the state by one time step; `forcing_BCTHW` holds the T times of the state's frames."""
        x_BCTHW = self.inputs(state, forcing_BCTHW)
        if self.shift:
            x_BCTHW = self._shifted(x_BCTHW, self.shift)
        y_BCTHW = self.model(x_BCTHW) if state.key is None else self.model(x_BCTHW, key_B=state.key)
        if self.shift:
            y_BCTHW = self._shifted(y_BCTHW, -self.shift)
        # Without either, nothing is kept, whereas the inputs of what is computed again are.
        recomputes = self.recomputes and bool(self.active or self.transforms)
        frames, diagnostic = recomputed_if(recomputes, self._after, state, y_BCTHW, forcing_BCTHW[:, :, -1])
        key = None if state.key is None else NoiseKeys.after(state.key)
        return State(frames, diagnostic, state.index + 1, key)

    def _shifted(self, x_BCTHW: Tensor, shift: int) -> Tensor:
        """Return this rank's columns of the fields shifted by so many columns."""
        return self.whole_rows(x_BCTHW).roll(shift, -1)[..., self.columns]

    def _after(self, state: State, y_BCTHW: Tensor, forcing_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return frames and diagnostic channels of the next state, from the model's output."""
        after = self._denormalised(state, y_BCTHW)
        for fix in self.active:
            more = (forcing_BCHW,) if getattr(fix, "needs_forcing", False) else ()
            given = (state.now, *more)
            versions = _versions(given)
            after = fix(after, *given)
            if _versions(given) != versions:
                raise UserError(
                    "physics: expected corrections that leave the state and the forcing before the step as they are, which later "
                    f"corrections and frames have too, got {type(fix).__qualname__} of {type(fix).__module__}, which writes to "
                    "them; copy them first (`before.clone()`)"
                )
        return self._continued(state, after)

    def _denormalised(self, state: State, y_BCTHW: Tensor) -> Tensor:
        """Return all output channels of the next state in physical units, before physics."""
        y_BCHW = y_BCTHW[:, :, 0].to(state.prognostic.dtype)
        n = self.n_prognostic
        if self.predict == "increment":
            now = self.prognostic_transforms.forward(state.now, torch)
            prognostic = now + self.change_std * y_BCHW[:, :n]
        else:
            prognostic = self.mean[:n] + self.std[:n] * y_BCHW[:, :n]
        diagnostic = self.mean[n:] + self.std[n:] * y_BCHW[:, n:]
        return self.transforms.inverse(torch.cat([prognostic, diagnostic], 1), torch)

    def _continued(self, state: State, after_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the frames that end with the new one, and its diagnostic channels."""
        n = self.n_prognostic
        after = torch.where(self.valid, after_BCHW, self.fill)
        return torch.cat([state.prognostic[:, :, 1:], after[:, :n, None]], 2), after[:, n:]

    def compile_arithmetic(self) -> None:
        """Compile what surrounds the model, so that fields are read and written as few times as possible.

        Modules of physics remain as they are, because a plug-in may do what a compiled graph cannot.
        """
        for name in ("inputs", *(("_denormalised", "_continued") if self.physics else ("_after",))):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    def set_epoch(self, epoch: int) -> None:
        """Switch on the corrections whose `after_epochs` have passed before epoch 0, 1, … of training."""
        self.active = [fix for fix in self.physics if epoch >= getattr(fix, "after_epochs", 0)]

    def inputs(self, state: State, forcing_BCTHW: Tensor) -> Tensor:
        """Return the model input (B, C_in, T, H, W): normalised prognostic, static and forcing channels."""
        n = self.n_prognostic
        values = self.prognostic_transforms.forward(state.prognostic, torch)
        prognostic = (values - self.mean[:n, None]) / self.std[:n, None]
        batch, _, frames = prognostic.shape[:3]
        static = self.static[None, :, None].expand(batch, -1, frames, -1, -1).to(prognostic.dtype)
        forcing = torch.nan_to_num((forcing_BCTHW - self.forcing_mean) / self.forcing_std, nan=0.0)
        return torch.cat([prognostic, static, forcing], 1)

    def rollout(
        self, state: State, forcing_BCTHW: Tensor, leads: int, backprop_steps: int | None = None
    ) -> Iterator[State]:
        """Yield the states of the next `leads` steps.

        `forcing_BCTHW` holds T + leads − 1 times, beginning with that of the oldest frame. Gradients end after every
        `backprop_steps` steps; by default they flow through all.
        """
        frames = state.prognostic.shape[2]
        for lead in range(leads):
            if backprop_steps and lead % backprop_steps == 0:
                state = state.detach()
            state = self(state, forcing_BCTHW[:, :, lead : lead + frames])
            yield state

    def predict_sample(
        self, sample: Sample, backprop_steps: int | None = None, members: int | range = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (prediction, target) for every lead of a sample, each (B, C_out, H, W) in physical units.

        With `members`, their number or some of them, the prediction (B · members, C_out, H, W) holds those of each sample
        one after the other. Each has its own noise and its own trajectory. `backprop_steps` as in `rollout`.
        """
        some = range(members) if isinstance(members, int) else members

        def of_members(x: Tensor) -> Tensor:
            return x if len(some) == 1 else x.repeat_interleave(len(some), 0)

        index = of_members(sample.index)
        member = torch.arange(some.start, some.stop, device=index.device).repeat(len(sample.index))
        # Neither the members' copies of the fields nor their first state have a name here, which would keep them to the last lead.
        state = self.initial(of_members(sample.prognostic), index, member)
        states = self.rollout(state, of_members(sample.forcing), sample.leads, backprop_steps)
        del state
        for lead, after in enumerate(states):
            yield self.outputs(after), sample.target[:, :, lead]

    @staticmethod
    def outputs(state: State) -> Tensor:
        """Return the prognostic and diagnostic channels of a state, (B, C_out, H, W)."""
        return torch.cat([state.now, state.diagnostic], 1)

    def masked(self, x_BCHW: Tensor) -> Tensor:
        """Return output channels with NaN at points without data, as they are written to files."""
        return torch.where(self.valid, x_BCHW, torch.nan)


def recomputed_if(recomputes: bool, function: Callable[..., Results], *arguments: Any) -> Results:
    """Return function(*arguments); if `recomputes`, only the arguments are kept for backward, which computes the rest again."""
    if not (recomputes and torch.is_grad_enabled()):
        return function(*arguments)
    results: Results = checkpoint(function, *arguments, use_reentrant=False)
    return results


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor, or what it is a view of, was written to; tensors of inference mode do not count that."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
