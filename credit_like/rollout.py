"""The forecast loop, which applies the stepper repeatedly while the forcing of the next step is read ahead.

Shape suffixes: B batch, C channels, T frames, H rows (this rank's), W longitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from credit_like.data.store import FieldStore
from credit_like.host import from_host
from credit_like.state import State
from credit_like.stepper import Stepper
from credit_like.variables import Variables

Perturb = Callable[[Tensor, Sequence[int]], Tensor]
"""From analysed frames (B, C, T, H, W), the newest last, and initial positions to the frames from which to forecast."""
T = TypeVar("T")


def rollout(
    stepper: Stepper,
    store: FieldStore,
    variables: Variables,
    init: Sequence[int],
    leads: int,
    *,
    history_len: int = 1,
    rows: slice = slice(None),
    columns: slice = slice(None),
    members: Sequence[int] | None = None,
    perturb: Perturb | None = None,
    amp: bool = False,
    without_gradients: Callable[[], AbstractContextManager[None]] = torch.inference_mode,
) -> Iterator[tuple[int, State]]:
    """Forecast one batch from the initial positions `init`; yield (lead, State) for leads 1 … `leads`.

    States are in physical units, with points without data as in `Stepper`. `perturb` changes the analysed frames. `members`
    select the noise of a model that has any, 0 by default. Memory does not grow with the lead: only one state and the forcing of
    one more step are in memory. `without_gradients` is the mode in which each step runs; a model that is sharded for training
    needs `torch.no_grad`, because FSDP2 writes to its parameters between steps.
    """
    device = stepper.mean.device
    history = [[i - back for back in range(history_len - 1, -1, -1)] for i in init]

    def forcing(lead: int) -> Tensor:
        """Read (B, C, T, H, W) at the input frames of the step to `lead`."""
        frames = [
            store.forcing([t + lead - 1 for t in times], now=times[-1], rows=rows, columns=columns) for times in history
        ]
        return from_host(torch.from_numpy(np.stack(frames)).transpose(1, 2), device)

    analysed = np.stack([store.read(variables.role("prognostic"), times, rows, columns=columns) for times in history])
    prognostic_BCTHW = torch.from_numpy(analysed).to(device).transpose(1, 2).contiguous()
    if perturb is not None:
        prognostic_BCTHW = perturb(prognostic_BCTHW, init)
    with without_gradients():
        numbers = None if members is None else torch.tensor(list(members), device=device)
        state = stepper.initial(prognostic_BCTHW, torch.tensor(list(init), device=device), numbers)
    for lead, forcing_BCTHW in enumerate(read_ahead(partial(forcing, lead) for lead in range(1, leads + 1)), 1):
        # The mode is entered for every step, so that it is not active in the code that consumes the generator.
        with without_gradients(), torch.autocast(device.type, torch.bfloat16, enabled=amp):
            state = stepper(state, forcing_BCTHW.to(device, non_blocking=True))
        yield lead, state


def of_newest(change: Callable[[Tensor, Sequence[int]], Tensor]) -> Perturb:
    """Return a perturbation that changes the newest frame (B, C, H, W) alone."""

    def perturb(frames_BCTHW: Tensor, init: Sequence[int]) -> Tensor:
        newest_BCHW = change(frames_BCTHW[:, :, -1], init)
        return torch.cat([frames_BCTHW[:, :, :-1], newest_BCHW[:, :, None]], 2)

    return perturb


def read_ahead(reads: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the result of each call while a thread runs the next call."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as reader:
        coming: Future[T] | None = None
        for read in reads:
            following = reader.submit(read)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()
