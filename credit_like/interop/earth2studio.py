"""Exports as prognostic models of NVIDIA Earth2Studio (tested with release 0.19).

model = load_model("package")                               # what `credit-like export RUN --package` wrote
io = earth2studio.run.deterministic(["2020-01-01"], 40, model, data, io)

The protocol is `earth2studio.models.px.base.PrognosticModel`: tensors whose last dimensions are time, lead_time, variable,
lat and lon, with their coordinates in an `OrderedDict`; other dimensions, such as members, may come before these. A
protocol needs no base class, so nothing of Earth2Studio is imported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from credit_like.checkpoint.package import open_package
from credit_like.data import units
from credit_like.data.aliases import find
from credit_like.data.named import datasets
from credit_like.data.times import to_text
from credit_like.errors import UserError
from credit_like.inference.forecast import computes_in_bfloat16
from credit_like.inference.forecaster import Forecaster, load_forecaster
from credit_like.rollout import rollout
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variable, Variables

CoordSystem = OrderedDict[str, NDArray[Any]]
_DIMS = ("time", "lead_time", "variable", "lat", "lon")
_UNLIMITED = 10**9  # leads; the caller ends the iteration

# Earth2Studio's names (earth2studio/lexicon/base.py) of variables on pressure levels and at the surface.
_ON_LEVELS = {
    "temperature": "t", "u_component_of_wind": "u", "v_component_of_wind": "v", "specific_humidity": "q",
    "geopotential": "z", "vertical_velocity": "w", "relative_humidity": "r",
}  # fmt: skip
_SURFACE = {
    "2m_temperature": "t2m", "2m_dewpoint_temperature": "d2m", "10m_u_component_of_wind": "u10m",
    "10m_v_component_of_wind": "v10m", "100m_u_component_of_wind": "u100m", "100m_v_component_of_wind": "v100m",
    "surface_pressure": "sp", "mean_sea_level_pressure": "msl", "sea_surface_temperature": "sst", "sea_ice_cover": "sic",
    "total_column_water_vapour": "tcwv", "total_column_water": "tcw", "total_cloud_cover": "tcc", "skin_temperature": "skt",
    "snow_depth": "sd", "total_precipitation_6hr": "tp06", "total_precipitation_12hr": "tp12",
    "total_precipitation_24hr": "tp24", "total_precipitation": "tp",
}  # fmt: skip
_UNITS = {
    **dict.fromkeys(("t", "t2m", "d2m", "sst", "skt"), "K"),
    **dict.fromkeys(("u", "v", "u10m", "v10m", "u100m", "v100m"), "m s-1"),
    **dict.fromkeys(("q",), "kg kg-1"),
    **dict.fromkeys(("z",), "m2 s-2"),
    **dict.fromkeys(("w",), "Pa s-1"),
    **dict.fromkeys(("sp", "msl"), "Pa"),
    **dict.fromkeys(("tcwv", "tcw"), "kg m-2"),
    **dict.fromkeys(("tp", "tp06", "tp12", "tp24"), "m"),
}
"""Units of Earth2Studio's sources, as far as they all have the same."""
_PRESSURE_LEVELS = frozenset((
    1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100, 125, 150, 175, 200, 225, 250, 300, 350, 400, 450, 500, 550, 600, 650, 700, 750,
    775, 800, 825, 850, 875, 900, 925, 950, 975, 1000,
))  # fmt: skip


class Package(Protocol):
    """Interface of `earth2studio.models.auto.Package`, as far as it is used here."""

    def resolve(self, file_path: str) -> str:
        """Return the path of a local copy of one of the package's files."""


def load_model(package: Package | str | Path, device: str | torch.device = "cpu") -> Prognostic:
    """Load a prognostic model from a package: Earth2Studio's, or a folder or file of `credit-like export`.

    Raises UserError for other files, for damaged ones, and for a model with forcing that only its own data have.
    """
    if isinstance(package, str | Path):
        return Prognostic(load_forecaster(package, device))
    return Prognostic(load_forecaster(open_package(str(package), package.resolve), device))


def names_of(variable: Variable, pressure: bool) -> tuple[str, ...]:
    """Return Earth2Studio's names of a variable's channels, or the channels' own where it has none.

    `pressure`: whether levels are pressures in hPa. A variable that is known to be in other units has none.
    """
    table = _ON_LEVELS if variable.levels else _SURFACE
    known = find(variable.name, table)
    if known is not None and units.same(variable.spec.units or "", _UNITS.get(table[known], "")) is False:
        return variable.channels
    if known is None or (variable.levels and not (pressure and _PRESSURE_LEVELS.issuperset(variable.levels))):
        return variable.channels
    return tuple(f"{table[known]}{level:g}" for level in variable.levels) or (table[known],)


class Prognostic:
    """A model that satisfies Earth2Studio's protocol, with the numbers of `credit-like rollout`.

    Inputs are the prognostic channels and the forcing that persists; outputs the prognostic and diagnostic ones. Units are
    those of the training data, which for ERA5 are those of Earth2Studio; variables in others have names of their own. Every
    initial state is forecast by itself. The first dimension before `time`, if any, numbers the members of a model with noise.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        self.forecaster = forecaster
        experiment, variables = forecaster.experiment, forecaster.variables
        forcing = [variable for variable in variables.role("dynamic_forcing") if not variable.spec.compute]
        if other := [variable.name for variable in forcing if variable.spec.fill != "persist"]:
            raise UserError(
                f"expected forcing that is computed or persists, got {', '.join(other)} from the data alone; train the "
                "model with `fill: persist` for it, or forecast with `credit-like forecast`"
            )
        if variables.role("static") and forecaster.static is None:
            raise UserError(
                "expected a package with static fields, got an export without; write it with `credit-like export RUN "
                "--package FOLDER` where the data of the run can be read"
            )
        self._inputs = (*variables.role("prognostic"), *forcing)
        pressure = _on_pressure(experiment, variables)
        self.inputs = np.array([name for variable in self._inputs for name in names_of(variable, pressure)])
        self.outputs = np.array([name for variable in variables.outputs for name in names_of(variable, pressure)])
        self.step = np.timedelta64(round(experiment.data.timestep.total_seconds()), "s")

    def to(self, device: Any) -> Prognostic:
        """Move the model to a device."""
        self.forecaster.model.to(device)
        return self

    def input_coords(self) -> CoordSystem:
        """Return the coordinates of the input: `lead_time` has the times of the model's input frames."""
        frames = self.forecaster.experiment.data.history_len
        return self._coords(self.inputs, np.arange(1 - frames, 1) * self.step)

    def output_coords(self, input_coords: CoordSystem) -> CoordSystem:
        """Return the coordinates of the output for those of an input.

        Raises UserError, a ValueError, for coordinates that are not those of `input_coords` at some lead time.
        """
        wanted, dims = self.input_coords(), tuple(input_coords)
        if dims[-5:] != _DIMS:
            raise UserError(
                f"expected dimensions that end with {', '.join(_DIMS)}, got {', '.join(dims)}; reorder them"
            )
        now = input_coords["lead_time"][-1:]
        for name in ("lead_time", "variable", "lat", "lon"):
            there = input_coords[name] - now if name == "lead_time" else input_coords[name]
            if there.shape != wanted[name].shape or not _equal(there, wanted[name]):
                raise UserError(f"expected {name} of {_told(wanted[name])}, got {_told(there)}; select them")
        result = OrderedDict(input_coords)
        result["lead_time"], result["variable"] = now + self.step, self.outputs
        return result

    def __call__(self, x: Tensor, coords: CoordSystem) -> tuple[Tensor, CoordSystem]:
        """Return the forecast one step ahead, and its coordinates."""
        with closing(self._states(x, coords)) as states:
            return next(states)

    def create_iterator(self, x: Tensor, coords: CoordSystem) -> Iterator[tuple[Tensor, CoordSystem]]:
        """Yield the initial state, then the forecasts of one step after the other, each with its coordinates.

        Outputs that are no inputs are NaN in the initial state.
        """
        first = self.output_coords(coords)
        first["lead_time"] = coords["lead_time"][-1:]
        initial = x.new_full((*x.shape[:-4], 1, len(self.outputs), *x.shape[-2:]), torch.nan)
        predicted = self.forecaster.variables.n("prognostic")
        initial[..., :predicted, :, :] = x[..., -1:, :predicted, :, :]
        yield initial, first
        with closing(self._states(x, coords)) as states:
            yield from states

    def _states(self, x: Tensor, coords: CoordSystem) -> Generator[tuple[Tensor, CoordSystem]]:
        after = self.output_coords(coords)
        leading, times = x.shape[:-5], np.asarray(coords["time"], "datetime64[ns]")
        states = x.reshape(-1, *x.shape[-4:])
        with ExitStack() as stack:
            runs = [
                stack.enter_context(
                    closing(self._forecast(state, times[i % len(times)] + coords["lead_time"], i // len(times)))
                )
                for i, state in enumerate(states)
            ]
            for fields in zip(*runs, strict=True):
                y = torch.stack(fields).to(x)
                yield y.reshape(*leading, len(times), 1, *y.shape[1:]), OrderedDict(after)
                after["lead_time"] = after["lead_time"] + self.step

    def _forecast(self, x_TCHW: Tensor, times: NDArray[np.datetime64], member: int) -> Generator[Tensor]:
        """Yield the outputs (C, H, W) of one forecast, NaN at points without data."""
        forecaster = self.forecaster
        store = forecaster.open(self._datasets(x_TCHW, times))
        stepper = forecaster.context(store, to_text(store.times[-1])).stepper.eval()
        steps = rollout(
            stepper,
            store,
            forecaster.variables,
            [len(times) - 1],
            _UNLIMITED,
            history_len=len(times),
            members=[member],
            amp=computes_in_bfloat16(forecaster.experiment),
            without_gradients=torch.no_grad,  # whose results others may change in place
        )
        for _, state in steps:
            yield stepper.masked(stepper.outputs(state)).float()[0]

    def _datasets(self, x_TCHW: Tensor, times: NDArray[np.datetime64]) -> list[xr.Dataset]:
        """Return the variables of one input, as files of the training data have them."""
        grid, values = self.forecaster.grid, x_TCHW.detach().cpu().float().numpy()
        axes = {"time": times, "latitude": grid.latitude, "longitude": grid.longitude}

        def attrs(variable: Variable) -> dict[str, str]:
            return {"units": variable.spec.units} if variable.spec.units else {}

        return datasets(self._inputs, values, axes, attrs)

    def _coords(self, variables: NDArray[np.str_], lead_time: NDArray[np.timedelta64]) -> CoordSystem:
        grid, empty = self.forecaster.grid, np.empty(0)
        values = (empty, empty, lead_time, variables, grid.latitude, grid.longitude)
        return OrderedDict(zip(("batch", *_DIMS), values, strict=True))


def _on_pressure(experiment: Experiment, variables: Variables) -> bool:
    """Return whether levels are pressures in hPa, which numbers of layers are not: they end before 500."""
    sections = (experiment.inference.derive, experiment.evaluation.derive)
    plain = all(section is None or section.model_levels == "pressure" for section in sections)
    return plain and max((level for variable in variables for level in variable.levels), default=0) >= 500


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return bool(np.abs(one - other).max() <= 1e-3) if one.dtype.kind == "f" else bool((one == other).all())


def _told(values: NDArray[Any]) -> str:
    return f"{len(values)} values" + (f" from {values[0]} to {values[-1]}" if len(values) else "")
