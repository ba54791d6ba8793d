"""Checks before a run starts: the experiment's sections, its stores, and whether they fit together.

Nothing here imports torch or writes a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from credit_like.schema.base import format_duration
from credit_like.schema.checks import SPLITS, Finding, layout, section_findings, specs, world_of
from credit_like.schema.data import Period
from credit_like.schema.errors import ExperimentError, Locations, Path, Problem, in_order
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_located
from credit_like.variables import Variables

if TYPE_CHECKING:
    from credit_like.data.store import FieldStore

# Exceptions that the libraries behind a store raise for missing, truncated or malformed files.
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError)


@dataclass
class Store:
    """An open store, with the queries that the checks make of its time axis."""

    fields: FieldStore
    variables: Variables
    experiment: Experiment

    @property
    def seconds(self) -> NDArray[np.int64]:
        """Times of the store (T,), in seconds since 1970 in their own calendar."""
        return self.fields.seconds

    @property
    def calendar(self) -> str:
        """Calendar of the store's times."""
        return self.fields.calendar

    @property
    def timestep(self) -> int:
        """Time step in seconds."""
        return self.fields.step_seconds

    def parse(self, text: str) -> int:
        """Return an ISO time in seconds since 1970.

        Raises UserError for a day that the calendar does not have.
        """
        from credit_like.data.times import parse

        return parse(text, self.calendar)

    def text(self, seconds: int) -> str:
        """Return a time in seconds since 1970 as ISO text."""
        from credit_like.data.times import from_seconds, to_text

        return to_text(from_seconds(np.array([seconds]), self.calendar)[0])

    def inside(self, period: Period) -> NDArray[np.int64]:
        """Return the store's times in a period, in seconds since 1970."""
        start, end = self.parse(period.start), self.parse(period.end)
        return self.seconds[(self.seconds >= start) & (self.seconds <= end)]

    def samples(self, split: str) -> int:
        """Return the number of windows (history and forecast) in a split, including those with missing fields.

        A window lies within one period.
        """
        data = self.experiment.data
        steps = (np.arange(data.history_len + data.forecast_len) * self.timestep)[:, None]
        inside = [self.inside(period) for period in getattr(data, split)]
        return sum(int(np.isin(at[None] + steps, at).all(0).sum()) for at in inside if len(at))


def checked_experiment(
    file: str | FilePath, overrides: Sequence[str] = (), world_size: int | None = None
) -> tuple[Experiment, Store, int]:
    """Load and check the experiment of a file; return it with its store and the world size it was checked for.

    Raises ExperimentError with every problem of the file or, if the file is valid, of its sections and stores.
    """
    experiment, locations = load_located(file, overrides)
    findings, store = _inspect(experiment, world_size)
    if findings or store is None:
        raise ExperimentError(in_order([locations.problem(*finding) for finding in findings], str(file)))
    return experiment, store, world_size or world_of(experiment)


def check_experiment(experiment: Experiment, locations: Locations, world_size: int | None = None) -> list[Problem]:
    """Return every problem of a loaded experiment and its stores, for `world_size` (default: its batch job's)."""
    return [locations.problem(*finding) for finding in _inspect(experiment, world_size)[0]]


def _inspect(experiment: Experiment, world_size: int | None) -> tuple[list[Finding], Store | None]:
    findings = list(section_findings(experiment, world_size or world_of(experiment)))
    try:
        variables = Variables(experiment.data)
    except ValueError as error:
        # Names and levels that do not make channels have already been reported one by one.
        return findings or [(("data",), str(error))], None
    # Imported here, so that a misspelt key is reported before the slow libraries of the stores are loaded.
    from credit_like.data.store import StoreError, open_store

    try:
        store = Store(open_store(experiment.data, variables), variables, experiment)
    except StoreError as error:
        return [*findings, *((place, _one_line(message)) for place, message in error.problems)], None
    except _UNREADABLE as error:
        return [*findings, (("data", "source"), _one_line(error))], None
    findings += _grid_findings(store)
    findings += _time_findings(store)
    findings += _content_findings(store)
    findings += _statistics_findings(store)
    findings += _launch_findings(experiment)
    return findings, store


def _grid_findings(store: Store) -> Iterator[Finding]:
    """Check the model's windows, padding, heads and bands of latitude against the grid."""
    model, parallelism, grid = store.experiment.model, store.experiment.trainer.parallelism, store.fields.grid
    messages: list[str] = []
    if store.experiment.trainer.shift_longitude and not grid.is_periodic:
        yield (
            ("trainer", "shift_longitude"),
            f"expected a grid whose longitudes go all the way round, got {grid.width} from {grid.longitude[0]:g} to "
            f"{grid.longitude[-1]:g}, remove this key",
        )
    if check := getattr(model, "check", None):
        channels = {"in_channels": store.variables.in_channels, "out_channels": store.variables.out_channels}
        messages += check(grid.height, grid.width, **channels)
    for message in messages:
        yield _model_key(message, type(model).model_fields)
    if not messages and (check := getattr(model, "check_parallel", None)):
        for degree, message in check(grid.height, grid.width, tensor=parallelism.tensor, domain=parallelism.domain):
            yield ("trainer", "parallelism", degree), message


def _model_key(message: str, fields: Any) -> Finding:
    """Return the key and the text of a model's message: `dim[1]: expected …` concerns the key `model.dim.1`."""
    match = re.match(r"(\w+)((?:\.\w+)*)(?:\[(\d+)\])?: ", message)
    if not match or match[1] not in fields:
        return ("model",), message
    index = (int(match[3]),) if match[3] else ()
    return ("model", match[1], *filter(None, match[2].split(".")), *index), message[match.end() :]


def _time_findings(store: Store) -> Iterator[Finding]:
    """Check the store's times against the periods and the initial times."""
    for split in SPLITS:
        for i, period in enumerate(getattr(store.experiment.data, split)):
            for message in _period_messages(store, period):
                yield ("data", split, i), message
    yield from _init_findings(store)


def _period_messages(store: Store, period: Period) -> Iterator[str]:
    data, step = store.experiment.data, store.timestep
    has = f"{store.text(store.seconds[0])} to {store.text(store.seconds[-1])}"
    try:
        start, end = store.parse(period.start), store.parse(period.end)
    except ValueError as error:
        yield f"expected days of the {store.calendar} calendar, got {_shown(period)} ({_one_line(error)}), change them"
        return
    inside = store.inside(period)
    if not len(inside):
        yield f"expected a period with times of the store ({has}), got none in {_shown(period)}, change it"
        return
    if start <= store.seconds[0] - step or end >= store.seconds[-1] + step:
        yield f"expected a period inside the store ({has}), got {_shown(period)}, change it"
        return
    expected = np.arange(inside[0], end + 1, step)
    missing = expected[~np.isin(expected, inside)]
    if len(missing):
        yield (
            f"expected a time every {format_duration(data.timestep)}, got {len(missing)} of {len(expected)} missing "
            f"from the store, the first {store.text(missing[0])}, change the period or split it in two"
        )
    window = data.history_len + data.forecast_len
    if len(expected) < window:
        yield (
            f"expected at least history_len + forecast_len = {data.history_len} + {data.forecast_len} = {window} "
            f"times, got {len(expected)}, change the period"
        )


def _shown(period: Period) -> str:
    return f"[{period.start}, {period.end}]"


def initial_times(store: Store) -> list[int]:
    """Return the initial times in seconds since 1970; an empty list if the experiment specifies none."""
    init = store.experiment.inference.init
    if init is None:
        return []
    if init.times:
        return [store.parse(time) for time in init.times]
    assert init.start
    assert init.end
    assert init.interval
    interval = round(init.interval.total_seconds())
    return list(range(store.parse(init.start), store.parse(init.end) + 1, interval))


def _init_findings(store: Store) -> Iterator[Finding]:
    """Check that the store has the initial times, their history and the forcing of the forecasts."""
    data, inference = store.experiment.data, store.experiment.inference
    where: Path = ("inference", "init")
    try:
        init = np.array(initial_times(store), np.int64)
    except ValueError as error:
        yield where, f"expected days of the {store.calendar} calendar, got {_one_line(error)}, change them"
        return
    if not len(init):
        return
    has = f"{store.text(store.seconds[0])} to {store.text(store.seconds[-1])}"
    needed = init[:, None] - np.arange(data.history_len) * store.timestep
    absent = init[~np.isin(needed, store.seconds).all(1)]
    if len(absent):
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


def _content_findings(store: Store) -> Iterator[Finding]:
    """Check that the first and last fields can be read.

    A truncated copy of a store can still be opened; without this check a run would fail on it midway.
    """
    for path, role, _, spec in specs(store.experiment.data):
        variable = store.variables[spec.name]
        try:
            if role == "static":
                continue
            store.fields.read([variable], sorted({0, len(store.seconds) - 1}))
        except _UNREADABLE as error:
            yield path, f"expected data that can be read, got: {_one_line(error)}; copy or make the store anew"
            return
    try:
        static = store.fields.static()
    except _UNREADABLE as error:
        yield (
            ("data", "static"),
            f"expected data that can be read, got: {_one_line(error)}; copy or make the store anew",
        )
        return
    names = store.variables.channel_names(store.variables.role("static"))
    for name, field in zip(names, static, strict=True):
        if not np.isfinite(field).any():
            yield ("data", "static"), f"expected a field with values, got {name!r} with none, change it"


def _statistics_findings(store: Store) -> Iterator[Finding]:
    """Check that the statistics file, if the experiment names one, has every variable with valid values."""
    from credit_like.data.statistics import Statistics

    name = store.experiment.data.statistics
    where: Path = ("data", "statistics")
    if name is None:
        return
    if not FilePath(name).is_file():
        yield where, f"expected a netCDF file, got {name!r}, which is none, change it or run `credit-like preprocess`"
        return
    for role in ("prognostic", "diagnostic", "dynamic_forcing", "static"):
        wanted = store.variables.role(role)
        if not wanted:
            continue
        try:
            mean, std, change_std = Statistics.load(FilePath(name)).select(wanted)
        except _UNREADABLE as error:
            yield where, f"expected statistics of every variable, got {_one_line(error)}, change it or make them anew"
            return
        columns = {"mean": mean, "std": std} | ({"change_std": change_std} if role == "prognostic" else {})
        for what, values in columns.items():
            wrong = ~np.isfinite(values) if what == "mean" else ~(np.isfinite(values) & (values > 0))
            if wrong.any():
                channels = np.array(store.variables.channel_names(wanted))[wrong]
                good = "finite" if what == "mean" else "finite and positive"
                yield where, f"expected {good} {what}, got {values[wrong][0]} for {', '.join(channels)}, make them anew"


def _launch_findings(experiment: Experiment) -> Iterator[Finding]:
    """Check the requested resources against the rules of the site."""
    from credit_like.launch.resources import resources
    from credit_like.schema.launch import MODES, Request, SiteSection

    pbs = experiment.pbs
    if pbs is None:
        return
    for mode in MODES:
        if mode != "train" and getattr(pbs, mode) == Request():
            continue
        try:
            resources(pbs, experiment.site or SiteSection(), mode)
        except ValueError as error:
            yield ("pbs",) if mode == "train" else ("pbs", mode), _one_line(error)


def _one_line(error: BaseException | str) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


def describe(experiment: Experiment, store: Store, world: int) -> dict[str, Any]:
    """Return a description of the run as plain data."""
    grid, at = store.fields.grid, layout(experiment.trainer, world)
    trainer = experiment.trainer
    per_epoch = store.samples("train") // trainer.global_batch_size
    if trainer.batches_per_epoch:
        per_epoch = min(per_epoch, trainer.batches_per_epoch)
    return {
        "name": experiment.name,
        "save_loc": experiment.save_loc,
        "model": experiment.model.type,
        "variables": {
            role: [{"name": v.name, "levels": list(v.levels)} for v in store.variables.role(role)]
            for role in ("prognostic", "diagnostic", "dynamic_forcing", "static")
        },
        "channels": {
            "in": store.variables.in_channels * experiment.data.history_len,
            "out": store.variables.out_channels,
        },
        "grid": {
            "height": grid.height,
            "width": grid.width,
            "latitude": [float(grid.latitude[0]), float(grid.latitude[-1])],
            "longitude": [float(grid.longitude[0]), float(grid.longitude[-1])],
            "global": grid.is_global,
        },
        "times": {
            "first": store.text(int(store.seconds[0])),
            "last": store.text(int(store.seconds[-1])),
            "count": len(store.seconds),
            "timestep": format_duration(experiment.data.timestep),
        },
        "samples": {split: store.samples(split) for split in SPLITS},
        "layout": {
            "world": at.world,
            "data": at.data,
            "tensor": at.tensor,
            "domain": at.domain,
            "global_batch_size": trainer.global_batch_size,
            "micro_batch_size": trainer.micro_batch_size,
            "accumulation": at.accumulation,
            "steps_per_epoch": per_epoch,
            "steps": per_epoch * trainer.epochs,
        },
    }


def print_table(description: dict[str, Any]) -> None:
    """Print the description as a table."""
    from rich.console import Console
    from rich.table import Table

    def names(variables: list[dict[str, Any]]) -> str:
        shown = [f"{v['name']} × {len(v['levels'])}" if v["levels"] else v["name"] for v in variables]
        return ", ".join(shown) or "none"

    grid, times, at = description["grid"], description["times"], description["layout"]
    processes = "1 process" if at["world"] == 1 else f"{at['world']} processes"
    north, west = grid["latitude"], grid["longitude"]
    rows = {
        "model": description["model"],
        **{role.replace("_", " "): names(v) for role, v in description["variables"].items()},
        "channels": f"{description['channels']['in']} in, {description['channels']['out']} out",
        "grid": f"{grid['height']} × {grid['width']}{' global' if grid['global'] else ' regional'}, "
        f"latitude {north[0]:g} to {north[1]:g}, longitude {west[0]:g} to {west[1]:g}",
        "times": f"{times['count']} from {times['first']} to {times['last']}, stepped by {times['timestep']}",
        "samples": ", ".join(f"{split} {n}" for split, n in description["samples"].items())
        + " (before windows with missing fields are left out)",
        "layout": f"{processes} = data {at['data']} × tensor {at['tensor']} × domain {at['domain']}",
        "batch": f"{at['global_batch_size']} = micro {at['micro_batch_size']} × data {at['data']} × accumulation "
        f"{at['accumulation']}",
        "steps": f"{at['steps_per_epoch']} per epoch, {at['steps']} in all",
        "save_loc": description["save_loc"],
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in rows.items():
        table.add_row(key, value)
    console = Console()
    console.print(f"[bold]{description['name']}[/bold]: nothing wrong found", highlight=False)
    console.print(table)
