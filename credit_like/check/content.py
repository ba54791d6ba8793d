"""Checks of the values of the data and of their statistics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path as FilePath

import numpy as np
from numpy.typing import NDArray

from credit_like import registry
from credit_like.check.store import UNREADABLE, Store, one_line, refusal
from credit_like.errors import UserError
from credit_like.layout import Finding
from credit_like.schema.checks import specs
from credit_like.schema.errors import Path
from credit_like.schema.places import has_checkpoints
from credit_like.variables import ROLES, Variable

_SAMPLED = 20
"""Number of times that are read before a point is assumed to never have data; one suffices if no point is missing in it."""


def content_findings(store: Store) -> Iterator[Finding]:
    """Yield fields that cannot be read or have no values: a truncated copy opens, and fails in the middle of a run."""
    for path, role, _, spec in specs(store.experiment.data):
        variable = store.variables[spec.name]
        try:
            if role == "static" or spec.compute:
                continue
            wrong = _odd_channels(store, variable)
        except UNREADABLE as error:
            yield path, f"expected data that can be read, got: {one_line(error)}; copy or make the store anew"
            return
        if wrong:
            yield path, f"{wrong}; copy or make the store anew"
    try:
        static = store.fields.static()
    except UNREADABLE as error:
        yield (
            ("data", "static"),
            f"expected data that can be read, got: {one_line(error)}; copy or make the store anew",
        )
        return
    names = store.variables.channel_names(store.variables.role("static"))
    for name, field in zip(names, static, strict=True):
        if not np.isfinite(field).any():
            yield ("data", "static"), f"expected a field with values, got {name!r} with none, change it"


def _odd_channels(store: Store, variable: Variable) -> str | None:
    """Return a problem if the first, middle or last field of the periods has infinite values, or if none has values."""
    from credit_like.data.statistics import MOST

    has_data = np.zeros(len(variable), bool)
    for position in _sampled(store, 3):
        fields = store.fields.read([variable], [position])[0]
        infinite = np.isinf(fields).any((1, 2))
        if infinite.any():
            channel = variable.channels[int(np.argmax(infinite))]
            return f"expected finite values, got infinite ones of {channel} at {store.text(store.seconds[position])}"
        filled = (np.abs(fields) > MOST).any((1, 2))
        if filled.any():
            channel = variable.channels[int(np.argmax(filled))]
            return (
                f"expected values below {MOST:g}, got {np.nanmax(np.abs(fields)):g} of {channel} at "
                f"{store.text(store.seconds[position])}; if this marks points without data, declare it as _FillValue in the files"
            )
        has_data |= np.isfinite(fields).any((1, 2))
    if has_data.all():
        return None
    channel = variable.channels[int(np.argmin(has_data))]
    return f"expected values, got none of {channel} in the first, the middle and the last field of the periods"


def _sampled(store: Store, count: int) -> list[int]:
    """Return at most so many positions of the periods on the time axis: the first, the last and some between."""
    data, used = store.experiment.data, np.array([], np.int64)
    with suppress(ValueError):  # a day that the calendar does not have is reported with the periods
        used = store.fields.period((*data.train, *data.valid, *data.test))
    used = used if len(used) else np.arange(len(store.seconds))
    return sorted({int(used[i]) for i in np.linspace(0, len(used) - 1, count).astype(int)})


def gap_findings(store: Store) -> Iterator[Finding]:
    """Check that there are data where the corrections need them.

    What the data are is known from the statistics, or from a sample as long as there are none.
    """
    corrections = [
        (i, config, check)
        for i, config in enumerate(store.experiment.physics)
        if (check := getattr(registry.of("physics", config), "check_mask", None))
    ]
    found: list[Finding] = []
    for mask in _masks(store) if corrections else ():
        found = [
            (("physics", i, *path[1:]), message)
            for i, config, check in corrections
            for path, message in refusal(("physics",), check, config, store.variables, mask)
        ]
        if not found:
            return
    yield from found


def _masks(store: Store) -> Iterator[NDArray[np.bool_]]:
    """Yield (C, H, W) of what the model predicts, True at points that have data: of more and more of the sample."""
    from credit_like.data.statistics import Statistics

    experiment, outputs = store.experiment, store.variables.outputs
    path = experiment.statistics_file
    if os.path.isfile(path):  # also for a name that no path can have
        with suppress(*UNREADABLE):  # statistics that do not fit are reported by themselves
            yield Statistics.load(path, store.fields).mask(outputs)
            return
    mask = np.zeros((sum(map(len, outputs)), store.fields.grid.height, store.fields.grid.width), bool)
    for position in _sampled(store, _SAMPLED):
        mask |= np.isfinite(store.fields.read(outputs, [position])[0])
        yield mask


def statistics_file_findings(store: Store) -> Iterator[Finding]:
    """Check that the statistics file is there, if the experiment names one."""
    name = store.experiment.data.statistics
    if name is not None and not os.path.isfile(name):  # also for a name that no path can have
        yield (
            ("data", "statistics"),
            f"expected a netCDF file, got {name!r}, which is not one, change it or run `credit-like preprocess`",
        )


def statistics_findings(store: Store) -> Iterator[Finding]:
    """Check that the statistics file, if the experiment names one, has every variable with valid values."""
    from credit_like.data.statistics import Statistics

    name = store.experiment.data.statistics
    where: Path = ("data", "statistics")
    absent = list(statistics_file_findings(store))
    yield from absent
    if name is None or absent:
        return
    try:
        statistics = Statistics.load(FilePath(name), store.fields)
        moments = {role: statistics.select(wanted) for role in ROLES if (wanted := store.variables.role(role))}
        statistics.refuse_other_data(store.fields, store.variables, store.experiment.data, name, is_used=False)
    except UserError as error:
        yield where, one_line(error)
        return
    except UNREADABLE as error:
        yield where, f"expected statistics of every variable, got {one_line(error)}, change it or make them anew"
        return
    for role, (mean, std, change_std) in moments.items():
        columns = {"mean": mean, "std": std} | ({"change_std": change_std} if role == "prognostic" else {})
        for what, values in columns.items():
            wrong = ~np.isfinite(values) if what == "mean" else ~(np.isfinite(values) & (values > 0))
            if wrong.any():
                channels = np.array(store.variables.channel_names(store.variables.role(role)))[wrong]
                good = "finite" if what == "mean" else "finite and positive"
                yield where, f"expected {good} {what}, got {values[wrong][0]} for {', '.join(channels)}, make them anew"


def made_statistics_findings(store: Store) -> Iterator[Finding]:
    """Check that the statistics which the run has in its folder, where it has some, are those of its data."""
    from credit_like.data.statistics import Statistics

    experiment, path = store.experiment, store.experiment.statistics_file
    if experiment.data.statistics is not None or experiment.start_from is not None or not path.exists():
        return
    is_used = has_checkpoints(experiment.save_loc)

    def refuse() -> None:
        found = Statistics.load(path, store.fields)
        found.refuse_other_data(store.fields, store.variables, experiment.data, path, is_used)

    yield from refusal(("save_loc",), refuse)


def stored_findings(store: Store) -> Iterator[Finding]:
    """Check that a source with `statistics: true` has statistics of every variable that is read."""
    from credit_like.data.stored_statistics import read_stored

    experiment = store.experiment
    if experiment.data.statistics is None and not os.path.exists(experiment.statistics_file):
        yield from refusal(("data", "source"), read_stored, store.fields, store.variables, experiment.data)


def fit_findings(store: Store, world: int) -> Iterator[Finding]:
    """Check that statistics which take long to fit have been fitted before several ranks wait for them."""
    from credit_like.data.statistics import refuse_long_fit
    from credit_like.data.stored_statistics import read_stored

    experiment = store.experiment
    path = experiment.statistics_file
    if world == 1 or experiment.data.statistics is not None or os.path.exists(path):
        return
    if read_stored(store.fields, store.variables, experiment.data) is None:
        yield from refusal(
            ("data", "statistics"), refuse_long_fit, store.fields, store.variables, experiment.data, path
        )
