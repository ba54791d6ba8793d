"""Forecasts from an exported model and a data set at hand: three lines in a notebook.

forecaster = load_forecaster("model.safetensors")
for dataset in forecaster(analyses, init=["2020-01-01T00"], leads=40):
    dataset["2m_temperature"].plot()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import nn

from credit_like import transforms
from credit_like.checkpoint.errors import reading_metadata
from credit_like.checkpoint.export import load_export
from credit_like.checkpoint.package import Package, load_measured, load_static, open_package
from credit_like.context import Context
from credit_like.data import named, units
from credit_like.data.aliases import find
from credit_like.data.locate import IN_MEMORY, InMemory
from credit_like.data.sources._conventions import PERIOD
from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore, StoreError, open_store
from credit_like.errors import UserError
from credit_like.grid import Grid, turn
from credit_like.inference.forecast import computes_in_bfloat16, forecast
from credit_like.inference.times import refuse_gaps
from credit_like.naming import hours_text, units_text
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.variables import ROLES, Variable, Variables

_FAR = 20.0
"""Standard deviations between the mean of an initial field and that of the training data beyond which units differ."""

_NEAR = 1e-3
"""Degrees within which a point is that of the model."""


def load_forecaster(path: str | Path | Package, device: str | torch.device = "cpu") -> Forecaster:
    """Load what `credit-like export` wrote, a file or a package, ready to forecast on `device`.

    Raises UserError for another kind of file, DamagedCheckpoint for an incomplete one.
    """
    if not isinstance(path, Package):
        path = open_package(path) if Path(path).is_dir() else Package(Path(path))
    export = load_export(path.weights)
    with reading_metadata(path.weights):
        experiment = Experiment.model_validate(export.metadata["experiment"])
        grid = Grid(*(np.array(export.metadata["grid"][axis]) for axis in ("latitude", "longitude")))
        normalisation = export.metadata["normalisation"]
    static = None if path.static is None else load_static(path.static)
    measured = {} if path.corrections is None else load_measured(path.corrections)
    model = export.build().to(device)
    with reading_metadata(path.weights):
        return Forecaster(model, experiment, normalisation, grid, static, path.sha256, measured)


class Forecaster:
    """A trained model with everything that it needs except data.

    `normalisation`: role → channels, units, level_units, mean, std, change_std, as in exports, of which those of earlier
    releases have no units. `static` has static fields for data without them. `sha256` is that of the weights' file, empty
    where it has not been computed. `measured` has what corrections took from the data of the training, by their position; what
    is absent is taken from the data at hand.
    """

    def __init__(
        self,
        model: nn.Module,
        experiment: Experiment,
        normalisation: Mapping[str, Mapping[str, Sequence[Any]]],
        grid: Grid,
        static: xr.Dataset | None = None,
        sha256: str = "",
        measured: Mapping[int, Mapping[str, NDArray[np.float64]]] | None = None,
    ) -> None:
        self.model, self.experiment, self.normalisation, self.grid = model, experiment, normalisation, grid
        self.static, self.sha256, self.measured = static, sha256, measured or {}
        variables = Variables(experiment.data)
        trained = {v.name: self._of_training("units", v) for v in variables if not v.spec.units}
        self._units = {name: text for name, text in trained.items() if text}
        self.variables = variables.with_units(self._units).without_paths()

    def __repr__(self) -> str:
        data, grid = self.experiment.data, self.grid
        names = {role: ", ".join(v.name for v in self.variables.role(role)) for role in ROLES}
        shown = "; ".join(f"{role.replace('_', ' ')} {text}" for role, text in names.items() if text)
        step = hours_text(np.timedelta64(data.timestep))
        return (
            f"<Forecaster of {self.experiment.name}: steps of {step} on {grid.height} x {grid.width} points; {shown}>"
        )

    def __call__(
        self, dataset: xr.Dataset | Sequence[xr.Dataset], init: str | Sequence[str], leads: int
    ) -> Iterator[xr.Dataset]:
        """Forecast from ISO times in `dataset`; yield one dataset per lead with the initial times along `time`.

        `dataset`, or several together, hold the model's prognostic, forcing and static variables under their own names or
        known aliases, over time, level, latitude, longitude, at the points and levels on which the model was trained, among
        others or in another order; diagnostic variables are optional, and so are the static ones of a package. The model
        computes in the precision of `inference.amp`, by default that of training, as `credit-like rollout` does. Points
        missing at the first initial time are treated as points without data. Raises UserError for an absent variable,
        level, time or grid, and for a gap in time among what a forecast reads. Only one lead is in memory unless the caller
        keeps more.
        """
        times = [init] if isinstance(init, str) else list(init)
        store = self.open(dataset)
        missing = leads - (len(store) - max(store.index(time) for time in times))
        forced = [v for v in self.variables.role("dynamic_forcing") if not v.spec.compute and v.spec.fill is None]
        if leads < 1 or (forced and missing > 0):
            raise UserError(
                f"expected at least one lead, and forcing ({', '.join(v.name for v in forced) or 'none'}) for all of "
                f"them, got leads={leads} and data until {store.times[-1]}; change leads or give more data"
            )
        data = self.experiment.data
        refuse_gaps([store.index(time) for time in times], store, data, leads, data.history_len - 1, key="")
        stepper = self.context(store, times[0]).stepper
        amp = computes_in_bfloat16(self.experiment)
        return forecast(stepper, store, self.variables, times, leads, history_len=data.history_len, amp=amp)

    def context(self, store: FieldStore, init: str) -> Context:
        """Return the context of forecasts from `store`: the model with its normalisation, corrections and noise.

        Points missing at the time `init` are treated as points without data. Raises UserError for a time that is not in the
        data, and for a prognostic field without values or with a mean that is far from that of the training data.
        """
        statistics = self._statistics(store, store.index(init))
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        runtime = Runtime(device=device)
        context = Context.of(
            self.model, self.experiment, runtime, self.variables, store, statistics, measured=self.measured
        )
        if context.stepper.noise is not None:
            context.stepper.noise.reseed("members", self.experiment.inference.ensemble.seed)
        return context

    def open(self, dataset: xr.Dataset | Sequence[xr.Dataset], names: Sequence[str] = ()) -> FieldStore:
        """Return the data as the model's store; absent diagnostic variables are filled with NaN.

        `names` are those of the data sets in messages, such as the paths of their files. The points of the model are
        selected of a larger or shifted grid, and values and levels converted to the units of the training data. Raises
        UserError as calling does.
        """
        self._refuse_the_same_names()
        datasets = [dataset] if isinstance(dataset, xr.Dataset) else list(dataset)
        places = list(names) or [IN_MEMORY] * len(datasets)
        if self.static is not None:
            lacking = [v for v in self.variables.role("static") if not _has_variable(v, datasets)]
            absent = list(dict.fromkeys(name for v in lacking if (name := v.spec.var or v.name) in self.static))
            datasets += [self.static[absent]] if absent else []
            places += ["the package's static.nc"] if absent else []
        self._refuse_absent(datasets, places)
        datasets = [self._fitted(*part) for part in zip(datasets, places, strict=True)]
        self._prepare_units(datasets, places)
        first = self.variables.role("prognostic")[0]
        main = next((i for i, d in enumerate(datasets) if _has_variable(first, [d])), None)
        unknown = [v for v in self.variables.role("diagnostic") if not _has_variable(v, datasets)]
        if main is not None and "time" not in datasets[main].indexes:
            raise UserError(
                f"expected times of {first.name} in {places[main]}, got no axis `time` with coordinates; keep it where one time is "
                "selected, as with `isel(time=[0])`"
            )
        if main is not None and unknown:
            axes = {axis: datasets[main][axis] for axis in ("time", "latitude", "longitude")}
            shape = (len(axes["time"]), sum(map(len, unknown)), self.grid.height, self.grid.width)
            empty = np.broadcast_to(np.float32("nan"), shape)
            of_level = {v.name: {"units": self._of_training("level_units", v)} for v in unknown}
            more = named.datasets(unknown, empty, axes, lambda _: {}, lambda v: of_level[v.name])
            datasets += more
            places += [places[main]] * len(more)
        sources = tuple(InMemory(*part) for part in zip(datasets, places, strict=True))
        try:
            return open_store(self.experiment.data.model_copy(update={"source": sources}), self.variables)
        except StoreError as error:  # its places are keys of an experiment, which users of an export do not have
            raise UserError("\n".join(without_keys(message) for _, message in error.problems)) from error

    def _refuse_the_same_names(self) -> None:
        """Raise UserError where variables that the model reads are told apart by the files of its training alone."""
        of_training = Variables(self.experiment.data)
        read = [v for role in ("prognostic", "dynamic_forcing", "static") for v in of_training.role(role)]
        if same := Variables.told_apart_by_files(read):
            raise UserError(
                f"expected a model whose variables have different names in the files, got several that are called "
                f"{same[0]} in different files of the training; train with files in which their names differ"
            )

    def _refuse_absent(self, datasets: Sequence[xr.Dataset], places: Sequence[str]) -> None:
        """Raise UserError where the data lack variables that the model reads."""
        known = sorted({str(name) for dataset in datasets for name in dataset.data_vars})
        read = [v for role in ("prognostic", "dynamic_forcing", "static") for v in self.variables.role(role)]
        absent = [v.name for v in read if not v.spec.compute and not _has_variable(v, datasets)]
        if absent:
            raise UserError(
                f"expected {', '.join(absent)} in {', '.join(dict.fromkeys(places))}, got {', '.join(known) or 'no variables'}; "
                "give a further file, or rename the variable"
            )

    def _fitted(self, dataset: xr.Dataset, where: str) -> xr.Dataset:
        """Return a data set on the model's points and levels. Raises UserError where it lacks some.

        Over which period a diagnostic variable is a sum is not part of the result, because a forecast does not read it.
        """
        dataset = dataset.copy()
        names = [str(name) for name in dataset.data_vars]
        for variable in self.variables.role("diagnostic"):
            if (name := find(variable.spec.var or variable.name, names)) is not None:
                dataset[name].attrs.pop(PERIOD, None)
        if {"latitude", "longitude"} <= set(dataset.dims):
            rows = _positions(dataset["latitude"].values, self.grid.latitude, "latitude", where)
            columns = _positions(dataset["longitude"].values, self.grid.longitude, "longitude", where)
            chosen = {"latitude": rows, "longitude": columns}
            changed = {
                axis: at for axis, at in chosen.items() if not np.array_equal(at, np.arange(dataset.sizes[axis]))
            }
            dataset = dataset.isel(changed).assign_coords(
                {axis: (axis, getattr(self.grid, axis), dataset[axis].attrs) for axis in chosen}
            )
        if "level" not in dataset.coords or "level" not in dataset.dims:
            return dataset
        stored = {str(name) for name, v in dataset.data_vars.items() if "level" in v.dims}
        on_levels = [v for v in self.variables if v.levels and find(v.spec.var or v.name, stored) is not None]
        wanted = sorted({level for variable in on_levels for level in variable.levels})
        level = dataset["level"]
        declared = str(level.attrs.get("units", ""))
        of_training = {self._of_training("level_units", variable) for variable in on_levels}
        trained = of_training.pop() if len(of_training) == 1 else ""
        for unit, factor in _forms(declared, trained).items():
            if _has(level.values * factor, wanted):
                values = np.round(level.values * factor, 6)
                attrs = {**level.attrs, "units": unit}
                return dataset if factor == 1 else dataset.assign_coords(level=("level", values, attrs))
        raise UserError(
            f"{where}: expected levels {_listed(wanted, trained)} of {', '.join(v.name for v in on_levels)}, got "
            f"{_listed(level.values, declared)}; give a file with the model's levels"
        )

    def _of_training(self, key: str, variable: Variable) -> str:
        """Return the `units` or `level_units` of a variable in the training data, empty where they are not known."""
        about = self.normalisation[variable.role]
        found = dict(zip(about["channels"], about.get(key, ()), strict=False))
        return str(found.get(variable.channels[0], ""))

    def _prepare_units(self, datasets: Sequence[xr.Dataset], places: Sequence[str]) -> None:
        """Declare the training data's units where the data have none, or unknown ones, so that values are read as they are.

        Raises UserError for units that do not convert to those. Those of diagnostic variables do not count, because a
        forecast does not read their values.
        """
        refused = []
        for dataset, where in zip(datasets, places, strict=True):
            for variable in self.variables:
                name = find(variable.spec.var or variable.name, map(str, dataset.data_vars))
                if name is None or variable.name not in self._units:
                    continue
                attrs, wanted = dataset[name].attrs, self._units[variable.name]
                declared = str(attrs.get("units", ""))
                try:
                    is_known = units.between(declared, wanted) is not None
                except UserError:
                    is_known = False
                    if variable.role != "diagnostic":
                        refused.append(f"{variable.name} in {wanted!r} (got {declared!r} in {where})")
                if not is_known:
                    attrs["units"] = wanted
        if refused:
            raise UserError(
                f"expected units that convert to those of the training data: {', '.join(refused)}; convert the file, or correct "
                "its units"
            )

    def _refuse_other_units(self, fields_CHW: NDArray[np.float32]) -> None:
        """Raise UserError for a prognostic channel without any value, or far from all that the model was trained on."""
        known, functions = self.normalisation["prognostic"], transforms.names(self.variables.role("prognostic"))
        moments = zip(known["channels"], known["mean"], known["std"], functions, fields_CHW, strict=False)
        for name, mean, std, function, field in moments:
            values = field[np.isfinite(field)]
            if not values.size:
                raise UserError(f"expected values of {name} at the initial time, got none; give a complete analysis")
            if not function and abs(float(values.mean(dtype=np.float64)) - mean) > _FAR * std > 0:
                raise UserError(
                    f"expected {name} as in the training data, with mean {mean:.4g} and standard deviation {std:.4g}, got a field "
                    f"with mean {values.mean():.4g}; is it in other units? Convert the file"
                )

    def _statistics(self, store: FieldStore, now: int) -> Statistics:
        """Return the export's statistics, with the points that have data at position `now`."""
        fields = store.read(self.variables.outputs, [now])[0]
        self._refuse_other_units(fields)
        outputs = np.isfinite(fields)
        # A diagnostic variable that the analysis lacks is predicted where any prognostic one has data: sea surface
        # temperature does not keep precipitation from land.
        anywhere = outputs[: self.variables.n("prognostic")].any(0)
        outputs = np.where(outputs.any((-2, -1))[:, None, None], outputs, anywhere)
        parts = [self.normalisation[role] for role in ROLES]
        names = [name for part in parts for name in part["channels"]]
        columns = {
            key: ("channel", np.array([np.nan if x is None else x for part in parts for x in part[key]], np.float64))
            for key in ("mean", "std", "change_std")
        }
        functions = transforms.names([variable for role in ROLES for variable in self.variables.role(role)])
        rest = np.ones((len(names) - len(outputs), *outputs.shape[1:]), bool)
        valid = (("channel", "latitude", "longitude"), np.concatenate([outputs, rest]))
        return Statistics(
            xr.Dataset(
                {**columns, "valid": valid, "transform": ("channel", functions), "missing_position": ("missing", [])},
                {"channel": names},
            )
        )


def without_keys(message: str) -> str:
    """Return a message on a data source for someone who forecasts, and has no experiment with the keys of a source."""
    told = message.replace("data.source.path", "--from")
    return told + " (`forecast` has no such key: write a file that needs none)" * ("data.source" in told)


def _has_variable(variable: Variable, datasets: Sequence[xr.Dataset]) -> bool:
    """Return whether a data set has a variable, under its name or an alias; `var` is a name of the files, which has no aliases."""
    if variable.spec.var:
        return any(variable.spec.var in dataset.data_vars for dataset in datasets)
    return any(find(variable.name, map(str, dataset.data_vars)) is not None for dataset in datasets)


def _positions(there: NDArray[Any], wanted: NDArray[np.float64], axis: str, where: str) -> NDArray[np.int64]:
    """Return the positions of the model's latitudes or longitudes among those of the data, longitudes modulo 360.

    Raises UserError where some are absent: the data are of a part of the model's area, or have other points in it.
    """
    apart = np.asarray(there, np.float64)[None] - wanted[:, None]
    distance = np.abs(turn(apart) if axis == "longitude" else apart)
    at = distance.argmin(1)
    nearest = distance.min(1)
    if nearest.max() <= _NEAR:
        return at
    spacing = np.abs(np.diff(wanted)).max() if len(wanted) > 1 else 0.0
    is_part = nearest.max() > max(spacing, 2 * np.median(nearest))
    cure = "give a file of the whole area" if is_part else "regrid the data"
    raise UserError(
        f"{where}: expected the {len(wanted)} {axis}s from {wanted[0]:g} to {wanted[-1]:g} of the model's grid, got "
        f"{len(there)} from {there[0]:g} to {there[-1]:g} without {wanted[nearest.argmax()]:g}; {cure}"
    )


def _forms(declared: str, trained: str) -> dict[str, float]:
    """Return the units that convert to those of the model's levels, with their factors.

    These are the units of the training data where both are known, else those declared, or a pressure in hPa or Pa. Levels
    without units may be anything: a file of pressures may lack them, and numbers of layers have none.
    """
    if not any(units.same_dimensions(text, "1") for text in (declared, trained)):
        try:
            if (found := units.between(declared, trained)) is not None:
                return {trained: found[0]}
        except UserError:
            return {}
    pressures = [unit for unit in ("hPa", "Pa") if units.same_dimensions(declared, unit)]
    return {declared: 1.0, **{unit: units.conversion(declared, unit)[0] for unit in pressures}}


def _has(there: NDArray[Any], wanted: Sequence[float]) -> bool:
    """Return whether all wanted levels are there."""
    return all(np.isclose(there, level, rtol=1e-6, atol=0).any() for level in wanted)


def _listed(levels: Sequence[float] | NDArray[Any], unit: str) -> str:
    return f"{', '.join(f'{level:g}' for level in levels)} {units_text(unit)}".rstrip()
