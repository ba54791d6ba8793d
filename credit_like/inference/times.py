"""Initial times and leads of forecasts."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Collection
from typing import Any

import numpy as np

from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.schema.base import format_duration
from credit_like.schema.data import DataSection
from credit_like.schema.inference import Ensemble, InferenceSection

_LOG = logging.getLogger(__name__)
_LONGEST = dt.timedelta(days=1000 * 365)


def lead_steps(lead: int | dt.timedelta, timestep: dt.timedelta, key: str = "inference.lead") -> int:
    """Convert a lead to steps. Raises UserError unless it is a whole, positive number of steps."""
    steps = lead if isinstance(lead, int) else lead / timestep
    if steps < 1 or steps != int(steps):
        shown = lead if isinstance(lead, int) else format_duration(lead)
        raise UserError(
            f"{key}: expected a whole number of steps of {format_duration(timestep)}, at least one, got {shown}, "
            f"change it to a multiple of data.timestep"
        )
    if steps > _LONGEST / timestep:
        raise UserError(f"{key}: expected a lead of at most {_LONGEST.days // 365} years, got more, change it")
    return int(steps)


def kept_leads(section: InferenceSection, timestep: dt.timedelta) -> tuple[int, ...]:
    """Return the leads to write, in steps, ascending: those of `output.leads`, or all.

    Raises UserError for a lead between two steps or beyond the last.
    """
    last = lead_steps(section.lead, timestep)
    kept = sorted(lead_steps(lead, timestep, "inference.output.leads") for lead in section.output.leads)
    if kept and kept[-1] > last:
        raise UserError(
            f"inference.output.leads: expected leads of at most {last} steps, got {kept[-1]}, change inference.lead"
        )
    return tuple(kept) or tuple(range(1, last + 1))


def earlier_starts(ensemble: Ensemble, timestep: dt.timedelta) -> tuple[int, ...]:
    """Return how many steps before an initial time the forecasts start from which its members' initial states follow.

    0, the initial time itself, is always one of them. Raises UserError for a cycle or a lag between two steps.
    """
    key = "inference.ensemble.perturbations"
    if ensemble.members == 1 or ensemble.perturbations is None or ensemble.kind == "gaussian":
        return (0,)
    if ensemble.kind == "bred":
        cycle = lead_steps(ensemble.perturbations.cycle, timestep, f"{key}.cycle")
        return tuple(range(0, ensemble.perturbations.cycles * cycle + 1, cycle))
    lag = lead_steps(ensemble.perturbations.lag or timestep, timestep, f"{key}.lag")
    return tuple(range(0, ensemble.members * lag, lag))


def initial_times(
    section: InferenceSection, store: FieldStore, data: DataSection, missing_times: Collection[int] = ()
) -> list[int]:
    """Return the positions of the initial times on the store's time axis, ascending.

    If `inference.init` is not given, these are every fourth step of the test period from which the whole forecast lies
    inside the data. Times of a range whose initial fields are missing are omitted and counted. Raises UserError for a
    time that is not in the data, that lacks its history or a whole initial field, or from which a forecast needs
    forcing beyond the end of the data. Bred and lagged members need the same of the earlier times they start from.
    """
    leads = lead_steps(section.lead, data.timestep)
    starts = earlier_starts(section.ensemble, data.timestep)
    needed = [start + back for start in starts for back in range(data.history_len)]
    # A time lacks data if any of the times that its members start from does.
    missing = {time + back for time in missing_times for back in needed}
    init = section.init
    if init is None:
        chosen = _default(store, data, leads, missing, needed[-1])
    elif init.times:
        chosen = [_index(store, time) for time in init.times]
        if lacking := [store.times[i] for i in chosen if i in missing]:
            raise UserError(
                "inference.init: expected initial times with all their fields, got "
                f"{', '.join(map(calendar.to_text, lacking[:3]))} where whole fields are missing, change to other times"
            )
    else:
        assert init.start is not None
        assert init.end is not None
        assert init.interval is not None
        step = lead_steps(init.interval, data.timestep, "inference.init")
        found = range(_index(store, init.start), _index(store, init.end) + 1, step)
        chosen = [i for i in found if i not in missing]
        if len(chosen) < len(found):
            _LOG.warning(
                "%d of %d initial times left out: whole fields are missing", len(found) - len(chosen), len(found)
            )
        if not chosen:
            raise UserError(
                f"inference.init: expected initial times from {init.start} to {init.end}, got none with data"
            )
    _check_history(chosen, store, data)
    if starts[-1] and (early := [i for i in chosen if i < needed[-1]]):
        raise UserError(
            f"inference.init: expected {needed[-1]} steps of data before an initial time for {section.ensemble.kind} "
            f"members, got {early[0]} before {calendar.to_text(store.times[early[0]])}, change it to a later one or "
            "inference.ensemble.perturbations"
        )
    _check_forcing(chosen, store, data, leads)
    return sorted(set(chosen))


def _index(store: FieldStore, time: str) -> int:
    try:
        return store.index(time)
    except ValueError as error:
        raise UserError(f"inference.init: {error}") from error


def _default(store: FieldStore, data: DataSection, leads: int, missing: set[int], before: int) -> list[int]:
    inside = store.period(data.test)
    whole = [int(i) for i in inside if i + leads < len(store.times) and i >= before]
    chosen = [i for i in whole[::4] if i not in missing]
    if not chosen:
        raise UserError(
            f"inference.lead: expected a lead that fits into the data after a time of the test period, got {leads} "
            f"steps and {len(inside)} test times, change it to a shorter one or set inference.init"
        )
    return chosen


def _check_history(chosen: list[int], store: FieldStore, data: DataSection) -> None:
    if early := [i for i in chosen if i < data.history_len - 1]:
        raise UserError(
            f"inference.init: expected {data.history_len} steps of history, got an initial time at the start of "
            f"the data ({calendar.to_text(store.times[early[0]])}), change it to a later one"
        )


def _check_forcing(chosen: list[int], store: FieldStore, data: DataSection, leads: int) -> None:
    """Raise UserError unless each forecast of n steps has forcing at n times, the initial one included."""
    specs = (*data.dynamic_forcing.level, *data.dynamic_forcing.surface)
    read = [spec.name for spec in specs if spec.compute is None and spec.fill is None]
    last = len(store.times) - 1
    late = [i for i in chosen if i + leads - 1 > last]
    if read and late:
        raise UserError(
            f"inference.init: expected forcing ({', '.join(read)}) for {leads} steps from "
            f"{calendar.to_text(store.times[late[0]])}, got data until {calendar.to_text(store.times[last])}, change "
            "the initial time or inference.lead, or give the forcing `fill: persist`"
        )


def times_at(store: FieldStore, positions: list[int]) -> Any:
    """Return the times at positions, as the store has them."""
    return store.times[np.asarray(positions, np.int64)]
