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
from credit_like.checkpoint.package import Package, load_static, open_package
from credit_like.context import Context
from credit_like.data.aliases import find
from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore, InMemory, open_store
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.inference.forecast import forecast
from credit_like.inference.times import refuse_gaps
from credit_like.naming import hours_text
from credit_like.parallel.runtime import Runtime
from credit_like.schema.experiment import Experiment
from credit_like.variables import ROLES, Variables

_FAR = 20.0
"""Standard deviations between the mean of an initial field and that of the training data beyond which units differ."""


def load_forecaster(path: str | Path | Package, device: str | torch.device = "cpu") -> Forecaster:
    """Load what `credit-like export` wrote, a file or a package, ready to forecast on `device`.

    Raises UserError for another kind of file, DamagedCheckpoint for an incomplete one.
    """
    if not isinstance(path, Package):
        path = open_package(path) if Path(path).is_dir() else Package(Path(path), None, "")
    export = load_export(path.weights)
    with reading_metadata(path.weights):
        experiment = Experiment.model_validate(export.metadata["experiment"])
        grid = Grid(*(np.array(export.metadata["grid"][axis]) for axis in ("latitude", "longitude")))
        normalisation = export.metadata["normalisation"]
    static = None if path.static is None else load_static(path.static)
    return Forecaster(export.build().to(device), experiment, normalisation, grid, static, path.sha256)


class Forecaster:
    """A trained model with everything that it needs except data.

    `normalisation`: role → channels, mean, std, change_std, as in exports. `static` has static fields for data without
    them. `sha256` is that of the weights' file, empty where it has not been computed.
    """

    def __init__(
        self,
        model: nn.Module,
        experiment: Experiment,
        normalisation: Mapping[str, Mapping[str, Sequence[Any]]],
        grid: Grid,
        static: xr.Dataset | None = None,
        sha256: str = "",
    ) -> None:
        self.model, self.experiment, self.normalisation, self.grid = model, experiment, normalisation, grid
        self.static, self.sha256 = static, sha256
        self.variables = Variables(experiment.data)

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
        known aliases, over time, level, latitude, longitude, on the grid on which the model was trained; diagnostic
        variables are optional, and so are the static ones of a package. Points missing at the first initial time are
        treated as points without data. Raises UserError for an absent variable, level, time or grid, and for a gap in time
        among what a forecast reads. Only one lead is in memory unless the caller keeps more.
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
        return forecast(stepper, store, self.variables, times, leads, history_len=data.history_len)

    def context(self, store: FieldStore, init: str) -> Context:
        """Return the context of forecasts from `store`: the model with its normalisation, corrections and noise.

        Points missing at the time `init` are treated as points without data.
        """
        statistics = self._statistics(store, store.index(init))
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        runtime = Runtime(device=device)
        context = Context.of(self.model, self.experiment, runtime, self.variables, store, statistics)
        if context.stepper.noise is not None:
            context.stepper.noise.reseed("members", self.experiment.inference.ensemble.seed)
        return context

    def open(self, dataset: xr.Dataset | Sequence[xr.Dataset]) -> FieldStore:
        """Return the data as the model's store; absent diagnostic variables are filled with NaN.

        Raises UserError as calling does.
        """
        datasets = [dataset] if isinstance(dataset, xr.Dataset) else list(dataset)
        first = self.variables.role("prognostic")[0]
        main = next((i for i, d in enumerate(datasets) if find(first.name, map(str, d.data_vars))), None)
        names = [str(name) for d in datasets for name in d.data_vars]
        for variable in self.variables.role("diagnostic"):
            if main is None or find(variable.name, names) is not None:
                continue
            dims = ("time", *(["level"] if variable.levels else []), "latitude", "longitude")
            sizes = {
                "level": len(variable.levels),
                **{str(dim): size for dim, size in datasets[main].sizes.items()},
            }
            shape = tuple(sizes[dim] for dim in dims)
            empty = xr.Variable(dims, np.broadcast_to(np.float32("nan"), shape))
            datasets[main] = datasets[main].assign({variable.name: empty})
        if self.static is not None:
            absent = [str(name) for name in self.static.data_vars if find(str(name), names) is None]
            datasets += [self.static[absent]] if absent else []
        data = self.experiment.data.model_copy(update={"source": tuple(map(InMemory, datasets))})
        store = open_store(data, self.variables)
        for axis in ("latitude", "longitude"):
            there, wanted = getattr(store.grid, axis), getattr(self.grid, axis)
            if len(there) != len(wanted) or np.abs(there - wanted).max() > 1e-3:
                raise UserError(
                    f"expected the {len(wanted)} {axis}s from {wanted[0]:g} to {wanted[-1]:g} of the model's grid, got "
                    f"{len(there)} from {there[0]:g} to {there[-1]:g}; regrid the data"
                )
        return store

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
                    f"expected {name} as the model knows it, with mean {mean:.4g} and standard deviation {std:.4g}, got a field "
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
        roles = ("prognostic", "diagnostic", "dynamic_forcing", "static")
        parts = [self.normalisation[role] for role in roles]
        names = [name for part in parts for name in part["channels"]]
        columns = {
            key: ("channel", np.array([np.nan if x is None else x for part in parts for x in part[key]], np.float64))
            for key in ("mean", "std", "change_std")
        }
        functions = transforms.names([variable for role in roles for variable in self.variables.role(role)])
        rest = np.ones((len(names) - len(outputs), *outputs.shape[1:]), bool)
        valid = (("channel", "latitude", "longitude"), np.concatenate([outputs, rest]))
        return Statistics(
            xr.Dataset(
                {**columns, "valid": valid, "transform": ("channel", functions), "missing_position": ("missing", [])},
                {"channel": names},
            )
        )
