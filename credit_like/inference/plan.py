"""The plan of an experiment's forecasts: initial times, leads and files; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import credit_like
from credit_like import registry
from credit_like.data.declared import parametric
from credit_like.data.store import FieldStore
from credit_like.data.units import same_dimensions
from credit_like.derive.fields import Derivation, written_derivation
from credit_like.inference.layout import ForecastLayout, choose
from credit_like.inference.times import initial_times, kept_leads, times_at
from credit_like.inference.writers._base import check_folder
from credit_like.naming import weights_text
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variable, Variables

_ON_PRESSURE = {"units": "hPa", "long_name": "pressure", "standard_name": "air_pressure"}


@dataclass(frozen=True)
class ForecastPlan:
    """The properties of a set of forecasts that are known before the first step."""

    init: tuple[int, ...]
    leads: int
    layout: ForecastLayout
    groups: tuple[tuple[int, ...], ...]
    """Initial times (as positions in `init`) that are computed together. The groups are the same in every run and for
    any number of ranks, because the rounding of a batched product may depend on the batch.
    """


def plan(
    experiment: Experiment,
    store: FieldStore,
    variables: Variables,
    checkpoint: str,
    missing: Sequence[int] = (),
    parts: tuple[int, int] = (1, 1),
) -> ForecastPlan:
    """Plan initial times, leads and file layout of the experiment's forecasts.

    `parts` are the ranks along the rows and columns of a field that write it. Raises UserError for times, leads, variables
    or levels that do not exist.
    """
    section, data = experiment.inference, experiment.data
    init = initial_times(section, store, data, missing)
    derivation = written_derivation(experiment, variables)
    derived = derivation.outputs if derivation else ()
    derived_attrs = _derived_attributes(store, derivation) if derivation else {}
    made_by = f"credit-like {credit_like.__version__}, {experiment.model.type}"
    attrs = {
        "Conventions": "CF-1.11",
        "title": f"forecasts of {experiment.name}",
        "source": f"{made_by}, {weights_text(checkpoint, section.weights)}",
        "experiment": experiment.name,
        "checkpoint": checkpoint,
    }
    layout = ForecastLayout(
        init=times_at(store, init),
        leads=kept_leads(section, data.timestep),
        timestep=round(data.timestep.total_seconds()),
        members=section.ensemble.members,
        grid=store.grid,
        variables=(*variables.outputs, *derived),
        chosen=choose(variables.outputs, section.output.variables, section.output.levels)
        | {variable.name: variable.levels for variable in derived},
        variable_attrs=output_attributes(store, variables) | derived_attrs,
        attrs=attrs,
        cf=section.output.flavour == "cf",
        parts=parts,
    )
    together = max(1, section.batch_size // section.ensemble.members)
    groups = tuple(tuple(range(i, min(i + together, len(init)))) for i in range(0, len(init), together))
    return ForecastPlan(tuple(init), max(layout.leads), layout, groups)


def check_files(experiment: Experiment, store: FieldStore, variables: Variables) -> None:
    """Raise UserError for forecasts that their format or their folder does not allow; write nothing."""
    folder, output = experiment.forecast_folder, experiment.inference.output
    registry.of("writer", output).open_writer(output, plan(experiment, store, variables, "").layout, folder)
    check_folder(folder)


def output_attributes(store: FieldStore, variables: Variables) -> dict[str, dict[str, str]]:
    """Return the attributes of every predicted variable, and those of the levels of each as `level_<variable>`."""
    found = {variable.name: store.attrs(variable) | store.sum_attrs(variable) for variable in variables.outputs}
    on_levels = [variable for variable in variables.outputs if variable.levels]
    return found | {f"level_{variable.name}": _level_attributes(store, variable) for variable in on_levels}


def _derived_attributes(store: FieldStore, derivation: Derivation) -> dict[str, dict[str, str]]:
    """Return the same as `output_attributes` of derived variables."""
    found = {variable.name: derivation.attrs(variable.name, store) for variable in derivation.outputs}
    for variable in derivation.outputs:
        base = None if derivation.config.pressure_levels else derivation.base(variable.name)
        if variable.levels:
            found[f"level_{variable.name}"] = _level_attributes(store, base) if base else dict(_ON_PRESSURE)
    return found


def _level_attributes(store: FieldStore, variable: Variable) -> dict[str, str]:
    """Return the attributes of a variable's levels in forecasts, from those of the data.

    The formula of a parametric coordinate, such as a hybrid one, is not written, and CF does not allow its name without it.
    """
    given = {key: value for key, value in store.level_attrs(variable).items() if value}
    if parametric(store, variable):
        del given["standard_name"]
    elif same_dimensions(given.get("units", ""), "Pa"):
        return {"units": given["units"], "long_name": "pressure", "standard_name": "air_pressure"}
    if given.get("standard_name") in ("height", "altitude"):
        given.setdefault("positive", "up")
    return {key: given[key] for key in ("units", "long_name", "standard_name", "positive") if key in given}
