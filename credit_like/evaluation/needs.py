"""Check the requirements of an evaluation before forecasts are computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from credit_like.data import units
from credit_like.data.sources._conventions import PERIOD
from credit_like.data.store import FieldStore, StoreError, open_store
from credit_like.derive.fields import Derivation, scored_derivation
from credit_like.errors import UserError
from credit_like.evaluation.metrics import needs, needs_problem
from credit_like.grid import Grid
from credit_like.registry import did_you_mean
from credit_like.schema.data import DataSection, Role
from credit_like.schema.experiment import Experiment
from credit_like.schema.inference import Thresholds
from credit_like.variables import Variable, Variables

_LOG = logging.getLogger(__name__)


def check_metrics(
    metrics: Mapping[str, ModuleType], members: int, rainy: Sequence[str], thresholds: Thresholds, scored: Sequence[str]
) -> None:
    """Raise UserError for metrics that need an ensemble, thresholds or precipitation if there are none, or something unknown.

    `rainy`: the variables that are precipitation; `scored`: all variables that are scored. One line names all metrics
    with the same problem. Raises UserError for a threshold of a variable that is not scored as well.
    """
    problems = [f"evaluation.metrics: {problem}" for problem in map(needs_problem, metrics.values()) if problem]
    alone = [name for name, module in metrics.items() if needs(module) & {"members", "ensemble"}]
    if alone and members < 2:
        problems.append(
            f"evaluation.metrics: expected an ensemble for {', '.join(alone)}, got one member; remove "
            f"{'it' if len(alone) == 1 else 'them'} or change inference.ensemble.members"
        )
    dry = [name for name, module in metrics.items() if "precipitation" in needs(module)]
    if dry and not rainy:
        problems.append(
            f"evaluation.metrics: expected forecasts of precipitation for {', '.join(dry)}, got none, remove it"
        )
    of_events = [name for name, module in metrics.items() if "thresholds" in needs(module)]
    if of_events and not (thresholds.quantiles or any(thresholds.values.values())):
        problems.append(
            f"evaluation.thresholds: expected thresholds for {', '.join(of_events)}, got none; add some, such as "
            "`{quantiles: [0.1, 0.9]}`"
        )
    problems += [
        f"evaluation.thresholds.values.{name}: expected a variable that is scored ({', '.join(scored)}), got {name!r}, "
        f"change it{did_you_mean(name, scored)}"
        for name in thresholds.values
        if name not in scored
    ]
    if problems:
        raise UserError("\n".join(problems))


def possible_metrics(metrics: Mapping[str, ModuleType], grid: Grid) -> dict[str, ModuleType]:
    """Return the metrics without those that need whole circles of latitude where the grid has none, with a warning.

    Raises UserError where none is left.
    """
    left_out = [name for name in metrics if "circles" in needs(metrics[name]) and not grid.is_periodic]
    if left_out and len(left_out) == len(metrics):
        raise UserError(
            f"evaluation.metrics: expected a metric of a grid without whole circles of latitude, got {', '.join(left_out)}; "
            "add others"
        )
    if left_out:
        _LOG.warning("metrics left out: %s, which need whole circles of latitude", ", ".join(left_out))
    return {name: module for name, module in metrics.items() if name not in left_out}


def open_truth(experiment: Experiment, store: FieldStore) -> FieldStore:
    """Return the data to compare with: the experiment's own, or `evaluation.truth` with the forecast variables.

    Fields to derive are part of the result; where files of `evaluation.truth` hold all of them, they are read.
    Warns of variables that are sums over another time than in the experiment's data, which are not converted. Raises
    UserError if a forecast variable is absent, or in other units than a field is derived from, or the truth is on another grid.
    """
    derivation = scored_derivation(experiment, store.variables)
    if derivation is None:
        return _open_own(experiment, store)
    from credit_like.evaluation.derived import DerivedStore, published
    from credit_like.evaluation.sources import in_order_of

    derivation.check_units(store)
    ground = derivation.ground(store)
    if experiment.evaluation.truth is not None:
        archived = {variable.name: published(variable) for variable in derivation.outputs}
        units_of = {archived[name].name: derivation.attrs(name, store).get("units", "") for name in archived}
        if (found := _open_archived(experiment, tuple(archived.values()), units_of)) is not None:
            found = in_order_of(store.grid, found)
            return DerivedStore(found, derivation, ground, archived)
    return DerivedStore(_open_own(experiment, store, derivation), derivation, ground)


def check_truth(truth: FieldStore, store: FieldStore) -> None:
    """Raise UserError where the truth has another calendar than forecasts of the experiment, whose data are `store`."""
    if store.calendar != truth.calendar:
        raise UserError(
            f"expected a truth in the calendar {store.calendar} of the data, got {truth.calendar}; change it"
        )


def _open_archived(
    experiment: Experiment, variables: Sequence[Variable], units_of: Mapping[str, str]
) -> FieldStore | None:
    """Open `evaluation.truth` with variables on pressure levels, or return None if it lacks one of them.

    `units_of` has their units by name.
    """
    nothing = Role()
    on_levels = tuple(v.spec.model_copy(update={"levels": v.levels}) for v in variables if v.levels)
    surface = tuple(v.spec for v in variables if not v.levels)
    update = {
        "source": experiment.evaluation.truth,
        "prognostic": Role(level=on_levels, surface=surface),
        "diagnostic": nothing,
        "dynamic_forcing": nothing,
        "static": nothing,
    }
    data = experiment.data.model_copy(update=update)
    try:
        return _open_in_units(data, units_of)
    except StoreError:
        return None


def _open_own(experiment: Experiment, store: FieldStore, derivation: Derivation | None = None) -> FieldStore:
    """Return the truth of the predicted variables that are scored, and of those from which others are derived."""
    if experiment.evaluation.truth is None:
        return store
    needed = {one.name for v in derivation.outputs for one in derivation.inputs(v.name)} if derivation else set()
    data, written = experiment.data, experiment.inference.output.variables
    # A file of a variable's own is of the experiment's data, whose place the truth takes.
    scored = {
        role: getattr(data, role).model_copy(
            update={
                kind: tuple(
                    spec.model_copy(update={"path": None})
                    for spec in getattr(getattr(data, role), kind)
                    if not written or spec.name in written or spec.name in needed
                )
                for kind in ("level", "surface")
            }
        )
        for role in ("prognostic", "diagnostic")
    }
    nothing = {"level": (), "surface": ()}
    other = {role: getattr(data, role).model_copy(update=nothing) for role in ("dynamic_forcing", "static")}
    data = data.model_copy(update={"source": experiment.evaluation.truth, **scored, **other})
    wanted = {variable.name: store.attrs(variable).get("units", "") for variable in Variables(data).outputs}
    of_data = Variables(experiment.data).outputs
    if same := Variables.told_apart_by_files(variable for variable in of_data if variable.name in wanted):
        raise UserError(
            "evaluation.truth: expected variables with different names in the files, got several that are called "
            f"{same[0]} in different files of the data; remove it, or choose one of them in inference.output.variables"
        )
    try:
        truth = _open_in_units(data, wanted)
    except StoreError as error:
        raise UserError("\n".join(f"evaluation.truth: {message}" for _, message in error.problems)) from error
    for message in _other_sums(truth, store):
        _LOG.warning("evaluation.truth: %s", message)
    from credit_like.evaluation.sources import in_order_of

    return in_order_of(store.grid, truth)


def _other_sums(truth: FieldStore, store: FieldStore) -> Iterator[str]:
    """Yield a sentence for each predicted variable that the truth has as sums over another time than the data."""
    for variable in truth.variables.outputs:
        if truth.other_sums.get(variable.name) != store.other_sums.get(variable.name):
            theirs, mine = (one.sum_attrs(variable).get(PERIOD) for one in (truth, store))
            yield (
                f"sums: {variable.name} over {f'{theirs} h' if theirs else 'an unknown time'} in the files and over "
                f"{f'{mine} h' if mine else 'an unknown time'} in those of data.source, which are not converted; its scores "
                "compare different sums"
            )


def _open_in_units(data: DataSection, wanted: Mapping[str, str]) -> FieldStore:
    """Open the truth with variables in these units, by name, where these and the truth's own are known.

    Raises UserError for units that cannot be converted, and StoreError as `open_store` does.
    """
    store = open_store(data, Variables(data))
    others = {}
    for variable in store.variables.outputs:
        found = store.attrs(variable).get("units", "")
        try:
            factors = units.between(found, wanted[variable.name])
        except UserError as error:
            raise UserError(
                f"evaluation.truth: expected {variable.name} in units that convert to {wanted[variable.name]!r}, in which it is "
                f"predicted, got {found!r}; convert it or correct its units"
            ) from error
        if factors not in (None, (1.0, 0.0)):
            others[variable.name] = wanted[variable.name]
    if not others:
        return store
    roles = {name: _in_units(getattr(data, name), others) for name in ("prognostic", "diagnostic")}
    data = data.model_copy(update=roles)
    return open_store(data, Variables(data))


def _in_units(role: Role, wanted: Mapping[str, str]) -> Role:
    """Return a role whose variables are converted to these units, by name."""
    kinds = {
        kind: tuple(
            spec.model_copy(update={"units": wanted.get(spec.name, spec.units)}) for spec in getattr(role, kind)
        )
        for kind in ("level", "surface")
    }
    return role.model_copy(update=kinds)
