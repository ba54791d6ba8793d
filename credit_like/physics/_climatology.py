"""The mean of the data over a period, which some corrections leave alone or pull towards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from credit_like.data.store import FieldStore
from credit_like.data.times import spread, to_text
from credit_like.errors import UserError
from credit_like.schema.data import Periods
from credit_like.variables import Variables

TIMES = 50
"""At most as many times, evenly spread over the period and the hours of the day, make the climatology."""


def check_period(kind: str, period: Periods, store: FieldStore) -> None:
    """Raise UserError unless the data reach from one end of the period to the other, for a correction of this kind.

    An analysis within the period would be taken for its mean otherwise.
    """
    if store.reaches_over(period):
        return
    ends = [to_text(store.times[at]) for at in store.period(period)[[0, -1]]] if len(store.period(period)) else ["none"]
    got = " to ".join(dict.fromkeys(ends))
    raise UserError(
        f"physics.climatology: expected data of the period {period[0].start} to {period[-1].end}, got {got}; change it, or "
        f"remove {kind} where forecasts are made without the data of the training"
    )


def states(
    chosen: Iterable[slice],
    period: Periods,
    variables: Variables,
    store: FieldStore,
    rows: slice = slice(None),
    columns: slice = slice(None),
    times: int = TIMES,
) -> tuple[NDArray[np.bool_], Iterator[NDArray[np.float64]]]:
    """Return which of the predicted channels the `chosen` variables have, and these (C, H, W) at times of a period.

    One time is read after the other, because a state of a fine grid takes gigabytes.
    """
    slices = variables.slices(variables.outputs)
    is_chosen = np.zeros(sum(map(len, variables.outputs)), bool)
    for channels in chosen:
        is_chosen[channels] = True
    read = [variable for variable in variables.outputs if is_chosen[slices[variable.name]].all()]
    positions = store.period(period)
    some = positions[spread(store.seconds[positions], times, store.step_seconds)]
    return is_chosen, (store.read(read, [int(each)], rows, columns=columns)[0].astype(np.float64) for each in some)


def climatology(
    chosen: Iterable[slice],
    period: Periods,
    variables: Variables,
    store: FieldStore,
    rows: slice = slice(None),
    columns: slice = slice(None),
    *,
    zonal: bool = False,
) -> NDArray[np.float64]:
    """Return the mean over a period at this rank's points (C, H, W), and over longitude too if `zonal` (C, H, 1).

    C are the predicted channels; those of no `chosen` variable are NaN, and so is what the data never have.
    """
    is_chosen, fields = states(chosen, period, variables, store, rows, columns)
    total = count = np.zeros(())
    for field in fields:
        has = np.isfinite(field)
        field[~has] = 0
        total = total + (field.sum(-1, keepdims=True) if zonal else field)
        count = count + (has.sum(-1, keepdims=True) if zonal else has)
    mean = np.full((len(is_chosen), *total.shape[1:]), np.nan)
    with np.errstate(invalid="ignore"):  # points without data
        mean[is_chosen] = total / count
    return mean
