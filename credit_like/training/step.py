"""One optimiser step: forwards, backwards, clipping, finite check, update. The host never waits for the device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from credit_like.host import HostCopy, to_host
from credit_like.losses._mean import AreaLoss
from credit_like.nn import spectral_norm
from credit_like.nn.noise import NoiseKeys
from credit_like.nn.place import WHOLE, Place
from credit_like.parallel.collectives import clip_grad_norm_
from credit_like.parallel.ddp import refuse_unused
from credit_like.parallel.runtime import Runtime
from credit_like.parallel.tensor_copies import average_gradients
from credit_like.physics._fix import Fix
from credit_like.state import Sample
from credit_like.stepper import Stepper, recomputed_if
from credit_like.training.ema import Ema
from credit_like.training.input_noise import key_of, perturbed
from credit_like.training.to_device import ToDevice


class Optimizer(Protocol):
    """Interface of what an optimiser plug-in builds."""

    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Update the parameters. skip: () float32 on the device; 1 leaves them and the state unchanged, 0 updates."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the local tensors that a checkpoint holds, not copies: parameter name → kind → tensor."""


@dataclass
class StepReport:
    """The numbers of one step, on the host once `ready` has returned.

    `values`: loss, grad_norm, skipped (0 or 1), the mean change by each of `corrections`, then one number per checked
    channel, which is not finite where a value of the channel is not. `index`: the samples of this rank, as positions on the
    source's time axis.
    """

    values: HostCopy
    index: list[Tensor]
    corrections: tuple[str, ...] = ()

    def ready(self) -> list[float]:
        """Wait for this step (not for later ones) and return its numbers."""
        numbers: list[float] = self.values.wait().tolist()
        return numbers


class TrainStep:
    """Takes the micro-batches of one optimiser step.

    `optimizer`, `loss` and the keyword arguments are attributes that another phase may replace.

    The loss is averaged over rollout steps and micro-batches. The gradient is taken through the whole rollout, or through
    at most `backprop_steps` steps of it; every such part has its own backward pass, which frees its activations. With
    `recomputes`, the backward of several steps computes physics, transforms and loss again instead of keeping their fields. Loss
    and gradient norm are reduced over all ranks, so that one that is not finite is so on all of them. The device then
    skips the update without the host: the optimisers take `skip` as a tensor.
    """

    def __init__(
        self,
        stepper: Stepper,
        loss: AreaLoss,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        copied: Mapping[str, Tensor],
        ema: Ema | None,
        runtime: Runtime,
        *,
        amp: bool,
        max_norm: float | None = None,
        members: int = 1,
        shift_seed: int | None = None,
        backprop_steps: int | None = None,
        lead_seed: int | None = None,
        input_noise: float = 0.0,
        input_keys: NoiseKeys | None = None,
        places: tuple[Place, Place] = WHOLE,
        compiled: bool = False,
        recomputes: bool = False,
        accumulate: Callable[[bool], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.stepper, self.loss, self.optimizer, self.ema, self.runtime = stepper, loss, optimizer, ema, runtime
        self.parameters = dict(parameters)
        self.copied = copied
        self.to_device = ToDevice(runtime.device)
        self.amp = amp
        self.max_norm = max_norm
        self.members = members
        self.shift_seed = shift_seed
        self.backprop_steps, self.lead_seed = backprop_steps, lead_seed
        self.input_noise, self.input_keys, self.places = input_noise, input_keys, places
        self.compare = torch.compile(compare, dynamic=False) if compiled else compare
        self.recomputes = recomputes
        self.accumulate = accumulate

    def __call__(self, micro_batches: Iterable[Sample], count: int, learning_rate: float, step: int) -> StepReport:
        """Take optimiser step number `step` = 1, 2, … from `count` micro-batches."""
        model = self.stepper.model
        spectral_norm.before_step(model)
        fixes = _recorded(self.stepper)
        total, blame, index = self._accumulated(micro_batches, count, step)
        if unused := [parameter for parameter in self.parameters.values() if parameter.grad is None]:
            refuse_unused(model)
            for parameter in unused:
                # Not used by this rank's samples; with FSDP2, other ranks may have used it.
                parameter.grad = torch.zeros_like(parameter)
        spectral_norm.correct_gradients(model)
        average_gradients(self.copied, self.runtime)
        norm = clip_grad_norm_(self.parameters.values(), self.max_norm or float("inf")).detach()
        # Each rank has the mean over its own members.
        changes = [fix.taken().to(total.dtype) / self.runtime.ensemble_size for fix in fixes.values()]
        total, *corrections = self.runtime.sum_over_data(torch.cat([total[None], *changes])).unbind()
        skip = 1.0 - (torch.isfinite(total) & torch.isfinite(norm)).to(torch.float32)
        self.optimizer.step(learning_rate, skip)
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.ema is not None:
            self.ema.update(step)
        values = torch.cat([torch.stack([x.float() for x in (total, norm, skip, *corrections)]), blame.float()])
        names = tuple(f"correction/{name}/{variable}" for name, fix in fixes.items() for variable in fix.changes)
        return StepReport(to_host(values), index, names)

    def repeat(self, micro_batches: Sequence[Sample], step: int, backward: bool) -> None:
        """Compute the forwards, and with `backward` the gradients, of step number `step` again; nothing is updated."""
        self._accumulated(micro_batches, len(micro_batches), step, backward)

    def _accumulated(
        self, micro_batches: Iterable[Sample], count: int, step: int, backward: bool = True
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return this rank's part of the loss, a number per checked channel, and the samples, of `count` micro-batches.

        The gradients of the loss are added to those of the parameters.
        """
        if self.shift_seed is not None:
            # A function of the seed and the step alone: the same on all ranks, in all layouts and after a restart.
            self.stepper.shift = random.Random(f"{self.shift_seed} {step}").randrange(self.stepper.width)
        noise = self.stepper.noise
        if noise is not None:
            noise.reseed("step", step)  # other noise whenever a sample comes again, and the same after a restart
        total: Tensor | None = None
        blame: Tensor | None = None
        index = []
        for number, sample in enumerate(micro_batches):
            index.append(sample.index)
            sample = self.to_device(sample)
            if self.lead_seed is not None:
                # The same on all ranks, as the shift.
                sample = sample.shortened(random.Random(f"leads {self.lead_seed} {step}").randint(1, sample.leads))
            inputs = self._inputs(sample)
            if self.input_keys is not None:
                # The same for all members, and in all layouts and after a restart.
                key = key_of(self.input_keys, sample, step)
                sample = perturbed(sample, self.stepper, key, self.input_noise, self.places)
            states = self.stepper.predict_sample(sample, self.backprop_steps, self.runtime.members(self.members))
            at_once = min(self.backprop_steps or sample.leads, sample.leads)
            # A single step frees these fields before the model needs memory in backward; those of several add up.
            self.stepper.recomputes = self.recomputes and at_once > 1
            for first in range(0, sample.leads, at_once):
                leads = range(first, min(first + at_once, sample.leads))
                with self.accumulate(number == count - 1 and leads.stop == sample.leads):
                    loss, outcome = self.forward(states, leads, sample.leads)
                    if backward:
                        (loss * (self.runtime.gradient_scale / count)).backward()
                total = loss.detach() / count + (0 if total is None else total)
                channels = torch.cat([inputs, outcome])
                blame = channels + (0 if blame is None else blame)
        assert total is not None
        assert blame is not None
        self.stepper.shift, self.stepper.recomputes = 0, False
        if noise is not None:
            noise.reseed()
        return total, blame, index

    def forward(self, states: Iterator[tuple[Tensor, Tensor]], leads: range, of: int) -> tuple[Tensor, Tensor]:
        """Take the next steps of a rollout of `of` steps, those to `leads`.

        Return this rank's part of the loss, and a number per channel of target and prediction that is finite if the
        channel is.
        """
        total: Tensor | None = None
        outcome: Tensor | None = None
        for lead in leads:
            with torch.autocast(self.runtime.device.type, torch.bfloat16, enabled=self.amp):
                prediction, target = next(states)
            loss, channels = recomputed_if(self.stepper.recomputes, self.compare, self.loss, prediction, target)
            loss = self.loss.at_lead(loss, lead, of)
            total = loss if total is None else total + loss
            outcome = channels if outcome is None else outcome + channels
        assert total is not None
        assert outcome is not None
        return total / of, outcome

    def _inputs(self, sample: Sample) -> Tensor:
        """Return `_sums` of prognostic and forcing channels; missing values of a forcing are filled by the stepper."""
        n = sample.prognostic.shape[1]
        prognostic = torch.where(self.loss.valid[:n, None], sample.prognostic, 0)
        forcing = torch.where(sample.forcing.isnan(), 0, sample.forcing)
        return torch.cat([x.sum((0, 2, 3, 4), dtype=torch.float32) for x in (prognostic, forcing)])


def _recorded(stepper: Stepper) -> dict[str, Fix]:
    """Return the corrections in use by name: their type, numbered from the second of a type on. Each records its changes."""
    found: dict[str, Fix] = {}
    count: Counter[str] = Counter()
    for fix in stepper.physics:
        if isinstance(fix, Fix):
            count[fix.kind] += 1
            if fix in stepper.active:
                fix.record()
                found[fix.kind if count[fix.kind] == 1 else f"{fix.kind} {count[fix.kind]}"] = fix
    return found


def compare(loss: AreaLoss, prediction_BCHW: Tensor, target_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the loss, and the `_sums` of target and prediction (2 · C,)."""
    sums = [_sums(x_BCHW, loss.valid) for x_BCHW in (target_BCHW, prediction_BCHW.detach())]
    return loss(prediction_BCHW, target_BCHW), torch.cat(sums)


def _sums(x_BCHW: Tensor, valid_CHW: Tensor) -> Tensor:
    """Return (C,), sums over the points that have data; a sum is not finite if one of its values is not."""
    return torch.where(valid_CHW, x_BCHW, 0).sum((0, 2, 3), dtype=torch.float32)
