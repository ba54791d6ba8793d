"""Initial states of members that the model makes itself: bred vectors, and states of lagged forecasts.

Bred vectors are differences between a perturbed and an unperturbed forecast. Breeding starts some cycles before the
initial time from small random fields. After every cycle the difference is scaled back to its first size and added to
the analysis of that time, so that what grows fastest remains. Sources: Toth and Kalnay (1993), Bull. Am. Meteorol. Soc.
74, 2317-2330; Toth and Kalnay (1997), Mon. Weather Rev. 125, 3297-3319, from where the pairs are, one member with the
vector added and one with it subtracted.

A lagged member starts from an earlier analysis. Its forecast up to the initial time makes its initial state, all frames of
it for a model with a history. Source:
Hoffman and Kalnay (1983), Tellus 35A, 100-118.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from credit_like.context import Context
from credit_like.inference.perturb import gaussian_fields, perturbations
from credit_like.inference.times import earlier_starts
from credit_like.rollout import Perturb, of_newest, rollout
from credit_like.state import State
from credit_like.transforms import Transforms

ForMembers = Callable[[Sequence[int]], Perturb]
"""From the members of a batch to the `perturb` argument of `rollout`."""


def initial_states(context: Context, amp: bool) -> ForMembers:
    """Return the perturbations of the initial states of the members of `inference.ensemble`, for `rollout`.

    Every state is a function of seed, member and initial time alone, in every layout (to rounding for those that
    the model makes). Raises UserError as `gaussian_fields` does.
    """
    ensemble = context.experiment.inference.ensemble
    if ensemble.kind == "gaussian":
        store = context.store
        gaussian = perturbations(ensemble, context.variables, context.statistics, store, context.rows, context.columns)
        return lambda members: of_newest(gaussian(members))
    run = partial(
        rollout,
        context.stepper,
        context.store,
        context.variables,
        history_len=context.experiment.data.history_len,
        rows=context.rows,
        columns=context.columns,
        amp=amp,
    )

    def after(init: Sequence[int], steps: int, perturb: Perturb | None = None) -> State:
        """Forecast so many steps from each position; return the last state alone."""
        for _, state in run(init, steps, perturb=perturb):
            last = state
        return last

    starts = earlier_starts(ensemble, context.experiment.data.timestep)
    return _bred(context, after, starts) if ensemble.kind == "bred" else _lagged(after, starts)


def _lagged(after: Callable[..., State], starts: Sequence[int]) -> ForMembers:
    def for_members(members: Sequence[int]) -> Perturb:
        def replace(frames_BCTHW: Tensor, init: Sequence[int]) -> Tensor:
            result = frames_BCTHW.clone()
            for member in sorted(set(members) - {0}):
                places = [place for place, other in enumerate(members) if other == member]
                state = after([init[place] - starts[member] for place in places], starts[member])
                result[places] = state.prognostic.to(result.dtype)
            return result

        return replace

    return for_members


def _bred(context: Context, after: Callable[..., State], starts: Sequence[int]) -> ForMembers:
    """Return the analysis plus (odd members) or minus (even ones) the bred vector of each pair of members."""
    prognostic = context.variables.role("prognostic")
    transforms, device = Transforms(prognostic), context.stepper.mean.device
    statistics = context.statistics
    ensemble, rows, columns = context.experiment.inference.ensemble, context.rows, context.columns
    fields = gaussian_fields(ensemble, context.variables, statistics, context.store, rows, columns)
    area = context.area_mean(torch.from_numpy(statistics.mask(prognostic)), context.runtime.sum_over_domain)
    size = context.stepper.change_std  # (C, 1, 1), as the amplitudes
    cycle = starts[1]

    def norm(x_BCHW: Tensor) -> Tensor:
        """Return (B, 1, 1, 1): root mean square over points and channels, each in units of its change per step."""
        return area((x_BCHW / size) ** 2).mean(1).sqrt()[:, None, None, None]

    def shifted(x_BCHW: Tensor, by_BCHW: Tensor) -> Tensor:
        result: Tensor = transforms.inverse(transforms.forward(x_BCHW, torch) + by_BCHW, torch)
        return result

    def add(by_BCHW: Tensor, x_BCHW: Tensor, _init: Sequence[int]) -> Tensor:
        return shifted(x_BCHW, by_BCHW)

    def for_members(members: Sequence[int]) -> Perturb:
        pairs = [(member + 1) // 2 for member in members]
        signs = torch.tensor([0.0 if not member else 1.0 if member % 2 else -1.0 for member in members])
        sign_B111 = signs.to(device)[:, None, None, None]

        def breed(newest_BCHW: Tensor, init: Sequence[int]) -> Tensor:
            vector = torch.from_numpy(fields(pairs, init)).to(device)
            first = norm(vector)
            for start in reversed(starts[1:]):
                there = [i - start for i in init]
                control, perturbed = (
                    transforms.forward(after(there, cycle, perturb).now, torch)
                    for perturb in (None, of_newest(partial(add, vector)))
                )
                vector = perturbed - control
                grown = norm(vector)
                vector = vector * torch.where(grown > 0, first / grown, 0)
            return shifted(newest_BCHW, sign_B111 * vector)

        return of_newest(breed)

    return for_members
