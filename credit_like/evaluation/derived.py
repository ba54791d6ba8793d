"""Derived fields of forecasts and of the truth, so that they are scored like predicted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like.data.store import Fields, FieldStore, Out
from credit_like.derive.fields import PL, Derivation
from credit_like.evaluation.sources import Array, ForecastFiles
from credit_like.grid import Grid
from credit_like.variables import Variable, Variables


class DerivedStore(FieldStore):
    """A store that computes derived variables when they are read, and reads the others.

    `ground` (H, W) is the geopotential of the surface. Variables in `direct` are in the files under other names.
    """

    def __init__(
        self,
        store: FieldStore,
        derivation: Derivation,
        ground: NDArray[np.float64] | None,
        direct: Mapping[str, Variable] | None = None,
    ) -> None:
        super().__init__(
            store.variables,
            store.grid,
            store.times,
            store.step_seconds,
            store._sources,
            store._places,
            list(store._datasets.values()),
        )
        self._order = store._order
        self.derivation, self.ground, self.direct = derivation, ground, dict(direct or {})

    def attrs(self, variable: Variable) -> dict[str, str]:
        if variable.name in self.direct:
            return super().attrs(self.direct[variable.name])
        if variable.role == "derived":
            return self.derivation.attrs(variable.name, self)
        return super().attrs(variable)

    def level_attrs(self, variable: Variable) -> dict[str, str]:
        if variable.name in self.direct:
            return super().level_attrs(self.direct[variable.name])
        if variable.role != "derived" or not variable.levels:
            return super().level_attrs(variable)
        if self.derivation.config.pressure_levels:
            return {"units": "hPa"}
        return super().level_attrs(next(one for one in self.derivation.inputs(variable.name) if one.levels))

    def read(
        self,
        variables: Sequence[Variable],
        times: Sequence[int] | NDArray[np.int64],
        rows: slice = slice(None),
        out: Out | None = None,
        columns: slice = slice(None),
    ) -> Fields:
        if all(variable.role != "derived" for variable in variables):
            return super().read(variables, times, rows, out, columns)
        parts = [self._read_one(variable, np.asarray(times, np.int64), rows) for variable in variables]
        result: Fields = np.concatenate(parts, 1)[..., columns]
        if out is None:
            return result
        for target, values in zip(out, result, strict=True):
            target[...] = values
        return np.empty((0, 0, 0, 0), np.float32)

    def _read_one(self, variable: Variable, times: NDArray[np.int64], rows: slice) -> Fields:
        if variable.role != "derived":
            return super().read([variable], times, rows)
        if variable.name in self.direct:
            return super().read([self.direct[variable.name]], times, rows)
        first, last, _ = rows.indices(self.grid.height)
        # Derivatives need a neighbouring row on each side, and a pole of a sector those of its neighbour.
        around = slice(max(0, first - 2), min(self.grid.height, last + 2))
        grid = Grid(self.grid.latitude[around], self.grid.longitude)
        inputs = self.derivation.inputs(variable.name)
        shape = (len(times), len(variable), last - first, self.grid.width)
        result = np.empty(shape, np.float32)
        ground = None if self.ground is None else self.ground[around]
        for t in range(len(times)):
            fields = super().read(inputs, times[t : t + 1], around)
            values = derive(self.derivation, variable, inputs, fields, ground, grid)
            result[t] = values[0, :, first - around.start : last - around.start]
        return result


class DerivedFiles(ForecastFiles):
    """Forecasts with derived variables: those of the files where these have them, others computed from the files."""

    def __init__(self, dataset: xr.Dataset, truth: DerivedStore, provenance: str) -> None:
        self.derivation, self.ground = truth.derivation, truth.ground
        super().__init__(dataset, truth, provenance)
        for variable in self.derivation.outputs:
            self._fit(self._in_files(variable))

    def units_of(self, variable: Variable) -> tuple[str, str]:
        if variable.role != "derived":
            return super().units_of(variable)
        names = {one.name for one in self.derivation.outputs}
        own = variable if variable.name in names else replace(variable, name=f"{variable.name}{PL}")
        of_levels = "hPa" if self.derivation.config.pressure_levels else self.truth.level_units(variable)
        return self.truth.attrs(own).get("units", ""), of_levels

    def levels_of(self, variable: Variable) -> list[int]:
        there = super().levels_of(self._in_files(variable))
        if there or variable.role != "derived":
            return there
        return list(range(len(variable))) if self._can_derive(variable) else []

    def _can_derive(self, variable: Variable) -> bool:
        inputs = self.derivation.inputs(variable.name)
        return all(len(super(DerivedFiles, self).levels_of(one)) == len(one) for one in inputs)

    def _in_files(self, variable: Variable) -> Variable:
        """Return the variable of the files that is a derived one: files of others have `temperature` on such levels."""
        own = published(variable)
        if self.name_of(variable) is None and own is not variable and not self._can_derive(variable):
            return own
        return variable

    def fields(self, init: int, leads: Sequence[int], variable: Variable, levels: Sequence[int]) -> Array | None:
        there = self._in_files(variable)
        if variable.role != "derived" or self.name_of(there) is not None:
            return super().fields(init, leads, there, levels)
        if not self._can_derive(variable):
            return None
        inputs = self.derivation.inputs(variable.name)
        result = []
        for lead in leads:
            parts = [super(DerivedFiles, self).fields(init, [lead], one, range(len(one))) for one in inputs]
            fields = np.concatenate([part[:, 0] for part in parts if part is not None], 1)
            values = derive(self.derivation, variable, inputs, fields, self.ground, self.truth.grid)
            result.append(values[:, list(levels)].astype(np.float64))
        return np.stack(result, 1)


def derive(
    derivation: Derivation,
    variable: Variable,
    inputs: Sequence[Variable],
    fields_BCHW: NDArray[np.float32] | Array,
    ground_HW: NDArray[np.float64] | None,
    grid: Grid,
) -> Fields:
    """Compute (B, levels, H, W) of one derived variable from stacked inputs."""
    slices = Variables.slices(inputs)
    import torch  # here, so that figures of predicted fields need not wait for it

    tensors = {name: torch.from_numpy(fields_BCHW[:, channels]) for name, channels in slices.items()}
    ground = None if ground_HW is None else torch.from_numpy(np.ascontiguousarray(ground_HW))
    with torch.inference_mode():
        result: Fields = derivation(tensors, ground, grid, [variable.name])[variable.name].numpy()
    return result


def forecast_files(dataset: xr.Dataset, truth: FieldStore, provenance: str) -> ForecastFiles:
    """Return forecasts on the truth's grid, with derived variables where the truth has them."""
    if isinstance(truth, DerivedStore):
        return DerivedFiles(dataset, truth, provenance)
    return ForecastFiles(dataset, truth, provenance)


def published(variable: Variable) -> Variable:
    """Return a derived variable under the name that archives on pressure levels use: `temperature` for `temperature_pl`."""
    name = variable.name.removesuffix(PL)
    if variable.role != "derived" or name == variable.name:
        return variable
    return replace(variable, name=name, spec=variable.spec.model_copy(update={"name": name}))


def scored_variables(variables: Variables, truth: FieldStore) -> Variables:
    """Return the variables to score: the model's, and derived ones where the truth has them.

    Where the truth's files hold derived variables themselves, these alone are scored.
    """
    if not isinstance(truth, DerivedStore):
        return variables
    return variables.with_outputs(
        truth.derivation.outputs if truth.direct else (*variables.outputs, *truth.derivation.outputs)
    )


def training_store(store: FieldStore, truth: FieldStore) -> FieldStore:
    """Return the store from which the climatology is computed, with derived variables where the truth has them."""
    return DerivedStore(store, truth.derivation, truth.ground) if isinstance(truth, DerivedStore) else store
