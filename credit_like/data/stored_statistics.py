"""Statistics that a source holds, in place of those fitted to the training period."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from credit_like import registry, transforms
from credit_like.data.statistics import Moments, Scan, Statistics, finish, scan, scan_blocks, varying
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.schema.data import DataSection
from credit_like.variables import Variable, Variables

_TIMES = 1000  # at which computed variables are sampled
_CURE = "remove `statistics` from the source, so that they are fitted"
_LOG = logging.getLogger(__name__)
Row = tuple[float, float, float]
"""Mean, standard deviation and that of the change."""
Table = dict[tuple[str, float | None], Row]
"""The statistics of a source, by name and level."""


def stored_statistics(store: FieldStore, variables: Variables, data: DataSection) -> Statistics | None:
    """Return the statistics that a source with `statistics: true` holds, or None if there is no such source.

    Static variables are fitted, since they are a single field, and computed ones to a sample of the training period.
    Raises UserError as `read_stored` does.
    """
    stored = read_stored(store, variables, data)
    if stored is None:
        return None
    rows = [row for variable, found in stored for row in (found or _sampled(store, variable, data))]
    mean, std, change = np.array(rows).T
    _LOG.info("statistics are those in the data, of the period for which they were made")
    made = finish(store, variables, data, _as_scan(store, mean, std, change)).dataset.drop_vars("count")
    for fitted in ("training_period", "scanned_periods"):
        del made.attrs[fitted]
    return Statistics(made.assign_attrs(title="Statistics that the data hold"))


def read_stored(
    store: FieldStore, variables: Variables, data: DataSection
) -> list[tuple[Variable, list[Row] | None]] | None:
    """Return what a source with `statistics: true` holds, or None if there is no such source.

    This is a row for each channel of every variable in time, and None for a computed variable. Raises UserError if the
    source lacks a variable's statistics, or they are not those of the values that are read.
    """
    wanted = varying(variables)
    if not any(getattr(source, "statistics", False) for source in data.source):
        return None
    if named := [
        name
        for name, function in zip(Variables.channel_names(wanted), transforms.names(wanted), strict=True)
        if function
    ]:
        raise UserError(
            f"data.source.statistics: expected variables without transform, got {', '.join(named)}; {_CURE}"
        )
    hours = data.timestep.total_seconds() / 3600
    predicted = set(Variables.channel_names(variables.outputs))
    tables: dict[int, Table] = {}
    stored: list[tuple[Variable, list[Row] | None]] = []
    for variable in wanted:
        place = store.source_of(variable)
        if place is None:
            stored.append((variable, None))
            continue
        config, name = place
        if id(config) not in tables:
            tables[id(config)] = _table(config, hours)
        stored.append((variable, _rows(variable, name, tables[id(config)], predicted, hours)))
    return stored


def _table(config: object, hours: float) -> Table:
    """Return the statistics of a source."""
    if not getattr(config, "statistics", False):
        raise UserError(f"data.source.statistics: expected all sources to have it, got one without; {_CURE}")
    if getattr(config, "regrid", None) or getattr(config, "region", None):
        raise UserError(f"data.source.statistics: expected the source's own grid, got region or regrid; {_CURE}")
    table: Table = registry.of("source", config).stored_statistics(config, hours)
    return table


def _rows(variable: Variable, name: str, table: Table, predicted: set[str], hours: float) -> list[Row]:
    """Return the statistics of the channels of a variable."""
    levels: Sequence[float | None] = variable.levels or variable.spec.levels or (None,)
    found = []
    for channel, level in zip(variable.channels, levels, strict=True):
        if variable.spec.units or (name, level) not in table:
            what = "values in the source's units" if variable.spec.units else "values without missing ones"
            raise UserError(f"data.source.statistics: expected {what} for {channel}, got others; {_CURE}")
        row = table[name, level]
        if channel in predicted and not row[2] > 0:
            raise UserError(
                f"data.source.statistics: expected those of the change of {channel} over {hours:g} h "
                f"(statistics_tendencies_{hours:g}h_stdev), got {row[2]}; {_CURE}"
            )
        found.append(row)
    return found


def _sampled(store: FieldStore, variable: Variable, data: DataSection) -> list[Row]:
    """Return the statistics of a computed variable, of a sample of the training period."""
    train = store.period(data.train)
    chosen = np.sort(np.random.default_rng(0).choice(train, min(_TIMES, len(train)), replace=False))
    moments = scan(store, [variable], scan_blocks(store, [variable], chosen, np.ones(len(chosen), bool))).value
    return [(float(mean), float(std), np.nan) for mean, std in zip(moments.mean, moments.std, strict=True)]


def _as_scan(
    store: FieldStore, mean: NDArray[np.float64], std: NDArray[np.float64], change: NDArray[np.float64]
) -> Scan:
    """Return a scan that has these statistics, and no field with missing values."""
    one, shape = np.ones(len(mean)), (len(mean), store.grid.height, store.grid.width)
    return Scan(Moments(one, mean, std**2), Moments(one, 0 * mean, change**2), np.ones(shape, bool))
