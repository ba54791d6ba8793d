"""Forecasts: the stepper in a loop.

Shape suffixes: B batch, C channels, T frames, H rows, W longitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from credit_like.data.store import FieldStore
from credit_like.state import State
from credit_like.stepper import Stepper
from credit_like.variables import Variables

Perturb = Callable[[Tensor, Sequence[int]], Tensor]


def rollout(
    stepper: Stepper,
    store: FieldStore,
    variables: Variables,
    init: Sequence[int],
    leads: int,
    *,
    history_len: int = 1,
    rows: slice = slice(None),
    perturb: Perturb | None = None,
    amp: bool = False,
) -> Iterator[tuple[int, State]]:
    """Forecast one batch from the initial positions `init`: yields (lead, State) for leads 1 … `leads`.

    Memory does not grow with the lead: one state and the forcing of one more step are held. The next step's forcing is
    read while this one is computed. States are in physical units, points without data as in `Stepper`. `perturb`
    changes the newest analysed frame (B, C, H, W), given the initial positions. Nothing records gradients.
    """
    device = stepper.mean.device
    positions = [[i - back for back in range(history_len - 1, -1, -1)] for i in init]

    def forcing(lead: int) -> Tensor:
        """(B, C, T, H, W) at the frames that the step to `lead` starts from."""
        frames = [store.forcing([t + lead - 1 for t in times], now=times[-1], rows=rows) for times in positions]
        stacked = torch.from_numpy(np.stack(frames)).transpose(1, 2)
        return stacked.to(device, non_blocking=True)

    with ThreadPoolExecutor(1, thread_name_prefix="forcing") as reader:
        coming = reader.submit(forcing, 1)
        analysed = np.stack([store.read(variables.role("prognostic"), times, rows) for times in positions])
        prognostic_BCTHW = torch.from_numpy(analysed).to(device).transpose(1, 2).contiguous()
        if perturb is not None:
            newest = perturb(prognostic_BCTHW[:, :, -1], init)
            prognostic_BCTHW = torch.cat([prognostic_BCTHW[:, :, :-1], newest[:, :, None]], 2)
        with torch.inference_mode():
            state = stepper.initial(prognostic_BCTHW, torch.tensor(list(init), device=device))
        for lead in range(1, leads + 1):
            forcing_BCTHW = coming.result()
            if lead < leads:
                coming = reader.submit(forcing, lead + 1)
            # Entered anew at every step: whoever consumes the generator must not find itself in inference mode.
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=amp):
                state = stepper(state, forcing_BCTHW)
            yield lead, state
