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
        f"forecast with {kind} from a package (`credit-like export RUN --package FOLDER`), which has their mean"
    )


def states(
    chosen: Iterable[slice],
    period: Periods,
    variables: Variables,
    store: FieldStore,
    rows: slice = slice(None),
    columns: slice = slice(None),
    times: int = TIMES,
) -> Iterator[NDArray[np.float64]]:
    """Yield the channels of the `chosen` variables (n, H, W) at times of a period.

    One time is read after the other, because a state of a fine grid takes gigabytes.
    """
    slices = variables.slices(variables.outputs)
    is_chosen = _chosen(chosen, variables)
    read = [variable for variable in variables.outputs if is_chosen[slices[variable.name]].all()]
    positions = store.period(period)
    some = positions[spread(store.seconds[positions], times, store.step_seconds)]
    return (store.read(read, [int(each)], rows, columns=columns)[0].astype(np.float64) for each in some)


def _chosen(chosen: Iterable[slice], variables: Variables) -> NDArray[np.bool_]:
    """Return of every predicted channel whether it is chosen."""
    result = np.zeros(sum(map(len, variables.outputs)), bool)
    for channels in chosen:
        result[channels] = True
    return result


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
    """Return the mean of the `chosen` channels over a period at this rank's points, (n, H, W).

    With `zonal`, it is over longitude too, (n, H, 1). What the data never have is NaN.
    """
    total = count = np.zeros(())
    for field in states(chosen, period, variables, store, rows, columns):
        has = np.isfinite(field)
        field[~has] = 0
        total = total + (field.sum(-1, keepdims=True) if zonal else field)
        count = count + (has.sum(-1, keepdims=True) if zonal else has)
    with np.errstate(invalid="ignore"):  # points without data
        return np.asarray(total / count)


def on_channels(values: NDArray[np.float64], chosen: Iterable[slice], variables: Variables) -> NDArray[np.float64]:
    """Return values of the `chosen` channels (n, …) on all predicted channels (C, …), NaN on the others."""
    is_chosen = _chosen(chosen, variables)
    result = np.full((len(is_chosen), *values.shape[1:]), np.nan)
    result[is_chosen] = values
    return result
