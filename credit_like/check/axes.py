"""Checks of the grid and the times of the data, not of their values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from credit_like import registry
from credit_like.check.store import Store, one_line, refusal
from credit_like.layout import Finding
from credit_like.schema import losses
from credit_like.schema.base import format_duration
from credit_like.schema.checks import SPLITS, specs
from credit_like.schema.data import Period
from credit_like.schema.errors import Path
from credit_like.schema.phases import phases, written_at


def _circle_findings(store: Store) -> Iterator[Finding]:
    """Check what needs a grid that covers the full circle of longitude."""
    grid = store.fields.grid
    if grid.is_periodic:
        return
    got = f"got {grid.width} from {grid.longitude[0]:g} to {grid.longitude[-1]:g}"
    for phase in phases(store.experiment):
        if phase.experiment.trainer.shift_longitude:
            yield (
                written_at(store.experiment, phase, ("trainer", "shift_longitude")),
                f"expected a grid whose longitudes go all the way round, {got}, remove this key",
            )
        zonal = [
            loss.type for loss in losses.summands(phase.experiment.loss) if loss.type in ("spectral", "spectral-crps")
        ]
        if zonal:
            yield (
                written_at(store.experiment, phase, ("loss",)),
                f"expected a grid whose longitudes go all the way round with the loss {zonal[0]}, {got}, change the loss",
            )


def _grid_findings(store: Store) -> Iterator[Finding]:
    """Check the model's windows, padding, heads and bands of latitude against the grid."""
    model, grid = store.experiment.model, store.fields.grid
    messages: list[str] = []
    if check := getattr(model, "check", None):
        channels = {"in_channels": store.variables.in_channels, "out_channels": store.variables.out_channels}
        messages += check(grid.height, grid.width, **channels)
    for message in messages:
        yield _model_key(message, type(model).model_fields)
    if not messages and (check := getattr(model, "check_parallel", None)):
        degrees = store.experiment.trainer.parallelism.degrees
        rows, columns = degrees.shape
        shared = {"columns": columns} if columns > 1 else {}
        for degree, message in check(grid.height, grid.width, tensor=degrees.tensor, domain=rows, **shared):
            yield ("trainer", "parallelism", degree), message


def _model_key(message: str, fields: Any) -> Finding:
    """Return the key and the text of a model's message: `dim[1]: expected …` concerns the key `model.dim.1`."""
    match = re.match(r"(\w+)((?:\.\w+)*)(?:\[(\d+)\])?: ", message)
    if not match or match[1] not in fields:
        return ("model",), message
    index = (int(match[3]),) if match[3] else ()
    return ("model", match[1], *filter(None, match[2].split(".")), *index), message[match.end() :]


def _periods(store: Store) -> Iterator[tuple[Path, Period]]:
    for split in SPLITS:
        for i, period in enumerate(getattr(store.experiment.data, split)):
            yield ("data", split, i), period


def _time_findings(store: Store) -> Iterator[Finding]:
    """Check the store's times against the periods."""
    for place, period in _periods(store):
        yield from ((place, message) for message in _period_messages(store, period))


def _window_findings(store: Store) -> Iterator[Finding]:
    """Check that the windows of samples fit into the periods."""
    for place, period in _periods(store):
        if any(_period_messages(store, period)):
            continue
        for phase in phases(store.experiment):
            where = written_at(store.experiment, phase, ("data", "forecast_len"))
            for message in _window_messages(store, period, phase.experiment.data.forecast_len):
                yield (where if where[0] == "trainer" else place), message


def _period_messages(store: Store, period: Period) -> Iterator[str]:
    data, step = store.experiment.data, store.timestep
    has = f"{store.text(store.seconds[0])} to {store.text(store.seconds[-1])}"
    try:
        start, end = store.parse(period.start), store.parse(period.end)
    except ValueError as error:
        yield f"expected days of the {store.calendar} calendar, got {period} ({one_line(error)}), change them"
        return
    inside = store.inside(period)
    if not len(inside):
        yield f"expected a period with times of the store ({has}), got none in {period}, change it"
        return
    if start <= store.seconds[0] - step or end >= store.seconds[-1] + step:
        yield f"expected a period inside the store ({has}), got {period}, change it"
        return
    expected = np.arange(inside[0], end + 1, step)
    missing = expected[~np.isin(expected, inside)]
    if len(missing):
        yield (
            f"expected a time every {format_duration(data.timestep)}, got {len(missing)} of {len(expected)} missing "
            f"from the store, the first {store.text(missing[0])}, change the period or split it in two"
        )


def _window_messages(store: Store, period: Period, forecast_len: int) -> Iterator[str]:
    history_len, times = store.experiment.data.history_len, len(store.inside(period))
    window = history_len + forecast_len
    if times < window:
        yield (
            f"expected at least history_len + forecast_len = {history_len} + {forecast_len} = {window} "
            f"times, got {times}, change the period"
        )


def initial_times(store: Store) -> Sequence[int]:
    """Return the initial times in seconds since 1970; none if the experiment specifies none."""
    init = store.experiment.inference.init
    if init is None:
        return []
    if init.times:
        return [store.parse(time) for time in init.times]
    assert init.start
    assert init.end
    assert init.interval
    interval = max(1, round(init.interval.total_seconds()))
    return range(store.parse(init.start), store.parse(init.end) + 1, interval)


def _init_findings(store: Store) -> Iterator[Finding]:
    """Check that the store has the initial times, their history and the forcing of the forecasts."""
    data, inference = store.experiment.data, store.experiment.inference
    where: Path = ("inference", "init")
    try:
        times = initial_times(store)
    except ValueError as error:
        yield where, f"expected days of the {store.calendar} calendar, got {one_line(error)}, change them"
        return
    if len(times) > len(store.seconds):
        yield where, f"expected at most the {len(store.seconds)} times of the store, got {len(times)}, change them"
        return
    if not len(times):
        return
    init = np.array(times, np.int64)
    has = f"{store.text(store.seconds[0])} to {store.text(store.seconds[-1])}"
    needed = init[:, None] - np.arange(data.history_len) * store.timestep
    absent = init[~np.isin(needed, store.seconds).all(1)]
    # Those inside a range are left out.
    if len(absent) and (isinstance(times, list) or {times[0], times[-1]} & set(absent.tolist())):
        history = f" with {data.history_len - 1} before them" if data.history_len > 1 else ""
        yield (
            where,
            f"expected times of the store ({has}){history}, got {len(absent)} that are not, the first "
            f"{store.text(absent[0])}, change them",
        )
        return
    read = [
        spec.name for _, role, _, spec in specs(data) if role == "dynamic_forcing" and not (spec.compute or spec.fill)
    ]
    lead = inference.lead if isinstance(inference.lead, int) else round(inference.lead / data.timestep)
    last = int(init.max()) + (lead - 1) * store.timestep
    if read and last > store.seconds[-1]:
        yield (
            ("inference", "lead"),
            f"expected forcing ({', '.join(read)}) until {store.text(last)}, got a store until "
            f"{store.text(store.seconds[-1])}, change the lead, the initial times or `fill` of the forcing",
        )


def _correction_findings(store: Store) -> Iterator[Finding]:
    """Check that grid and times suit the corrections."""
    for i, config in enumerate(store.experiment.physics):
        check = getattr(registry.of("physics", config), "check_data", None)
        for path, message in refusal(("physics",), check, config, store.fields) if check else ():
            yield ("physics", i, *path[1:]), message


ON_THE_AXES = (
    _circle_findings,
    _grid_findings,
    _time_findings,
    _window_findings,
    _init_findings,
    _correction_findings,
)
"""The checks that need the grid and the times of the data, not their values."""
