"""Initial times and leads of forecasts."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.schema.base import format_duration
from credit_like.schema.data import DataSection
from credit_like.schema.inference import Ensemble, InferenceSection

_LOG = logging.getLogger(__name__)
_LONGEST = dt.timedelta(days=290 * 365)
"""Files hold leads in nanoseconds, 292 years of which are 64 bits."""


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
    kept = sorted({lead_steps(lead, timestep, "inference.output.leads") for lead in section.output.leads})
    if kept and kept[-1] > last:
        raise UserError(
            f"inference.output.leads: expected leads of at most {last} steps, got {kept[-1]}, change inference.lead"
        )
    return tuple(kept) or tuple(range(1, last + 1))


def earlier_starts(ensemble: Ensemble, timestep: dt.timedelta) -> tuple[int, ...]:
    """Return the steps before an initial time at which the forecasts start that make its members' initial states.

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
    inside the data, without a gap in time. Times of a range that the data lack, whose initial fields are missing or whose
    history and forcing span a gap are omitted and counted. Raises UserError for a time that is not in the data, that lacks
    its history or a whole initial field, or from which a forecast needs forcing across a gap or beyond the end of the
    data. Bred and lagged members need the same of the earlier times they start from.
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
        refuse_gaps(chosen, store, data, leads, needed[-1])
    else:
        assert init.start is not None
        assert init.end is not None
        assert init.interval is not None
        step = lead_steps(init.interval, data.timestep, "inference.init")
        ends = [store.seconds[_index(store, end)] for end in (init.start, init.end)]
        wanted = np.arange(ends[0], ends[1] + 1, step * store.step_seconds)
        there = np.flatnonzero(np.isin(store.seconds, wanted)).tolist()
        whole = [i for i in there if _has_no_gap(i, store, data, leads, needed[-1])]
        chosen = [i for i in whole if i not in missing]
        for count, why in (
            (len(wanted) - len(whole), "the data have a gap in time there"),
            (len(whole) - len(chosen), "whole fields are missing"),
        ):
            if count:
                _LOG.warning("%d of %d initial times left out: %s", count, len(wanted), why)
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


def _is_regular(store: FieldStore, first: int, last: int) -> bool:
    """Return whether the times of the data at these positions, and those between, follow each other in steps."""
    first, last = max(first, 0), min(last, len(store.seconds) - 1)
    return bool(store.seconds[last] - store.seconds[first] == (last - first) * store.step_seconds)


def _has_no_gap(init: int, store: FieldStore, data: DataSection, leads: int, before: int) -> bool:
    """Return whether a forecast reads its history and its forcing at the times that it has them for.

    Both are read at positions of the time axis, which are steps of the forecast only where the data leave out no time.
    """
    forced = any(spec.fill != "persist" for spec in (*data.dynamic_forcing.level, *data.dynamic_forcing.surface))
    return _is_regular(store, init - before, init + (leads - 1 if forced else 0))


def refuse_gaps(
    chosen: Sequence[int], store: FieldStore, data: DataSection, leads: int, before: int, key: str = "inference.init: "
) -> None:
    """Raise UserError for initial positions whose history of `before` steps or whose forcing lies beyond a gap in time."""
    if across := [i for i in chosen if not _has_no_gap(i, store, data, leads, before)]:
        raise UserError(
            f"{key}expected data every {format_duration(data.timestep)} for {before} steps before an initial time and "
            f"the {leads} steps of a forecast, whose history and forcing they are, got a gap around "
            f"{', '.join(calendar.to_text(store.times[i]) for i in across[:3])}, change to other times or a shorter lead"
        )


def _default(store: FieldStore, data: DataSection, leads: int, missing: set[int], before: int) -> list[int]:
    inside = store.period(data.test)
    fitting = [int(i) for i in inside if i + leads < len(store.times) and i >= before]
    # Every fourth step by time: by position, the time of day would change where the data have a gap.
    fourth = [i for i in fitting if not (store.seconds[i] - store.seconds[fitting[0]]) % (4 * store.step_seconds)]
    chosen = [i for i in fourth if i not in missing and _is_regular(store, i - before, i + leads)]
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
            "the initial time or the lead, or train with `fill: persist` of the forcing"
        )


def times_at(store: FieldStore, positions: list[int]) -> Any:
    """Return the times at positions, as the store has them."""
    return store.times[np.asarray(positions, np.int64)]
