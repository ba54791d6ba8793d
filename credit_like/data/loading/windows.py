"""Windows of the time axis that make training samples, and their conversion to a `Sample`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from credit_like.data.loading.arena import Allocate, plain
from credit_like.data.store import Fields, FieldStore
from credit_like.data.times import one_time, to_text
from credit_like.errors import UserError
from credit_like.schema.data import Periods
from credit_like.state import Sample
from credit_like.variables import Variable, Variables

_LOG = logging.getLogger(__name__)


class Windows(Dataset[Sample]):
    """Windows of `history_len` frames up to t and `forecast_len` targets after it, inside one period and without gaps.

    `starts` (N,) are the positions t. No window contains a time in `missing_times`; the number of windows excluded for
    these times and for gaps is logged once. `rows` and `columns` are this rank's part of the grid. Points without data
    according to `mask` (C, H, W of the outputs, the whole grid) may be NaN; any other NaN raises ValueError. Raises
    UserError if no window is left.
    """

    def __init__(
        self,
        store: FieldStore,
        variables: Variables,
        periods: Periods,
        *,
        history_len: int,
        forecast_len: int,
        missing_times: Collection[int] = (),
        rows: slice = slice(None),
        columns: slice = slice(None),
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        self.store = store
        self.variables = variables
        self.history_len, self.forecast_len = history_len, forecast_len
        self.rows = slice(*rows.indices(store.grid.height))
        self.columns = slice(*columns.indices(store.grid.width))
        self.starts = _starts(store, periods, history_len, forecast_len, missing_times)
        self.has_data = None if mask is None else mask[:, self.rows, self.columns]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Sample:
        """Return the i-th window as a batch of one."""
        return self.batch([i])

    def shapes(self, batch: int) -> list[tuple[int, ...]]:
        """Return the shapes of prognostic, forcing and target for a number of windows."""
        frames, leads = self.history_len, self.forecast_len
        grid = (self.rows.stop - self.rows.start, self.columns.stop - self.columns.start)
        return [
            (batch, self.variables.n("prognostic"), frames, *grid),
            (batch, self.variables.n("dynamic_forcing"), frames + leads - 1, *grid),
            (batch, self.variables.out_channels, leads, *grid),
        ]

    def batch(self, indices: Sequence[int], allocate: Allocate = plain) -> Sample:
        """Return several windows as one batch, in memory from `allocate`."""
        n_prognostic, n_outputs = self.variables.n("prognostic"), self.variables.out_channels
        frames, leads = self.history_len, self.forecast_len
        prognostic, forcing, target = map(allocate, self.shapes(len(indices)))
        positions = self.starts[list(indices)]
        for b, now in enumerate(positions.tolist()):
            past, future = prognostic[b].numpy(), target[b].numpy()
            times = np.arange(now - frames + 1, now + leads + 1)
            to: list[Fields] = [past[:, t] for t in range(frames)]
            to += [future[:n_prognostic, lead] for lead in range(leads)]
            self.store.read(self.variables.role("prognostic"), times, self.rows, to, self.columns)
            if n_outputs > n_prognostic:
                to = [future[n_prognostic:, lead] for lead in range(leads)]
                self.store.read(self.variables.role("diagnostic"), times[frames:], self.rows, to, self.columns)
            if forcing.numel():
                known = forcing[b].numpy().transpose(1, 0, 2, 3)
                self.store.forcing(times[:-1], now, self.rows, known, self.columns)
            self._check(past, self.variables.role("prognostic"), times[:frames])
            self._check(future, self.variables.outputs, times[frames:])
        return Sample(prognostic, forcing, target, torch.from_numpy(positions.copy()))

    def _check(self, fields_CTHW: Fields, variables: Sequence[Variable], times: NDArray[np.int64]) -> None:
        """Raise UserError if a value is missing where the statistics found data."""
        for c, channel in enumerate(Variables.channel_names(variables)):
            for t, position in enumerate(times):
                field = fields_CTHW[c, t]
                if np.isfinite(field.sum()):  # if the sum overflows float32, the exact check below runs and passes
                    continue
                bad = ~np.isfinite(field)
                if self.has_data is not None:
                    bad &= self.has_data[c]
                if bad.all() if self.has_data is None else bad.any():
                    time = to_text(one_time(self.store.time_seconds([position])[0], self.store.calendar))
                    raise UserError(
                        f"expected data of {channel} at {time}, got {bad.sum()} missing of {bad.size} points; the data "
                        "have changed since the statistics were fitted: fit them again with `credit-like preprocess`, or undo "
                        "the change where the run has checkpoints"
                    )


def _starts(
    store: FieldStore, periods: Periods, history_len: int, forecast_len: int, missing_times: Collection[int]
) -> NDArray[np.int64]:
    """Return the positions t whose window is complete."""
    wanted = []
    for period in periods:
        inside = store.period((period,))
        if len(inside):
            wanted.append(np.arange(inside[0] + history_len - 1, inside[-1] - forecast_len + 1))
    starts = np.unique(np.concatenate(wanted)) if wanted else np.empty(0, np.int64)
    length = history_len + forecast_len - 1
    first, last = starts - (history_len - 1), starts + forecast_len
    whole = store.seconds[last] - store.seconds[first] == length * store.step_seconds
    absent = np.zeros(len(store) + 1, np.int64)
    absent[1:] = np.cumsum(np.isin(np.arange(len(store)), list(missing_times)))
    present = absent[last + 1] == absent[first]
    kept = starts[whole & present]
    shown = "; ".join(f"{period.start} to {period.end}" for period in periods)
    if len(kept) < len(starts):
        _LOG.info(
            "%s: %d windows, %d left out for gaps in time and %d for missing fields",
            shown, len(kept), (~whole).sum(), (whole & ~present).sum(),
        )  # fmt: skip
    if not len(kept):
        raise UserError(
            f"expected a window of {history_len} + {forecast_len} times in the period {shown}, got none: "
            f"{len(starts)} fit, {(~whole).sum()} have gaps in time, {(whole & ~present).sum()} missing fields; "
            "change the period, data.history_len or data.forecast_len"
        )
    return kept
